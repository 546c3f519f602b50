"""The cores that engines without a GPU compute on, shared out between workers and runs side by side.

vLLM's all-reduce on CPU spins while it waits for the other rank. Ranks that have no core of their own burn
the time of those that they wait for: eight engines of two ranks on two cores were seen to stand still for
minutes, where one after the other they take seconds. So a case holds as many cores as its engine has ranks.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.deadline import wait_for
from nvsnap_conformance.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nvsnap_conformance.deadline import Deadline


def usable() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


@contextmanager
def held(count: int, deadline: Deadline, *, folder: Path | None = None) -> Iterator[int]:
    """Hold ``count`` cores for a block, or all where there are fewer; give how many those are.

    They are locks and nothing else: no process is bound to a core. Whoever came first gets his first, however
    many he wants, so that a wide engine is not passed by narrow ones for ever. A holder that dies lets go.
    Raises :class:`DeadlineExceeded`.
    """
    place = folder or cache_dir("cores")
    total = usable()
    wanted = min(count, total)
    if wanted == 0:
        yield 0
        return
    with ExitStack() as mine:
        try:
            with FileLock(place / "queue.lock", timeout=deadline.remaining()):
                _take(wanted, [FileLock(place / f"{number}.lock") for number in range(total)], mine, deadline)
        except (Timeout, DeadlineExceeded) as error:
            raise DeadlineExceeded(
                f"{wanted} of {total} cores were not given back by other runs within {deadline.budget:.0f} s",
                cause=f"other runs hold them, by locks in {place}",
                next_step="wait for those runs, or start fewer at a time",
            ) from error
        yield wanted


def _take(wanted: int, waiting: list[FileLock], mine: ExitStack, deadline: Deadline) -> None:
    """Take ``wanted`` of the locks as they come free; nobody else takes any meanwhile."""
    left = wanted

    def attempt() -> bool:
        nonlocal left
        for lock in list(waiting):
            if left == 0:
                break
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            mine.callback(lock.release)
            waiting.remove(lock)
            left -= 1
        return left == 0

    wait_for("cores", attempt, deadline, interval=0.2)
