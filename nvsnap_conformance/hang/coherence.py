"""Whether a bundle can be the record of one engine at all: what contradicts itself is judged as nothing."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from nvsnap_conformance.hang.model import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nvsnap_conformance.hang.model import Bundle, Member, Round

T = TypeVar("T", int, tuple[int, float])

MOST_RANKS = 1 << 20
"""A world size above this is damage, not an engine."""


def contradictions(bundle: Bundle) -> list[str]:
    """Return in words what in ``bundle`` cannot be true together, in whatever order it holds that."""
    return [*_of_members(bundle.members), *_of_size(bundle.world_size, bundle.members), *_of_rounds(bundle)]


def credible_size(size: int | None, members: Sequence[Member]) -> bool:
    """Whether an engine of ``size`` ranks can have these; ``None`` is any size."""
    return not _of_size(size, members)


def looked_for(rounds: Iterable[Round]) -> float:
    """Return the seconds between the first and the last round, 0 where there are none."""
    starts = [min(sample.at for sample in taken.samples) for taken in rounds if taken.samples]
    return max(starts) - min(starts) if starts else 0.0


def _of_members(members: Sequence[Member]) -> list[str]:
    found = [f"{n} processes have pid {pid}" for pid, n in _repeated(m.pid for m in members)]
    ranks = [m.rank for m in members if m.role is Role.RANK]
    known = [rank for rank in ranks if rank is not None]
    found += [f"{n} processes are rank {rank}" for rank, n in _repeated(known)]
    if len(known) < len(ranks):
        found.append(f"{len(ranks) - len(known)} ranks have no number")
    found += [f"there is no rank {rank}" for rank in sorted(set(known)) if not 0 <= rank < MOST_RANKS]
    return found


def _of_size(size: int | None, members: Sequence[Member]) -> list[str]:
    if size is None:
        return []
    if not 0 < size <= MOST_RANKS:
        return [f"an engine cannot have {size} ranks"]
    beyond = {m.rank for m in members if m.role is Role.RANK and m.rank is not None and m.rank >= size}
    return [f"an engine of {size} ranks has no rank {max(beyond)}"] if beyond else []


def _of_rounds(bundle: Bundle) -> list[str]:
    found = [f"{n} rounds are number {index}" for index, n in _repeated(r.index for r in bundle.rounds)]
    if not all(math.isfinite(sample.at) for taken in bundle.rounds for sample in taken.samples):
        return [*found, "a sample was taken at no moment"]
    moments = _repeated((s.pid, s.at) for taken in bundle.rounds for s in taken.samples)
    if moments:
        # No two looks read one process at one moment: a round was copied, or holds a process twice.
        found.append(f"pid {moments[0][0][0]} was read several times at one moment, so a look is there twice")
    starts = [
        min(sample.at for sample in taken.samples)
        for taken in sorted(bundle.rounds, key=lambda r: r.index)
        if taken.samples
    ]
    if starts != sorted(starts):
        found.append("later rounds were taken earlier, so they are of several recordings")
    return found


def _repeated(values: Iterable[T]) -> list[tuple[T, int]]:
    return sorted((value, n) for value, n in Counter(values).items() if n > 1)
