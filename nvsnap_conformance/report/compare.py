"""Compares two run records, or a record with a file of expected outcomes, and lists every disagreement.

Compared is what a run claims: outcome and signatures of each clause on each arm, outcome, phase and error of
each arm of an experiment, and the conditions under which that holds (engine versions, degradations, driver).
Times, paths and messages are not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nvsnap_conformance.experiments.record import Conditions
    from nvsnap_conformance.report.model import RunRecord

FORMAT = "nvsnap-compare/1"
"""The format of ``compare --format json``, described in docs/compare.md."""

MISSING = "missing"
"""What a side that lacks something has instead of a value."""


class Kind(StrEnum):
    """What two sides disagree about."""

    CLAUSE_OUTCOME = "clause-outcome"
    CLAUSE_SIGNATURE = "clause-signature"
    ARM_OUTCOME = "arm-outcome"
    ARM_PHASE = "arm-phase"
    ARM_ERROR = "arm-error"
    ARM_FACTORS = "arm-factors"
    ENGINE_VERSION = "engine-version"
    DEGRADED = "degraded"
    CONDITION = "condition"
    STATE = "state"


@dataclass(frozen=True, order=True)
class Disagreement:
    """One difference. ``subject`` is the clause, the experiment's arm or the condition; ``arm`` the run's."""

    kind: Kind
    subject: str
    arm: str
    left: str
    right: str

    def mirrored(self) -> Disagreement:
        """Return the same disagreement with the sides exchanged."""
        return Disagreement(self.kind, self.subject, self.arm, self.right, self.left)

    def as_json(self) -> dict[str, str]:
        """Return the disagreement as JSON values."""
        return {**asdict(self), "kind": self.kind.value}

    def __str__(self) -> str:
        where = f" on {self.arm}" if self.arm else ""
        return f"{self.kind:<17} {self.subject}{where}: {self.left} | {self.right}"


@dataclass(frozen=True)
class ClauseFacts:
    """What is claimed of a clause on an arm; ``signatures`` is ``None`` where nothing is said of them."""

    outcome: str
    signatures: frozenset[str] | None


@dataclass(frozen=True)
class ArmFacts:
    """What is claimed of an experiment's arm; ``None`` where nothing is said."""

    outcome: str
    phase: str | None = None
    error: str | None = None
    factors: str | None = None
    says: frozenset[str] = frozenset({"phase", "error", "factors"})


@dataclass(frozen=True)
class Facts:
    """One side of a comparison.

    ``partial`` marks an expectation that speaks only of what it lists: what else the other side has is no
    disagreement. ``given`` marks a side on which that holds of engines and conditions, whatever it says of
    clauses and arms. ``None`` for ``degraded`` or ``state`` says nothing of it.
    """

    source: str
    clauses: Mapping[tuple[str, str], ClauseFacts] = field(default_factory=dict)
    arms: Mapping[str, ArmFacts] = field(default_factory=dict)
    engines: Mapping[str, frozenset[str]] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    degraded: frozenset[str] | None = None
    state: str | None = None
    partial: bool = False
    given: bool = False


def facts_of(record: RunRecord, *, source: str) -> Facts:
    """Return what ``record`` claims."""
    signatures: dict[tuple[str, str], set[str]] = {}
    for case in record.cases:
        for clause in case.clauses:
            signatures.setdefault((clause, case.arm), set()).update(
                [case.signature] if case.signature else []
            )
    clauses = {
        (clause.clause, clause.arm): ClauseFacts(
            clause.outcome.value, frozenset(signatures.get((clause.clause, clause.arm), ()))
        )
        for clause in record.clauses
    }
    engines: dict[str, set[str]] = {}
    for engine in record.engines:
        engines.setdefault(engine.arm, set()).add(engine.distribution)
    arms: dict[str, ArmFacts] = {}
    conditions: dict[str, str] = {}
    if record.experiment is not None:
        arms = {
            arm.name: ArmFacts(arm.outcome.value, arm.phase, arm.error, str(arm.factors))
            for arm in record.experiment.arms
        }
        conditions = conditions_of(record.experiment.conditions)
    return Facts(
        source=source,
        clauses=clauses,
        arms=arms,
        engines={arm: frozenset(names) for arm, names in engines.items()},
        conditions=conditions,
        degraded=frozenset(record.degraded),
        state=record.state,
    )


