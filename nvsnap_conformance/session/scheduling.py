"""Which cases pytest-xdist keeps on one worker: those that share an engine, or a mutant.

pytest-xdist's own ``loadgroup`` does it by a mark, which it appends to each item's node ID. With pytest 9.2,
whose node IDs are no strings any more, 3.8.0 appends nothing: the cases of one engine come to all workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pytest

    from nvsnap_conformance.session.arms import Arm


def groups_of(arms: Iterable[Arm]) -> dict[str, str]:
    """Return by arm what its cases form a group with: its engine, or its mutant.

    Most mutants change their engine, and a fresh one costs a second.
    """
    return {arm.id: arm.engine_key if arm.mutant is None else arm.id for arm in arms}


def group(nodeid: str, groups: Mapping[str, str]) -> str:
    """Return the group of a case by the arm among its parameters; a test without an arm is one by itself."""
    words = f"-{nodeid.rpartition('::')[2].partition('[')[2].removesuffix(']')}-"
    named = [arm for arm in groups if f"-{arm}-" in words]
    # The name of one arm may be the beginning of another's.
    return groups[max(named, key=len)] if named else nodeid


class EngineScheduling(LoadScopeScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """Hands out whole groups of cases."""

    def __init__(self, config: pytest.Config, log: Any, arms: Iterable[Arm]) -> None:
        """``log`` is pytest-xdist's own."""
        super().__init__(config, log)
        self._groups = groups_of(arms)

    def _split_scope(self, nodeid: str) -> str:
        """Return the group of a case (the point at which pytest-xdist has its schedulers differ)."""
        return group(nodeid, self._groups)
