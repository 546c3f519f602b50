"""Arms: the combinations of target, tensor-parallel size and mutant that every case meets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvsnap_conformance.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.mutants import Mutant
    from nvsnap_conformance.targets.model import Target


@dataclass(frozen=True)
class Arm:
    """What one case is run against.

    ``target`` is ``None`` for cases that bring their own processes and need no engine; ``tensor_parallel``
    is then 0. ``auto_picked`` marks a target that the user did not name: it claims all that was probed.
    """

    target: Target | None
    tensor_parallel: int
    mutant: Mutant | None = None
    auto_picked: bool = False

    @property
    def id(self) -> str:
        """Return the arm's name as it stands in test IDs and in the record."""
        base = "host" if self.target is None else f"{self.target.name}-tp{self.tensor_parallel}"
        return base if self.mutant is None else f"{base}-mutant={self.mutant.name}"

    @property
    def engine_key(self) -> str:
        """Return the name of the engine that this arm can share with others."""
        if self.target is None:
            return "host"
        mutation = self.mutant.implementation if self.mutant and self.mutant.layer == "engine" else ""
        return f"{self.target.name}-tp{self.tensor_parallel}{mutation}"


def engine_arms(
    targets: Sequence[Target],
    sizes: Sequence[int],
    mutants: Sequence[Mutant],
    *,
    auto_picked: bool = False,
) -> list[Arm]:
    """Return the arms for cases that need an engine.

    Raises :class:`UsageError` for a target that has none of the sizes, and :class:`EnvironmentFailure` where
    it has no GPUs for them.
    ``sizes`` restricts the tensor-parallel sizes of the targets; empty means all. A mutant runs at one
    size: the smallest at which it means something, for that is the cheapest.
    """
    arms: list[Arm] = []
    for target in targets:
        wanted = [size for size in target.engine.tensor_parallel if not sizes or size in sizes]
        if not wanted:
            if target.engine.by_gpus:
                raise target.lacks_size(min(sizes))
            raise UsageError(
                f"target {target.name!r} has no tensor-parallel size among {sorted(sizes)}",
                cause=f"its sizes are {list(target.engine.tensor_parallel)}",
                next_step="choose one of these with --tp, or add the size to [engine] tensor_parallel",
            )
        if mutants:
            for mutant in mutants:
                enough = [size for size in wanted if size >= mutant.min_world_size]
                if enough:
                    arms.append(Arm(target, min(enough), mutant, auto_picked))
        else:
            arms += [Arm(target, size, None, auto_picked) for size in wanted]
    return arms


def host_arms(mutants: Sequence[Mutant]) -> list[Arm]:
    """Return the arms for cases that bring their own processes."""
    return [Arm(None, 0, mutant) for mutant in mutants] if mutants else [Arm(None, 0)]