def conditions_of(common: Conditions) -> dict[str, str]:
    """Return the conditions of an experiment by name; those of libraries are called ``library NAME``."""
    return {
        "engine": common.engine,
        "driver": common.driver,
        "gpus": ", ".join(common.gpus) or "none",
        "tensor_parallel": str(common.tensor_parallel),
        "checkpointer": common.checkpointer,
        "stand_in": str(common.stand_in).lower(),
        **{f"library {name}": version for name, version in common.libraries.items()},
    }


def compare(left: Facts, right: Facts) -> list[Disagreement]:
    """Return every disagreement between the two sides, in a fixed order; an empty list where they agree.

    ``compare(right, left)`` has the same ones, mirrored.
    """
    found = [
        *_clauses(left, right),
        *_arms(left, right),
        *_named(Kind.ENGINE_VERSION, _joined(left.engines), _joined(right.engines), left, right, as_arm=True),
        *_named(Kind.CONDITION, left.conditions, right.conditions, left, right),
    ]
    if left.degraded is not None and right.degraded is not None and left.degraded != right.degraded:
        found.append(Disagreement(Kind.DEGRADED, "run", "", _list(left.degraded), _list(right.degraded)))
    if left.state is not None and right.state is not None and left.state != right.state:
        found.append(Disagreement(Kind.STATE, "run", "", left.state, right.state))
    return sorted(found, key=lambda d: (list(Kind).index(d.kind), d.subject, d.arm))


def not_expected(left: Facts, right: Facts) -> list[str]:
    """Return what a partial expectation on one side does not speak of, though the other side has it."""
    notes: list[str] = []
    for expectation, record in ((left, right), (right, left)):
        if expectation.partial and not record.partial:
            notes += [f"arm {name}" for name in record.arms if name not in expectation.arms]
            clauses = [key for key in record.clauses if key not in expectation.clauses]
            notes += [f"{len(clauses)} clauses"] if clauses else []
    return notes


def _clauses(left: Facts, right: Facts) -> Iterable[Disagreement]:
    for key in _keys(left.clauses, right.clauses, left, right):
        clause, arm = key
        one, other = left.clauses.get(key), right.clauses.get(key)
        outcomes = (one.outcome if one else MISSING, other.outcome if other else MISSING)
        if outcomes[0] != outcomes[1]:
            yield Disagreement(Kind.CLAUSE_OUTCOME, clause, arm, *outcomes)
        if one is None or other is None or one.signatures is None or other.signatures is None:
            continue
        if one.signatures != other.signatures:
            yield Disagreement(
                Kind.CLAUSE_SIGNATURE, clause, arm, _list(one.signatures), _list(other.signatures)
            )


def _arms(left: Facts, right: Facts) -> Iterable[Disagreement]:
    for name in _keys(left.arms, right.arms, left, right):
        one, other = left.arms.get(name), right.arms.get(name)
        outcomes = (one.outcome if one else MISSING, other.outcome if other else MISSING)
        if outcomes[0] != outcomes[1]:
            yield Disagreement(Kind.ARM_OUTCOME, name, "", *outcomes)
        if one is None or other is None:
            continue
        for kind, what in (
            (Kind.ARM_PHASE, "phase"),
            (Kind.ARM_ERROR, "error"),
            (Kind.ARM_FACTORS, "factors"),
        ):
            if what in one.says and what in other.says:
                values = (getattr(one, what) or "none", getattr(other, what) or "none")
                if values[0] != values[1]:
                    yield Disagreement(kind, name, "", *values)


def _named(
    kind: Kind,
    one: Mapping[str, str],
    other: Mapping[str, str],
    left: Facts,
    right: Facts,
    *,
    as_arm: bool = False,
) -> Iterable[Disagreement]:
    for name in _keys(one, other, left, right, given=True):
        values = (one.get(name, MISSING), other.get(name, MISSING))
        if values[0] != values[1]:
            yield Disagreement(kind, "engine" if as_arm else name, name if as_arm else "", *values)


def _keys(
    one: Mapping[Any, Any], other: Mapping[Any, Any], left: Facts, right: Facts, *, given: bool = False
) -> list[Any]:
    """Return the keys to look at: all of both sides, or what a partial (or ``given``) one lists."""
    keys = set(one) | set(other)
    if left.partial or (given and left.given):
        keys &= set(one)
    if right.partial or (given and right.given):
        keys &= set(other)
    return sorted(keys)


def _joined(engines: Mapping[str, frozenset[str]]) -> dict[str, str]:
    return {arm: _list(names) for arm, names in engines.items()}


def _list(values: Iterable[str]) -> str:
    return ", ".join(sorted(values)) or "none"
