"""From what a case raised to an outcome, and from cases to clauses, expectations included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from _pytest.outcomes import Skipped  # pytest.skip.Exception, under a name that can be subclassed

from nvsnap_conformance.errors import (
    DeadlineExceeded,
    EngineStartError,
    ExpectationError,
    NvsnapError,
)
from nvsnap_conformance.outcomes import UNJUDGED, ConformanceFailure, ExitCode, Outcome, Signature, worst
from nvsnap_conformance.report.place import FULL

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nvsnap_conformance.expectations import Expectation
    from nvsnap_conformance.report.model import CaseRecord
    from nvsnap_conformance.session.arms import Arm
    from nvsnap_conformance.session.options import Selection
    from nvsnap_conformance.targets.model import Target

EXPECTABLE = frozenset({Outcome.FAILED, Outcome.HANG, Outcome.CRASH})
"""Outcomes that an owned expectation can turn into ``xfailed``; an unknown is never expected."""


class Blocked(Skipped):
    """A prerequisite clause did not hold on this arm, so the case says nothing."""


@dataclass(frozen=True)
class Judgement:
    """The outcome of one phase of a case; ``met`` are the expectation's entries that it met, as text."""

    outcome: Outcome
    signature: Signature | None = None
    message: str = ""
    expectation: str | None = None
    also: tuple[Signature, ...] = ()
    met: tuple[str, ...] = ()


def judge_exception(error: BaseException) -> Judgement:
    """Tell a broken clause from a broken machine, and both from a broken suite."""
    if isinstance(error, ConformanceFailure):
        return Judgement(error.outcome, error.signature, str(error), also=error.signatures[1:])
    if isinstance(error, Blocked):
        return Judgement(Outcome.BLOCKED, message=str(error))
    if isinstance(error, Skipped):
        return Judgement(Outcome.SKIPPED, message=str(error))
    if isinstance(error, EngineStartError):
        return Judgement(Outcome.ENVIRONMENT, Signature("ENGINE", "START"), str(error))
    if isinstance(error, DeadlineExceeded):
        # A deadline alone never says "hang": without a verdict over stacks nobody knows.
        return Judgement(Outcome.UNKNOWN, Signature("DEADLINE", "EXCEEDED"), str(error))
    if isinstance(error, NvsnapError):
        return Judgement(Outcome.ENVIRONMENT, Signature("ENVIRONMENT", "FAILED"), str(error))
    if _is_request_failure(error):
        return Judgement(Outcome.CRASH, Signature("ENGINE", "REQUEST_FAILED"), str(error))
    if isinstance(error, OSError) and error.errno in FULL:
        return Judgement(Outcome.ENVIRONMENT, Signature("ENVIRONMENT", "DISK_FULL"), str(error))
    if isinstance(error, AssertionError):
        return Judgement(Outcome.FAILED, Signature("ASSERT", "FAILED"), str(error))
    return Judgement(Outcome.UNKNOWN, Signature("SUITE", "ERROR"), f"{type(error).__name__}: {error}")


def _is_request_failure(error: BaseException) -> bool:
    from nvsnap_conformance.engines.protocol import RequestFailed  # noqa: PLC0415 - keeps this module light

    return isinstance(error, RequestFailed)


