"""Which ranks form a group: from the coordinates that titles and adapters tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.hang.merge import View


@dataclass(frozen=True)
class Subgroup:
    """A group along one axis (``tp``, ``pp``, ...), or the world."""

    axis: str
    pids: frozenset[int]


def subgroups(ranks: Sequence[View]) -> list[Subgroup]:
    """Return the groups of an engine, the world last.

    A group along an axis holds the ranks that differ in no other coordinate. Axes that only repeat
    another one (an expert-parallel rank that equals the tensor-parallel one) give the same group again.
    """
    world = Subgroup("world", frozenset(v.member.pid for v in ranks))
    axes = sorted({axis for v in ranks for axis in v.member.groups})
    if any(set(v.member.groups) != set(axes) for v in ranks):
        axes = []
    independent = [a for a in axes if a in ("tp", "pp", "dp", "pcp")]
    if not independent:
        return [world]
    found = []
    for axis in axes:
        others = [a for a in independent if a != axis]
        members: dict[tuple[int, ...], set[int]] = {}
        for view in ranks:
            key = tuple(view.member.groups[a] for a in others)
            members.setdefault(key, set()).add(view.member.pid)
        found += [Subgroup(axis, frozenset(pids)) for pids in members.values()]
    return [*found, world]
