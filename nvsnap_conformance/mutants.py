"""The registry of mutants: shipped known-bad implementations, each with the clauses meant to kill it.

A mutant is declared in a ``mutants.toml`` beside what it mutates: one per subpackage and per repro.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from nvsnap_conformance.clauses.registry import ClauseId, Registry, load_registry
from nvsnap_conformance.errors import RegistryError, UsageError
from nvsnap_conformance.shipped import repros_dir
from nvsnap_conformance.suggest import did_you_mean
from nvsnap_conformance.tomlfile import Flag, StrictModel, WorldSize, read_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ALL = "all"
_PACKAGE = Path(__file__).resolve().parent

Layer = Literal[
    "hooks",
    "injection",
    "checkpoint",
    "device",
    "image",
    "engine",
    "lifecycle",
    "oracle",
    "process",
    "hang",
    "repro",
]


class Mutant(StrictModel):
    """A known-bad implementation.

    ``implementation`` names it for its ``layer`` (for hooks ``module:Class`` in the engine's
    interpreter), ``options`` is passed to it. ``kills`` are the clauses of which each must fail under
    it, with ``signature`` (``KIND:CODE``) where one is stated: a kill for another reason is none. It means
    nothing below ``min_world_size`` ranks, and runs at the smallest of the target's tensor-parallel sizes at
    which it means something: what is wrong on one rank alone has 2 there, for a check that looks at rank 0
    only must not pass for one of all. Of a case with parameters it runs with ``parameters`` only, where they
    are given: with the others it need not fail. ``dirty`` says that it leaves the engine unusable, so that
    the engine must not be shared with another case.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$")
    layer: Layer
    implementation: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)
    kills: tuple[ClauseId, ...] = Field(min_length=1)
    signature: str | None = None
    min_world_size: WorldSize = 1
    parameters: tuple[str, ...] = ()
    dirty: Flag = False
    summary: str = Field(min_length=1)


class _MutantsFile(StrictModel):
    mutant: tuple[Mutant, ...] = ()


@dataclass(frozen=True)
class Mutants:
    """All shipped mutants by name."""

    mutants: Mapping[str, Mutant]
    registry: Registry

    def mutant(self, name: str) -> Mutant:
        """Return the mutant called ``name``; raise :class:`UsageError` with the nearest known name."""
        try:
            return self.mutants[name]
        except KeyError:
            raise UsageError(
                f"no mutant is called {name!r}", next_step=did_you_mean(name, self.mutants)
            ) from None

    def select(self, names: Iterable[str]) -> tuple[Mutant, ...]:
        """Return the mutants called ``names``, without repeats; ``all`` stands for every one.

        Raises :class:`UsageError` for a name that is none, beside ``all`` too.
        """
        wanted = list(dict.fromkeys(names))
        named = tuple(self.mutant(name) for name in wanted if name != ALL)
        return tuple(self.mutants.values()) if ALL in wanted else named

    def killers_of(self, clause_id: str) -> tuple[Mutant, ...]:
        """Return the mutants that the clause must kill."""
        return tuple(m for m in self.mutants.values() if clause_id in m.kills)

    def uncovered(self) -> tuple[str, ...]:
        """Return the clauses that no mutant is meant for, in the registry's order."""
        return tuple(name for name in self.registry.clauses if not self.killers_of(name))


@functools.cache
def load_mutants() -> Mutants:
    """Return the shipped mutants, read once per process."""
    files = sorted(_PACKAGE.glob("*/mutants.toml"))
    if repros_dir().is_dir():
        files += sorted(repros_dir().glob("*/mutants.toml"))
    return read_mutants(files, load_registry())


def read_mutants(files: Sequence[Path], registry: Registry) -> Mutants:
    """Read ``files``; raise :class:`RegistryError` for duplicates and unknown clauses."""
    mutants: dict[str, Mutant] = {}
    origin: dict[str, Path] = {}
    for path in files:
        for mutant in read_model(path, _MutantsFile, error=RegistryError, what="the mutants file").mutant:
            if mutant.name == ALL:
                raise RegistryError(f"{path}: a mutant cannot be called {ALL!r}: it stands for every mutant")
            if mutant.name in mutants:
                raise RegistryError(
                    f"{path}: mutant {mutant.name!r} is already declared in {origin[mutant.name]}"
                )
            for clause in mutant.kills:
                if clause not in registry.clauses:
                    raise RegistryError(
                        f"{path}: mutant {mutant.name!r}: key 'kills' names the unknown clause {clause!r}",
                        next_step=did_you_mean(clause, registry.clauses),
                    )
            mutants[mutant.name] = mutant
            origin[mutant.name] = path
    return Mutants(mutants, registry)
