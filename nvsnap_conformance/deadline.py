"""Monotonic time budgets and the one way in which the suite waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from nvsnap_conformance.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True)
class Deadline:
    """A point on the monotonic clock; ``budget`` is the whole allowance in seconds, for messages."""

    at: float
    budget: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and ``seconds`` from now."""
        other = Deadline.after(seconds)
        return other if other.at < self.at else self

    def reserve(self, share: float) -> Deadline:
        """Return a deadline that leaves ``share`` (0 to 1) of the time still left for what comes after."""
        left = self.remaining() * (1.0 - share)
        return Deadline(time.monotonic() + left, left)


def wait_for(
    what: str,
    probe: Callable[[], T | None],
    deadline: Deadline,
    *,
    interval: float = 0.05,
    detail: Callable[[], str] | None = None,
) -> T:
    """Call ``probe`` until it returns something other than ``None`` or ``False`` and return that.

    ``interval`` is the pause between two looks, in seconds. Raises :class:`DeadlineExceeded` with
    ``detail()`` as the cause when the deadline passes first. An exception from ``probe`` ends the wait.
    """
    pause = min(interval, 0.01)
    while True:
        value = probe()
        if value is not None and value is not False:
            return value
        if deadline.expired:
            raise DeadlineExceeded(
                f"{what}: not within {deadline.budget:.1f} s", cause=detail() if detail else ""
            )
        time.sleep(min(pause, deadline.remaining()))
        pause = min(interval, pause * 1.5)