@dataclass(frozen=True)
class Shipped:
    """A target whose expectations speak for an arm, at the engine version and size that the arm has."""

    target: Target
    engine_version: str | None
    tensor_parallel: int

    def match(self, clause: str, signature: Signature) -> Expectation | None:
        """Return the one entry that covers ``signature``; raises ``ExpectationError`` where two do."""
        return self.target.expectations().match(
            clause,
            signature,
            engine=self.target.engine.adapter,
            engine_version=self.engine_version,
            tensor_parallel=self.tensor_parallel,
            driver_version=self._driver_version(clause),
        )

    def unmet(self, clause: str, met: Collection[str]) -> tuple[Expectation, ...]:
        """Return the entries for a clause that apply and are not among ``met``."""
        return self.target.expectations().unmet(
            clause,
            met,
            engine=self.target.engine.adapter,
            engine_version=self.engine_version,
            tensor_parallel=self.tensor_parallel,
            driver_version=self._driver_version(clause),
        )

    def _driver_version(self, clause: str) -> str | None:
        """Return the CUDA driver's version, ``None`` where there is none or no entry for the clause asks."""
        entries = self.target.expectations().entries
        if not any(entry.driver is not None for entry in entries if entry.clause == clause):
            return None
        from nvsnap_conformance.capabilities import probe  # noqa: PLC0415 - only where it matters

        return probe().items["driver"].value


def shipped_for(arm: Arm, selection: Selection, engine_versions: dict[str, str]) -> list[Shipped]:
    """Return whose expectations apply on ``arm``.

    An arm without an engine runs the target's own code in processes of its own (a repro does), so the
    session's targets speak for it, at the version that they require.
    """
    if arm.target is not None:
        return [Shipped(arm.target, engine_versions.get(arm.target.name), arm.tensor_parallel)]
    return [
        Shipped(target, engine_versions.get(target.name) or required_version(target), 0)
        for target in selection.targets
    ]


def required_version(target: Target) -> str | None:
    """Return the version that a target's requirement pins, ``None`` where it names an interpreter."""
    _, separator, version = (target.engine.requirement or "").partition("==")
    return version if separator else None


def apply_expectation(
    judgement: Judgement, clauses: list[str], arm: Arm, shipped: list[Shipped]
) -> Judgement:
    """Turn a failure that owned expectations name by signature into ``xfailed``.

    Every signature of the failure must be covered, so that a known failure never hides a new one beside
    it. The same holds under a mutant: what the target does anyway is no kill. Only a repro's mutant is
    the known failure itself, in the case's own processes, and is left to fail.
    """
    planted = arm.mutant is not None and arm.mutant.layer == "repro"
    if judgement.outcome not in EXPECTABLE or judgement.signature is None or planted:
        return judgement
    matches: list[str] = []
    met: list[str] = []
    for signature in (judgement.signature, *judgement.also):
        try:
            found = [
                match for one in shipped for clause in clauses if (match := one.match(clause, signature))
            ]
        except ExpectationError as error:
            return Judgement(Outcome.BAD_EXPECTATION, signature, f"{error}\n{judgement.message}")
        if not found:
            return judgement
        match = found[0]
        met += [str(entry) for entry in found]
        matches.append(f"{match.reason} ({match.url}; {match.owner}; expires {match.expires})")
    return Judgement(
        Outcome.XFAILED,
        judgement.signature,
        judgement.message,
        expectation="; ".join(dict.fromkeys(matches)),
        also=judgement.also,
        met=tuple(dict.fromkeys(met)),
    )


def is_kill(case: CaseRecord, signature: str | None) -> bool:
    """Whether a case caught its mutant, with ``signature`` (``KIND:CODE``) where the mutant states one."""
    if case.outcome not in EXPECTABLE or case.signature is None:
        return False
    return signature is None or Signature.parse(signature).matches(Signature.parse(case.signature))


@dataclass(frozen=True)
class ClauseVerdict:
    """The outcome of one clause on one arm.

    ``open`` marks one with an expectation that was neither met nor refuted, for not all cases ran.
    """

    clause: str
    arm: str
    outcome: Outcome
    note: str
    open: bool = False


@dataclass(frozen=True)
class Extent:
    """How much of each clause on each arm a session runs.

    ``planned`` is the number of cases, absent where it is not known (yet); ``left_out`` are those of which
    a case was not chosen.
    """

    planned: Mapping[tuple[str, str], int]
    left_out: Collection[tuple[str, str]] = ()

    def whole(self, clause: str, cases: list[CaseRecord], arm: str) -> bool:
        """Whether ``cases`` are all that there are of a clause on an arm, and each was executed."""
        key = (clause, arm)
        return (
            key not in self.left_out
            and len({case.nodeid for case in cases}) == self.planned.get(key)
            and all(case.outcome not in UNJUDGED for case in cases)
        )


