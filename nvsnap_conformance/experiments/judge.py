"""Says what became of an arm, from what was seen of it. Plain functions of an observation: no engine needed.

The steps are methods, so that a known-bad judge is this one with a step replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.experiments.premise import launched_otherwise, torn_down_otherwise
from nvsnap_conformance.experiments.record import ArmOutcome, Factors, MemoryReading
from nvsnap_conformance.lifecycle.log_errors import device_errors_in
from nvsnap_conformance.lifecycle.provenance import check_is_restore
from nvsnap_conformance.lifecycle.trace import Verb
from nvsnap_conformance.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvsnap_conformance.lifecycle.driver import CycleFailure
    from nvsnap_conformance.lifecycle.observe import CycleObservation, Diagnosis
    from nvsnap_conformance.lifecycle.oracle import Answers

DEVICE_VERBS = (Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK)
REPEATS = 2
"""How often the prompts are answered before, as the control, and after."""

REFUSALS = frozenset({"UnsupportedEngineVersion", "UnsupportedPlatform", "BadOption"})
PEER_REFUSED = "PeerRefused"
"""The errors by which hooks say, before they touch anything, that they cannot do what the arm asks for, and
that of a rank on which another one did (``nvsnap_hooks.errors``)."""

CONTROL, ANSWERS = "control", "answers"


@dataclass
class ArmObservation:
    """Everything that was seen of one arm.

    ``broken`` says what kept it from being observed at all, in ``broken_phase``; ``cycle`` is then ``None``
    or as far as it went. ``device_calls`` are the driver's answers, one for each call of each process;
    ``processes`` maps each rank to its pid; ``lost`` are the ranks whose process was gone at the end.
    """

    factors: Factors
    ranks: int
    control: list[Answers] = field(default_factory=list)
    cycle: CycleObservation | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    device_calls: list[dict[str, Any]] = field(default_factory=list)
    processes: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    memory: list[MemoryReading] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    broken: str | None = None
    broken_phase: str = "start"


@dataclass(frozen=True)
class Judgement:
    """The outcome of an arm, where it ended, the error by name, and why in one sentence."""

    outcome: ArmOutcome
    phase: str | None
    error: str | None
    reason: str


class Judge:
    """Judges one arm at a time."""

    def judge(self, seen: ArmObservation) -> Judgement:
        """Return what became of the arm; :attr:`ArmOutcome.UNKNOWN` where that cannot be told."""
        if seen.broken is not None:
            return _unknown(seen.broken_phase, seen.broken)
        return self.control(seen) or self.launch(seen) or self.cycle(seen) or self.after(seen)

    # The steps: each returns a judgement, or None where it has nothing to say.

    def control(self, seen: ArmObservation) -> Judgement | None:
        """See that the answers are twice the same without a checkpoint: otherwise equality proves nothing."""
        if len(seen.control) < REPEATS:
            return _unknown(CONTROL, f"the control has {len(seen.control)} of {REPEATS} answers")
        if not all(same_tokens(seen.control[0], other) for other in seen.control[1:]):
            return _unknown(CONTROL, "the engine's answers differ without any checkpoint")
        return None

    def launch(self, seen: ArmObservation) -> Judgement | None:
        """See that the engine held what the arm says before anything was torn down."""
        if seen.cycle is None:
            return _unknown("start", "no cycle was observed")
        before = seen.cycle.record.snapshots.get("before", [])
        problems = launched_otherwise(seen.factors, before, seen.ranks, seen.environment)
        return _unknown("start", f"the arm is not what it says: {'; '.join(problems)}") if problems else None

    def cycle(self, seen: ArmObservation) -> Judgement | None:
        """Judge a cycle that ended early, a teardown that was none, or a checkpoint that took nothing."""
        assert seen.cycle is not None
        record = seen.cycle.record
        failure = record.failure
        if failure is not None and (failure.timed_out or failure.outcome is Outcome.HANG):
            return self.timed_out(seen, failure)
        if failure is not None and failure.verb is Verb.PREPARE:
            return self.not_prepared(seen, failure)
        if failure is not None and failure.verb is Verb.QUIESCE:
            return _unknown("quiesce", failure.message)
        problems = self.teardown(seen)
        if problems:
            return _unknown("prepare", f"the teardown is not what the arm says: {'; '.join(problems)}")
        if failure is not None:
            return self.failed(seen, failure)
        missing = self.missing_verbs(seen)
        if missing:
            return _unknown(missing[0], f"not every rank was seen to {', '.join(missing)}")
        if self.took_nothing(seen):
            return _unknown("checkpoint", "the checkpoint left the GPU memory where it was")
        return None

    def teardown(self, seen: ArmObservation) -> list[str]:
        """Return in what the teardown was not what the arm says."""
        assert seen.cycle is not None
        prepared = seen.cycle.record.snapshots.get("prepared", [])
        return torn_down_otherwise(seen.factors, prepared, seen.ranks)

    def not_prepared(self, seen: ArmObservation, failure: CycleFailure) -> Judgement:
        """Tell hooks that refuse from hooks that fail: the latter says nothing of the teardown."""
        assert seen.cycle is not None
        replies = seen.cycle.record.replies.get(Verb.PREPARE, [])
        errors = {reply.error["type"] for reply in replies if reply.error is not None}
        failed = [r for r in replies if isinstance(r.value, dict) and r.value.get("state") == "failed"]
        if errors & REFUSALS and errors <= REFUSALS | {PEER_REFUSED} and not failed and not seen.lost:
            return Judgement(ArmOutcome.REFUSED, "prepare", None, failure.message)
        return _unknown("prepare", f"the teardown failed: {failure.message}")

    def timed_out(self, seen: ArmObservation, failure: CycleFailure) -> Judgement:
        """Tell a hang by a driver's call that did not return or by settled ranks, never by a deadline."""
        phase = failure.verb.value
        if failure.outcome is Outcome.HANG:
            return Judgement(ArmOutcome.HANG, phase, None, failure.message)
        if seen.diagnosis is not None and seen.diagnosis.outcome is Outcome.HANG:
            return Judgement(ArmOutcome.HANG, phase, None, seen.diagnosis.paragraph)
        return _unknown(phase, f"it was not over in time, and nothing shows a hang: {failure.message}")

    def failed(self, seen: ArmObservation, failure: CycleFailure) -> Judgement:
        """Judge a verb after the teardown that was answered with a failure."""
        phase = failure.verb.value
        errors = self.errors(seen, failure.verb)
        error = next(iter(errors.values()), None)
        if failure.verb in (Verb.LOCK, Verb.CHECKPOINT) and error is not None:
            return Judgement(ArmOutcome.REFUSED, phase, error, failure.message)
        if failure.verb in (Verb.RESTORE, Verb.UNLOCK) and error is not None:
            return Judgement(ArmOutcome.LOST, phase, error, failure.message)
        if failure.verb not in (Verb.LOCK, Verb.CHECKPOINT) and seen.lost:
            return Judgement(ArmOutcome.LOST, phase, error, f"ranks {seen.lost} are gone: {failure.message}")
        # The driver brought the processes back, or never answered: neither says anything of the teardown.
        return _unknown(phase, failure.message)

    def errors(self, seen: ArmObservation, verb: Verb) -> dict[int, str]:
        """Return the driver's errors at ``verb`` by rank."""
        return device_errors(seen, verb)

    def missing_verbs(self, seen: ArmObservation) -> list[str]:
        """Return the device verbs that some rank was not seen to end well."""
        assert seen.cycle is not None
        done = {(event.verb, event.rank) for event in seen.cycle.record.events if event.ok}
        return [v.value for v in DEVICE_VERBS if any((v, rank) not in done for rank in range(seen.ranks))]

    def took_nothing(self, seen: ArmObservation) -> bool:
        """Whether some rank is known to have as much GPU memory checkpointed as prepared."""
        held = {(reading.moment, reading.rank): reading.bytes for reading in seen.memory}
        for rank in range(seen.ranks):
            prepared, gone = held.get(("prepared", rank)), held.get(("checkpointed", rank))
            if prepared is not None and gone is not None and gone >= prepared:
                return True
        return False

    def after(self, seen: ArmObservation) -> Judgement:
        """Judge what came back: the same processes, and the same tokens, every time."""
        assert seen.cycle is not None
        cycle = seen.cycle
        if cycle.broken is not None:
            if seen.diagnosis is not None and seen.diagnosis.outcome is Outcome.HANG:
                return Judgement(ArmOutcome.HANG, ANSWERS, None, seen.diagnosis.paragraph)
            if seen.lost:
                reason = f"ranks {seen.lost} are gone: {cycle.broken}"
                return Judgement(ArmOutcome.LOST, ANSWERS, self.logged_error(seen), reason)
            return _unknown(ANSWERS, f"the engine did not answer: {cycle.broken}")
        if len(cycle.after) < REPEATS:
            return _unknown(ANSWERS, f"{len(cycle.after)} of {REPEATS} answers were taken afterwards")
        if stranger := self.stranger(seen):
            return _unknown(ANSWERS, f"not the engine that was checkpointed: {stranger}")
        equal = self.equal(seen)
        if not all(equal):
            wrong = [number for number, same in enumerate(equal, 1) if not same]
            return Judgement(
                ArmOutcome.WRONG, ANSWERS, None, f"repeats {wrong} have other tokens than before"
            )
        return Judgement(ArmOutcome.RIGHT, None, None, f"the same tokens as before, {len(equal)} times")

    def logged_error(self, seen: ArmObservation) -> str | None:
        """Return the first error of the device that was logged since the cycle began."""
        assert seen.cycle is not None
        return next(iter(device_errors_in(seen.cycle.logged)), None)

    def stranger(self, seen: ArmObservation) -> str:
        """Say why what answers is not the engine that was checkpointed, empty where it is."""
        assert seen.cycle is not None
        cycle = seen.cycle
        found = check_is_restore(cycle.planted, cycle.before, cycle.identities, replaces_processes=False)
        return found[0].message if found else ""

    def equal(self, seen: ArmObservation) -> list[bool]:
        """Return for each repeat whether its tokens are those of before."""
        assert seen.cycle is not None
        return [same_tokens(seen.control[0], answers) for answers in seen.cycle.after]


def device_errors(seen: ArmObservation, verb: Verb) -> dict[int, str]:
    """Return the driver's errors at ``verb`` by rank, by name."""
    ranks = {pid: rank for rank, pid in seen.processes.items()}
    return {
        ranks.get(call["pid"], -1): str(call["result"])
        for call in seen.device_calls
        if call["verb"] == verb.value and call.get("code")
    }


def same_tokens(one: Answers, other: Answers) -> bool:
    """Whether both hold the same tokens to the same prompts; no answers are never the same.

    Tokens and not log probabilities: the control shows only that the tokens do not vary by themselves.
    """
    left = [(c.prompt, c.tokens) for c in one.completions]
    return bool(left) and left == [(c.prompt, c.tokens) for c in other.completions]


def drift(one: Answers, other: Answers) -> float:
    """Return the largest difference of a log probability between two answers, in nats."""
    return max(
        (
            abs(left - right)
            for before, after in zip(one.completions, other.completions, strict=False)
            for left, right in zip(before.logprobs, after.logprobs, strict=False)
        ),
        default=0.0,
    )


def _unknown(phase: str, reason: str) -> Judgement:
    return Judgement(ArmOutcome.UNKNOWN, phase, None, reason)
