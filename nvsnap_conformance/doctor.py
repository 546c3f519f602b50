"""What a machine can run of a target: profile by profile, what is missing and how to get it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nvsnap_conformance import __version__
from nvsnap_conformance.capabilities import Action, Capabilities, decide
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.engines.recipes import recipe_for
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.gpus import visible

if TYPE_CHECKING:
    from nvsnap_conformance.clauses.registry import Registry
    from nvsnap_conformance.targets.model import Target

NOTES = {
    "root": "without root each engine has only a process session of its own, criu is out of reach, and "
    "py-spy depends on the kernel's ptrace settings",
    "namespaces": "without namespaces engines share the host's pids, ports and /dev/shm: runs side by side "
    "can collide, what an engine leaves in /dev/shm is told apart by name only, and images cannot be "
    "restored while their pids are taken",
}
"""What is lost on a machine that lacks a capability without which the suite still runs."""


@dataclass(frozen=True)
class Lack:
    """One thing that is missing: for which clauses (none: for the engine itself), why, how to get it."""

    need: str
    clauses: tuple[str, ...]
    why: str
    how_to_get: str


@dataclass(frozen=True)
class ProfileDiagnosis:
    """What one profile lacks on this machine; ``left_out`` are clauses that a run would skip with reason."""

    name: str
    can_run: bool
    lacks: tuple[Lack, ...]
    left_out: tuple[Lack, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The whole answer of ``doctor`` for one target."""

    target: str
    capabilities: Capabilities
    engine: str
    engine_lacks: tuple[Lack, ...]
    profiles: tuple[ProfileDiagnosis, ...]
    notes: tuple[str, ...]

    @property
    def can_run(self) -> bool:
        """Whether a run of the target with all its profiles can be complete on this machine."""
        return not self.engine_lacks and all(profile.can_run for profile in self.profiles)

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return {
            "suite_version": __version__,
            "target": self.target,
            "can_run": self.can_run,
            "engine": {"state": self.engine, "lacks": [asdict(lack) for lack in self.engine_lacks]},
            "profiles": [asdict(profile) for profile in self.profiles],
            "capabilities": {name: asdict(item) for name, item in self.capabilities.items.items()},
            "notes": list(self.notes),
        }


def diagnose(target: Target, registry: Registry, capabilities: Capabilities) -> Diagnosis:
    """Say what of ``target`` this machine can run. Builds no environment and starts no engine."""
    engine, version, lacks = _engine(target, capabilities)
    known = capabilities.with_target(target, version)
    return Diagnosis(
        target=target.name,
        capabilities=capabilities,
        engine=engine,
        engine_lacks=tuple(lacks),
        profiles=tuple(_profile(name, target, registry, known) for name in target.claims.profiles),
        notes=tuple(text for name, text in NOTES.items() if not capabilities.items[name].present),
    )


def _engine(target: Target, capabilities: Capabilities) -> tuple[str, str | None, list[Lack]]:
    """Return the state of the engine's environment, the engine's version, and what it lacks."""
    if target.engine.requirement is None:
        try:
            environment = EngineEnvironment.for_target(target)
        except NvsnapError as error:
            return "unusable", None, [Lack("engine", (), error.what, error.next_step)]
        return (
            f"{environment.distribution} {environment.version} in {environment.python}",
            environment.version,
            [],
        )
    requirement = target.engine.requirement
    recipe = recipe_for(requirement)
    needs = [f"memory>={recipe.resources.memory_mib}", f"shm>={recipe.resources.shm_mib}"]
    existing = EngineEnvironment.existing(requirement)
    if existing is None:
        needs += ["pip", f"disk>={recipe.resources.disk_mib}", *(["torch-cpu"] if recipe.torch else [])]
    lacks = [
        Lack(need, (), why, capabilities.how_to_get(need))
        for need, (holds, why) in ((need, capabilities.satisfies(need)) for need in needs)
        if not holds
    ]
    state = f"{requirement}: " + ("ready" if existing else "will be built on first use")
    return state, requirement.partition("==")[2], lacks


def _profile(name: str, target: Target, registry: Registry, capabilities: Capabilities) -> ProfileDiagnosis:
    grouped: dict[tuple[bool, str, str], list[str]] = defaultdict(list)
    for clause_id in registry.profile(name).clauses:
        clause = registry.clause(clause_id)
        needed_at = max(target.engine.tensor_parallel)
        if clause.needs_engine and clause.min_world_size > needed_at:
            need = f"world size {clause.min_world_size}"
            there = len(visible().gpus)
            why = (
                f"{there} GPUs can be used here, and it needs {clause.min_world_size}"
                if target.engine.by_gpus
                else f"the target runs at tensor parallel size {needed_at} at most"
            )
            grouped[clause.must_run_in(name), need, why].append(clause_id)
            continue
        for need in clause.needs:
            if decide((need,), capabilities, claims=target.claims.capabilities).action is not Action.RUN:
                why = capabilities.satisfies(need)[1] or f"the target does not claim {need}"
                grouped[clause.must_run_in(name), need, why].append(clause_id)
    found = [
        (must, Lack(need, tuple(clauses), why, _how_to_get(need, why, target, capabilities)))
        for (must, need, why), clauses in grouped.items()
    ]
    lacks = tuple(lack for must, lack in found if must)
    return ProfileDiagnosis(name, not lacks, lacks, tuple(lack for must, lack in found if not must))


def _how_to_get(need: str, why: str, target: Target, capabilities: Capabilities) -> str:
    if need.startswith("world size"):
        if target.engine.by_gpus:
            return f"use a machine with {need.removeprefix('world size ')} GPUs, within CUDA_VISIBLE_DEVICES"
        return "add a larger size to engine.tensor_parallel in the target file"
    if why.startswith("the target does not claim"):
        return "add it to claims.capabilities in the target file"
    return capabilities.how_to_get(need)
