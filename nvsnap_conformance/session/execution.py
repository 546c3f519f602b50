"""Whether the body of a case was really run: without that a case has not passed, whatever pytest says.

pytest has options that leave the call phase out (``--setup-plan``, ``--setup-only``), and a plugin may take
the call over; each reports nothing but passed phases then.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_RAN: pytest.StashKey[bool] = pytest.StashKey()

NOT_RUN = "the body of the case was not run to its end: a pytest option or a plugin kept it from running"
"""What is said of a case of which pytest reports no failure, and whose body did not run."""


def ran(item: pytest.Item) -> bool:
    """Whether the test function of ``item`` was entered and returned, since :func:`forget`."""
    return item.stash.get(_RAN, False)


def forget(item: pytest.Item) -> None:
    """Take ``item`` as not run: it may be run again."""
    item.stash[_RAN] = False


@contextmanager
def watched(item: pytest.Function) -> Iterator[None]:
    """Note on ``item`` that its test function returned, if that is called in this context."""
    function = item.obj
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def observed(*args: Any, **kwargs: Any) -> Any:
            value = await function(*args, **kwargs)
            item.stash[_RAN] = True
            return value

    else:

        @functools.wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            item.stash[_RAN] = True
            return value

    item.obj = observed
    try:
        yield
    finally:
        item.obj = function
