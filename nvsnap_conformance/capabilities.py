"""What a machine and a target can do, and what follows for a clause that needs something.

A capability has a name and, where that makes sense, a value that a version specifier can be held
against: ``gpus>=2``, ``criu>=4.2``, ``vllm>=0.27``. Sizes are whole MiB: ``disk>=3500``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nvsnap_conformance.targets.model import Target

TEXT_ORACLE = "text-oracle"
CAPTURED_GRAPHS = "captured-graphs"
TEARDOWN_OPTION = "teardown-option"

MACHINE: tuple[str, ...] = (
    "root",
    "namespaces",
    "ptrace",
    "criu",
    "gpus",
    "driver",
    "peer-access",
    "multicast",
    "cuda-checkpoint",
    "python",
    "pip",
    "torch-cpu",
    "disk",
    "shm",
    "memory",
)
"""The capabilities of a machine that the probe knows; ``disk``, ``shm`` and ``memory`` are in MiB."""


@dataclass(frozen=True)
class Capability:
    """One thing that was probed.

    ``value`` is a version, a count or a size in MiB where the capability has one; ``detail`` is for
    people. ``why_not`` and ``how_to_get`` are filled where it is absent.
    """

    name: str
    present: bool
    value: str | None = None
    detail: str = ""
    why_not: str = ""
    how_to_get: str = ""


class Action(StrEnum):
    """What to do with a clause, given its needs."""

    RUN = "run"
    SKIP = "skip"
    FAIL = "fail"


@dataclass(frozen=True)
class Decision:
    """The action for a clause and, unless it runs, the reason."""

    action: Action
    reason: str = ""


@dataclass(frozen=True)
class Capabilities:
    """Everything that was probed, by name. ``facts`` are those names that need no claim.

    Facts belong to the target (its engine's version, its text oracle), not to the machine.
    """

    items: Mapping[str, Capability]
    facts: frozenset[str] = field(default_factory=frozenset)

    def satisfies(self, need: str) -> tuple[bool, str]:
        """Return whether the expression ``need`` holds and, where it does not, why."""
        wanted = parse_need(need)
        item = self.items.get(wanted.name)
        if item is None:
            return False, f"{wanted.name} is nothing that this suite can probe for"
        if not item.present:
            return False, item.why_not or "not there"
        if wanted.specifier and not _holds(wanted, item.value):
            return False, f"{item.name} is {item.value}, {need} is needed"
        return True, ""

    def how_to_get(self, need: str) -> str:
        """Return what to do to have ``need``, empty where nobody knows."""
        item = self.items.get(parse_need(need).name)
        return item.how_to_get if item else ""

    def with_target(self, target: Target, engine_version: str | None) -> Capabilities:
        """Add the facts of ``target``; ``engine_version`` is ``None`` while it is not known."""
        family = target.engine.family
        facts = {
            **stated_by(target),
            family: Capability(
                family,
                present=engine_version is not None,
                value=engine_version,
                why_not=f"the version of {family} is not known yet",
            ),
        }
        return replace(self, items={**self.items, **facts}, facts=self.facts | set(facts))


def stated_by(target: Target) -> dict[str, Capability]:
    """Return what a target file alone decides, before anything is started."""
    graphs = target.engine.processor == "cpu" or "--no-enforce-eager" in target.engine.args
    return {
        TEXT_ORACLE: Capability(
            TEXT_ORACLE,
            present=bool(target.oracle),
            why_not=f"the target {target.name} states no text oracle",
            how_to_get="add [[oracle]] entries with prompt and expect to the target file",
        ),
        # An engine without a GPU has none of its own; the cases plant stand-ins.
        CAPTURED_GRAPHS: Capability(
            CAPTURED_GRAPHS,
            present=graphs,
            why_not=f"the target {target.name} launches its engine eagerly (the suite's default)",
            how_to_get="take a target that captures graphs, such as vllm-gpu-stock (--no-enforce-eager)",
        ),
        TEARDOWN_OPTION: Capability(
            TEARDOWN_OPTION,
            present=target.hooks.source == "reference",
            why_not=f"the hooks of the target {target.name} are not known to have the option teardown",
            how_to_get='take a target with the reference hooks ([hooks] source = "reference")',
        ),
    }


def probe() -> Capabilities:
    """Return what this machine can do, probed once per process; see :mod:`nvsnap_conformance.probes`."""
    from nvsnap_conformance.probes import probe_machine  # noqa: PLC0415 - it uses what is defined here

    return probe_machine()


@functools.cache
def parse_need(text: str) -> Requirement:
    """Parse a capability expression; raise ``ValueError`` for anything but a name and a specifier."""
    try:
        need = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(
            f"{text!r} is no capability expression such as 'ptrace' or 'gpus>=2': {error}"
        ) from None
    if need.url or need.extras or need.marker:
        raise ValueError(f"{text!r} is no capability expression: a name and a version specifier only")
    return need


def decide(needs: Sequence[str], capabilities: Capabilities, *, claims: Sequence[str] | None) -> Decision:
    """Decide what happens with a clause that has ``needs``.

    ``claims`` are the target's claimed capabilities; ``None`` stands for a target that was picked
    automatically and claims all that the probe found. A need that is not claimed is a reasoned skip,
    one that is claimed but missing fails. The target's own facts need no claim.
    """
    missing: list[str] = []
    for need in needs:
        holds, why = capabilities.satisfies(need)
        reason = "; ".join(part for part in (why, capabilities.how_to_get(need)) if part)
        if parse_need(need).name in capabilities.facts:
            if not holds:
                return Decision(Action.SKIP, f"needs {need}: {reason}")
        elif claims is None:
            if not holds:
                return Decision(Action.SKIP, f"this machine lacks {need}: {reason}")
        elif not any(claim_covers(claim, need) for claim in claims):
            return Decision(Action.SKIP, f"the target does not claim {need}")
        elif not holds:
            missing.append(f"the target claims {need}, but this machine lacks it: {reason}")
    if missing:
        return Decision(Action.FAIL, "; ".join(missing))
    return Decision(Action.RUN)


def claim_covers(claim: str, need: str) -> bool:
    """Whether a target that claims ``claim`` thereby claims ``need`` (``gpus>=8`` covers ``gpus>=2``)."""
    claimed, wanted = parse_need(claim), parse_need(need)
    if claimed.name != wanted.name:
        return False
    if not wanted.specifier:
        return True
    floors = [s.version for s in claimed.specifier if s.operator in (">=", "==", "~=")]
    return any(wanted.specifier.contains(floor, prereleases=True) for floor in floors)


def unknown_names(expressions: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the names in ``expressions`` that are not among ``known``, in order."""
    names = set(known)
    return [name for name in (parse_need(text).name for text in expressions) if name not in names]


def _holds(wanted: Requirement, value: str | None) -> bool:
    try:
        return value is not None and wanted.specifier.contains(Version(value), prereleases=True)
    except InvalidVersion:
        return False
