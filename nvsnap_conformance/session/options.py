"""The plugin's options, resolved into targets, profiles, clauses and arms."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.capabilities import stated_by
from nvsnap_conformance.clauses.registry import Clause, Registry, load_registry
from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.mutants import ALL, Mutant, load_mutants
from nvsnap_conformance.report.place import named_folder, new_folder, require_writable
from nvsnap_conformance.session.arms import Arm, engine_arms, host_arms
from nvsnap_conformance.session.marks import pick
from nvsnap_conformance.targets.model import DEFAULT_TARGET, Target, load_target

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Selection:
    """What a session is about, validated before anything is started.

    ``host_cases`` is false where targets were picked by markers: cases that need no engine may run then, and
    need not. ``lacks`` says what is not there for such targets.
    """

    registry: Registry
    targets: tuple[Target, ...]
    auto_picked: bool
    sizes: tuple[int, ...]
    profiles: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    out: Path
    cold: bool
    host_cases: bool = True
    lacks: tuple[str, ...] = ()
    clauses: dict[str, Clause] = field(default_factory=dict)

    def engine_arms(self) -> list[Arm]:
        """Return the arms of cases that need an engine."""
        return engine_arms(self.targets, self.sizes, self.mutants, auto_picked=self.auto_picked)

    def host_arms(self) -> list[Arm]:
        """Return the arms of cases that bring their own processes."""
        return host_arms(self.mutants)

    def wants(self, clauses: list[str], arm: Arm) -> bool:
        """Whether a case bound to ``clauses`` belongs to this session on ``arm``."""
        chosen = [self.clauses[name] for name in clauses if name in self.clauses]
        if arm.target is not None:
            chosen = [clause for clause in chosen if clause.min_world_size <= arm.tensor_parallel]
        if arm.mutant is not None:
            chosen = [clause for clause in chosen if clause.id in arm.mutant.kills]
        return bool(chosen)

    def must_run(self) -> set[tuple[str, str]]:
        """Return the (clause, arm) pairs that a complete run must have executed.

        Taken over all sizes that the target names, whatever was selected: a part is not the whole.
        With mutants, the pairs are the clauses meant for each.
        """
        if self.mutants:
            return {
                (clause, arm.id)
                for arm in self._all_arms()
                if arm.mutant is not None
                for clause in arm.mutant.kills
                if self._placed(clause, arm)
            }
        return {
            (clause.id, arm.id)
            for clause in self.clauses.values()
            if any(clause.must_run_in(profile) for profile in self.profiles)
            for arm in self._all_arms()
            if self._placed(clause.id, arm)
        }

    def _all_arms(self) -> list[Arm]:
        sizes = self.sizes if self.mutants else ()
        engines = engine_arms(self.targets, sizes, self.mutants, auto_picked=self.auto_picked)
        return [*engines, *(self.host_arms() if self.host_cases else [])]

    def _placed(self, clause: str, arm: Arm) -> bool:
        wanted = self.clauses.get(clause)
        if wanted is None or wanted.needs_engine is (arm.target is None):
            return False
        if arm.target is None:
            return True
        # What a target states it is without cannot be asked of it; what a machine lacks can.
        stated = stated_by(arm.target)
        without = any(need in stated and not stated[need].present for need in wanted.needs)
        return wanted.min_world_size <= arm.tensor_parallel and not without


def resolve(config: pytest.Config) -> Selection:
    """Read the options of ``config``; raises ``UsageError`` and its kin for anything that cannot be taken.

    Raises ``EnvironmentFailure`` for a record's folder that cannot be written.
    """
    registry = load_registry()
    named = list(config.getoption("nvs_target") or [])
    if not named and os.environ.get("NVS_TARGET"):
        named = [name for name in os.environ["NVS_TARGET"].split(",") if name]
    picked = None if named else pick(config.getoption("markexpr", "") or "")
    if picked is not None:
        targets = picked.targets
    else:
        targets = tuple(load_target(name) for name in named or [DEFAULT_TARGET])
    if config.getoption("nvs_inject"):
        targets = tuple(target.injected_by(config.getoption("nvs_inject")) for target in targets)
    _refuse_namesakes(targets)
    for target in targets:
        target.expectations().validate(registry, today=date.today())
    chosen = config.getoption("nvs_profile")
    profiles = (
        (chosen,) if chosen else tuple(dict.fromkeys(name for t in targets for name in t.claims.profiles))
    )
    sizes = tuple(config.getoption("nvs_tp") or ())
    mutants: tuple[Mutant, ...] = ()
    if config.getoption("nvs_mutant"):
        mutants = tuple(load_mutants().select(list(config.getoption("nvs_mutant"))))
    clauses = {
        name: registry.clause(name) for profile in profiles for name in registry.profile(profile).clauses
    }
    if mutants:
        clauses = {name: registry.clause(name) for mutant in mutants for name in mutant.kills}
    out = config.getoption("nvs_out")
    selection = Selection(
        registry=registry,
        targets=targets,
        auto_picked=not named,
        sizes=sizes,
        profiles=profiles,
        mutants=mutants,
        out=_default_out(config) if out is None else named_folder(out),
        cold=bool(config.getoption("nvs_cold")),
        host_cases=picked is None,
        lacks=picked.lacks if picked else (),
        clauses=clauses,
    )
    _require_sizes(selection, named=ALL not in (config.getoption("nvs_mutant") or ()))
    if not hasattr(config, "workerinput") and not config.getoption("collectonly"):
        require_writable(selection.out)
        _refuse_used(selection.out)
    return selection


def _refuse_namesakes(targets: tuple[Target, ...]) -> None:
    """Raise ``UsageError`` for two targets of one name: arms, engines and the record go by it."""
    names = [target.name for target in targets]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two targets are called {name!r}",
                cause="one is named twice, or a file has the name of another target",
                next_step="name each target once, and give each file a name of its own",
            )


def _require_sizes(selection: Selection, *, named: bool) -> None:
    """Raise ``UsageError`` for a size that no target has, and for ``named`` mutants that fit none."""
    arms = {arm.mutant.name for arm in selection.engine_arms() if arm.mutant is not None}
    for mutant in selection.mutants if named else ():
        if mutant.name not in arms and any(selection.registry.clause(c).needs_engine for c in mutant.kills):
            raise UsageError(
                f"the mutant {mutant.name!r} means nothing below {mutant.min_world_size} ranks",
                cause="no target has such a tensor-parallel size, or --tp leaves it out",
                next_step="choose another size with --tp, or leave the mutant out",
            )


def _refuse_used(folder: Path) -> None:
    """Raise ``UsageError`` where ``folder`` holds a record already: two runs would be mixed."""
    if (folder / "results.json").exists() or (folder / "events.jsonl").exists():
        raise UsageError(
            f"{folder} holds the record of an earlier run",
            next_step="name another folder with --out, or leave the option out for a new one",
        )


def _default_out(config: pytest.Config) -> Path:
    """Return a new folder's path for the record; workers get the controller's by ``workerinput``."""
    given = getattr(config, "workerinput", {}).get("nvs_out")
    if given:
        return Path(given)
    return new_folder()