def clause_verdicts(
    cases: list[CaseRecord], selection: Selection, engine_versions: dict[str, str], extent: Extent
) -> list[ClauseVerdict]:
    """Aggregate cases into clauses, worst first; an expectation that no case met makes ``xpassed``.

    ``engine_versions`` maps a target's name to the version that was seen. Where not all cases of a clause
    ran, those that would have met the expectation may be among the others, and the clause is left open.
    """
    arms = {arm.id: arm for arm in [*selection.engine_arms(), *selection.host_arms()]}
    grouped: dict[tuple[str, str], list[CaseRecord]] = {}
    for case in cases:
        for clause in case.clauses:
            if clause in selection.clauses:
                grouped.setdefault((clause, case.arm), []).append(case)
    verdicts: list[ClauseVerdict] = []
    for (clause, arm_id), own in grouped.items():
        outcome = worst([case.outcome for case in own])
        note = next((case.message for case in own if case.outcome is outcome), "")
        verdict = ClauseVerdict(clause, arm_id, outcome, note)
        arm = arms.get(arm_id)
        if outcome in {Outcome.PASSED, Outcome.XFAILED} and arm is not None and arm.mutant is None:
            met = {text for case in own for text in case.met}
            shipped = shipped_for(arm, selection, engine_versions)
            unmet = {str(entry): entry for one in shipped for entry in one.unmet(clause, met)}
            if unmet:
                whole = extent.whole(clause, own, arm_id)
                verdict = _with_unmet(verdict, list(unmet.values()), whole=whole)
        verdicts.append(verdict)
    return verdicts


def _with_unmet(verdict: ClauseVerdict, unmet: list[Expectation], *, whole: bool) -> ClauseVerdict:
    """Return the verdict on a clause with entries that none of its cases met."""
    named = ", ".join(f"{entry.signature} ({entry.url})" for entry in unmet)
    if whole:
        note = f"expected to fail with {named} and did not: remove the expectation or narrow its versions"
        return replace(verdict, outcome=Outcome.XPASSED, note=note)
    note = f"expected to fail with {named}: not all of its cases ran, so that this cannot be told"
    return replace(verdict, note="\n".join(filter(None, [verdict.note, note])), open=True)


def exit_code(verdicts: list[ClauseVerdict], missing: list[str], *, other_failures: bool) -> ExitCode:
    """Return the session's exit code.

    A broken clause weighs more than a broken machine, and that more than a part that was not run.
    """
    outcomes = {verdict.outcome for verdict in verdicts}
    broken = {
        outcome
        for outcome in outcomes
        if not outcome.conformant and outcome not in {Outcome.ENVIRONMENT, Outcome.NOT_RUN, Outcome.BLOCKED}
    }
    if broken or other_failures:
        return ExitCode.NOT_CONFORMANT
    if Outcome.ENVIRONMENT in outcomes:
        return ExitCode.ENVIRONMENT
    if missing or outcomes & {Outcome.BLOCKED, Outcome.NOT_RUN}:
        return ExitCode.INCOMPLETE
    return ExitCode.CONFORMANT


def verdict_text(code: ExitCode, degraded: list[str]) -> str:
    """Return the run's verdict in words, the degradations in it."""
    words = {
        ExitCode.CONFORMANT: "conformant",
        ExitCode.NOT_CONFORMANT: "NOT CONFORMANT",
        ExitCode.INCOMPLETE: "INCOMPLETE",
        ExitCode.ENVIRONMENT: "ENVIRONMENT BROKE",
        ExitCode.USAGE: "USAGE ERROR",
    }[code]
    return f"{words} (degraded: {', '.join(degraded)})" if degraded else words
