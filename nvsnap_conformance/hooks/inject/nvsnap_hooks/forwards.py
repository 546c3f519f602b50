"""Counts forward passes, and those that reached a prepared worker.

The counter wraps ``execute_model`` and ``execute_dummy_batch`` on the worker *instance*, once, at the
first RPC; it passes arguments, result and exceptions through unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "nvsnap_counted"

_counts = {"total": 0, "while_prepared": 0}
_state = {"prepared": False}


def install(worker: Any) -> None:
    """Wrap the worker's forward methods unless they are wrapped already."""
    for name in ("execute_model", "execute_dummy_batch"):
        method = getattr(worker, name, None)
        if method is not None and not hasattr(method, _MARK):
            setattr(worker, name, _counted(method))


def _counted(method: Any) -> Any:
    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        _counts["total"] += 1
        if _state["prepared"]:
            _counts["while_prepared"] += 1
        return method(*args, **kwargs)

    setattr(forward, _MARK, True)
    return forward


def note(method: str) -> None:
    """Take note that a hook's ``method`` was answered without an error."""
    if method == "prepare":
        _state["prepared"] = True
    elif method == "restore":
        _state["prepared"] = False


def counts() -> dict[str, int]:
    """Return the forward passes since the first RPC, and how many of them met a prepared worker."""
    return dict(_counts)
