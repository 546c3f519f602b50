"""Votes of all ranks over a torch.distributed store, each bounded in time.

A collective would hang where one rank failed before it; a vote names the rank that is missing instead.
"""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta
from typing import Any

from nvsnap_hooks.errors import PeerRefused, PeerSilent

_calls = itertools.count(1)


def next_call() -> int:
    """Return the number of this call, the same on every rank.

    The engine broadcasts each RPC to all ranks in one order, so counting the calls agrees without talking,
    also after one that failed. To be called exactly once per RPC that votes, before anything can fail.
    """
    return next(_calls)


class Rendezvous:
    """Exchanges small JSON values between ``size`` ranks; ``seconds`` bounds each exchange."""

    def __init__(self, store: Any, name: str, *, rank: int, size: int, seconds: float) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._seconds = seconds

    def within(self, seconds: float) -> Rendezvous:
        """Return the same rendezvous with another bound, in seconds."""
        return Rendezvous(self._store, self._name, rank=self._rank, size=self._size, seconds=seconds)

    def exchange(self, step: str, value: Any) -> list[Any]:
        """Give ``value`` and return every rank's, by rank; raise :class:`PeerSilent` where one is missing."""
        self._store.set(self._key(step, self._rank), json.dumps(value))
        end = time.monotonic() + self._seconds
        missing = []
        for rank in range(self._size):
            left = max(0.05, end - time.monotonic())
            try:
                self._store.wait([self._key(step, rank)], timedelta(seconds=left))
            except RuntimeError:
                missing.append(rank)
        if missing:
            raise PeerSilent(f"no vote from ranks {missing} on {step!r} within {self._seconds:.0f} s")
        return [json.loads(self._store.get(self._key(step, rank))) for rank in range(self._size)]

    def agree(self, step: str, problem: str | None) -> None:
        """Vote ``None`` for yes or a reason for no; raise :class:`PeerRefused` unless all said yes."""
        votes = self.exchange(step, problem)
        against = [f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if vote is not None]
        if against:
            raise PeerRefused(f"not all ranks agree on {step!r}: " + "; ".join(against))

    def part(self) -> None:
        """Say goodbye; rank 0, which may serve the store, waits for the others so that none loses it."""
        self._store.set(self._key("part", self._rank), "1")
        if self._rank == 0:
            others = [self._key("part", rank) for rank in range(1, self._size)]
            if others:
                self._store.wait(others, timedelta(seconds=self._seconds))

    def _key(self, step: str, rank: int) -> str:
        return f"nvsnap/{self._name}/{step}/{rank}"
