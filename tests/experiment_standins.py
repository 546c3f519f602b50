"""Engines and drivers that go wrong in one way each, and judges that go wrong in one way each."""

# ruff: noqa: ARG002 - the signatures are those of what is replaced

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.device_failure import DeviceFailure, Fate
from nvsnap_conformance.engines.protocol import Completion
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.experiments.judge import ArmObservation, Judge, Judgement, same_tokens
from nvsnap_conformance.experiments.record import ArmOutcome
from nvsnap_conformance.experiments.standin import (
    NOT_SUPPORTED,
    RankState,
    StandInApparatus,
    StandInCheckpointer,
    StandInEngine,
)
from nvsnap_conformance.lifecycle.observe import Diagnosis
from nvsnap_conformance.outcomes import Outcome, Signature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nvsnap_conformance.checkpoint.protocol import CheckpointResult
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.lifecycle.driver import CycleFailure


# Engines -------------------------------------------------------------------------------------------


class CountingEngine(StandInEngine):
    """Numbers the answers to each prompt."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.asked: dict[str, int] = {}

    def generate(self, prompts: Sequence[str], *, max_tokens: int, deadline: Deadline) -> list[Completion]:
        answers = super().generate(prompts, max_tokens=max_tokens, deadline=deadline)
        return [self.change(answer) for answer in answers]

    def change(self, answer: Completion) -> Completion:
        number = self.asked[answer.prompt] = self.asked.get(answer.prompt, 0) + 1
        return self.wrong(answer) if self.goes_wrong(answer, number) else answer

    def goes_wrong(self, answer: Completion, number: int) -> bool:
        raise NotImplementedError

    @staticmethod
    def wrong(answer: Completion) -> Completion:
        return Completion(answer.prompt, (*answer.tokens[:-1], answer.tokens[-1] ^ 1), answer.logprobs, "")


class WrongSecondTime(CountingEngine):
    """Answers rightly once after the cycle (the third time), and wrongly from then on."""

    def goes_wrong(self, answer: Completion, number: int) -> bool:
        return number > 3


class WrongLastPrompt(CountingEngine):
    """Answers the long prompt wrongly after the cycle, as with a part of the key/value cache lost."""

    def goes_wrong(self, answer: Completion, number: int) -> bool:
        return number > 2 and answer.prompt.startswith("item 1")


class Unstable(CountingEngine):
    """Answers otherwise the second time, before any checkpoint."""

    def goes_wrong(self, answer: Completion, number: int) -> bool:
        return number == 2


class NoWorkspace(StandInEngine):
    """Never makes the workspace that its launch asks for."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for rank in self.state:
            rank.workspace = "absent"


class FreesOnOneRank(StandInEngine):
    """Claims to have freed the workspace, and has on the first rank only."""

    def prepare(self, rank: RankState, teardown: Mapping[str, str]) -> dict[str, Any]:
        report = super().prepare(rank, teardown)
        if rank is not self.state[0] and rank.workspace == "freed":
            rank.workspace = "live"
        return report


class FailsHalfWay(StandInEngine):
    """Fails in the middle of prepare on one rank, as its hooks say."""

    def prepare(self, rank: RankState, teardown: Mapping[str, str]) -> dict[str, Any]:
        report = super().prepare(rank, teardown)
        return report | {"state": "failed", "problem": "StillHeld"} if rank is self.state[1] else report


class CapturesNothing(StandInEngine):
    """Does not capture its graphs again."""

    def recapture(self, rank: RankState) -> dict[str, Any]:
        return {"state": "serving", "problem": None, "graphs": {"state": "failed", "problem": "no memory"}}


class SlowPrepare(StandInEngine):
    """Does not answer prepare in time."""

    def prepare(self, rank: RankState, teardown: Mapping[str, str]) -> dict[str, Any]:
        raise DeadlineExceeded("prepare: not within 60.0 s")


class ComesBackAfresh(StandInEngine):
    """Is started again, where it should have been restored: answers alike, and remembers nothing."""

    def rebuild(self, rank: RankState, teardown: Mapping[str, str]) -> dict[str, Any]:
        report = super().rebuild(rank, teardown)
        rank.memory.clear()
        return report


class DiesAtFirstTouch(StandInEngine):
    """Loses a rank at the first pass after the restore, as with memory that is mapped without access."""

    def generate(self, prompts: Sequence[str], *, max_tokens: int, deadline: Deadline) -> list[Completion]:
        if "was" in self.state[1].memory:
            self.state[1].alive = False
        return super().generate(prompts, max_tokens=max_tokens, deadline=deadline)


# Drivers -------------------------------------------------------------------------------------------


class OneRankRefuses(StandInCheckpointer):
    """Refuses to checkpoint the second rank, and rolls back."""

    def answer(self, verb: str, rank: RankState) -> tuple[str, int]:
        number = list(self._ranks.values()).index(rank) % 2
        return NOT_SUPPORTED if verb == "checkpoint" and number else super().answer(verb, rank)


class OneRankOnly(StandInCheckpointer):
    """Takes the first rank through every verb, and leaves the other alone."""

    def _verb(self, verb: str, pids: list[int], after: str) -> CheckpointResult:
        return super()._verb(verb, pids[:1], after)


class TakesNothing(StandInCheckpointer):
    """Answers success and the right state, and leaves the GPU memory where it is."""

    def _verb(self, verb: str, pids: list[int], after: str) -> CheckpointResult:
        result = super()._verb(verb, pids, after)
        for pid in pids:
            self._ranks[pid].driver = "RUNNING"
        return result


class Hangs(StandInCheckpointer):
    """Does not return from the checkpoint."""

    def checkpoint(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        raise DeviceFailure("checkpoint did not return", signature="CUDA:HANG@checkpoint", fate=Fate.KILLED)


class Undiagnosed(StandInApparatus):
    """An apparatus in which no look from outside finds a hang."""

    def diagnose(self, *_: Any) -> Diagnosis:
        return Diagnosis(Signature("HANG", "UNKNOWN"), Outcome.UNKNOWN, "the ranks still move", None)


# Judges --------------------------------------------------------------------------------------------


class StopsAtCheckpoint(Judge):
    """Takes a checkpoint that succeeded for a good one."""

    def failed(self, seen: ArmObservation, failure: CycleFailure) -> Judgement:
        told = super().failed(seen, failure)
        return Judgement(ArmOutcome.RIGHT, None, None, "") if told.outcome is ArmOutcome.LOST else told


class FirstRankOnly(Judge):
    """Looks at what the first rank was seen to do."""

    def missing_verbs(self, seen: ArmObservation) -> list[str]:
        ranks, seen.ranks = seen.ranks, 1
        try:
            return super().missing_verbs(seen)
        finally:
            seen.ranks = ranks


class FirstRanksError(Judge):
    """Reads the driver's answer for the first rank."""

    def errors(self, seen: ArmObservation, verb: Any) -> dict[int, str]:
        return {rank: error for rank, error in super().errors(seen, verb).items() if rank == 0}


class FirstPromptOnly(Judge):
    """Compares one completion."""

    def equal(self, seen: ArmObservation) -> list[bool]:
        assert seen.cycle is not None
        first = seen.control[0].completions[0].tokens
        return [answers.completions[0].tokens == first for answers in seen.cycle.after]


class FirstRepeatOnly(Judge):
    """Asks once."""

    def equal(self, seen: ArmObservation) -> list[bool]:
        return super().equal(seen)[:1]


class NoControl(Judge):
    """Compares with one answer from before, whether or not the engine repeats itself."""

    def control(self, seen: ArmObservation) -> None:
        return None


class UnknownIsRight(Judge):
    """Takes what cannot be told for a pass."""

    def judge(self, seen: ArmObservation) -> Judgement:
        told = super().judge(seen)
        return told if told.outcome.decided else Judgement(ArmOutcome.RIGHT, None, None, "")


class BelievesTheLaunch(Judge):
    """Takes an arm for what its name says."""

    def launch(self, seen: ArmObservation) -> None:
        return None


class BelievesTheHooks(Judge):
    """Takes a teardown for done because prepare says so."""

    def teardown(self, seen: ArmObservation) -> list[str]:
        return []


class DeadlineIsHang(Judge):
    """Calls every passed deadline a hang."""

    def timed_out(self, seen: ArmObservation, failure: CycleFailure) -> Judgement:
        return Judgement(ArmOutcome.HANG, failure.verb.value, None, failure.message)


class HangIsUnknown(Judge):
    """Does not tell a hang by the driver's call."""

    def timed_out(self, seen: ArmObservation, failure: CycleFailure) -> Judgement:
        return Judgement(ArmOutcome.UNKNOWN, failure.verb.value, None, failure.message)


class AnyFailureIsARefusal(Judge):
    """Takes hooks that failed for hooks that refused."""

    def not_prepared(self, seen: ArmObservation, failure: CycleFailure) -> Judgement:
        return Judgement(ArmOutcome.REFUSED, "prepare", None, failure.message)


class MemoryIsNoMatter(Judge):
    """Does not ask whether the checkpoint took anything."""

    def took_nothing(self, seen: ArmObservation) -> bool:
        return False


class AnyProcess(Judge):
    """Does not ask whether what answers is what was checkpointed."""

    def stranger(self, seen: ArmObservation) -> str:
        return ""


class DeadIsUnknown(Judge):
    """Does not look whether ranks are gone."""

    def judge(self, seen: ArmObservation) -> Judgement:
        seen.lost = []
        return super().judge(seen)


class ComparesWithItself(Judge):
    """Compares the answers after with each other."""

    def equal(self, seen: ArmObservation) -> list[bool]:
        assert seen.cycle is not None
        return [same_tokens(seen.cycle.after[0], answers) for answers in seen.cycle.after]


class NamesNoLoggedError(Judge):
    """Says that ranks are gone, and not of what."""

    def logged_error(self, seen: ArmObservation) -> str | None:
        return None


@dataclass(frozen=True)
class Situation:
    """An arm of the shipped plan with one thing gone wrong, and what has to be said of it."""

    name: str
    arm: str
    outcome: ArmOutcome
    phase: str | None
    error: str | None = None
    engine: type[StandInEngine] = StandInEngine
    driver: type[StandInCheckpointer] = StandInCheckpointer
    apparatus: type[StandInApparatus] = StandInApparatus
    mutants: tuple[type[Judge], ...] = ()
    """The judges that say something else here."""

    def made(self) -> StandInApparatus:
        return self.apparatus(2, engine=self.engine, driver=self.driver)


_O = ArmOutcome
SITUATIONS = (
    Situation("as it should be", "J", _O.RIGHT, None),
    Situation("a live workspace", "D", _O.LOST, "restore", "CUDA_ERROR_NOT_SUPPORTED",
              mutants=(StopsAtCheckpoint,)),
    Situation("a peer's memory mapped", "C", _O.LOST, "restore", "CUDA_ERROR_INVALID_VALUE",
              mutants=(StopsAtCheckpoint,)),
    Situation("graphs with stale addresses", "Q", _O.LOST, "answers", "cudaErrorIllegalAddress",
              mutants=(NamesNoLoggedError,)),
    Situation("wrong the second time", "E", _O.WRONG, "answers", engine=WrongSecondTime,
              mutants=(FirstRepeatOnly,)),
    Situation("wrong on one prompt", "E", _O.WRONG, "answers", engine=WrongLastPrompt,
              mutants=(FirstPromptOnly, ComparesWithItself)),
    Situation("never the same twice", "E", _O.UNKNOWN, "control", engine=Unstable,
              mutants=(NoControl, UnknownIsRight)),
    Situation("a workspace that never was", "E", _O.UNKNOWN, "start", engine=NoWorkspace,
              mutants=(BelievesTheLaunch, UnknownIsRight)),
    Situation("freed on one rank", "E", _O.UNKNOWN, "prepare", engine=FreesOnOneRank,
              mutants=(BelievesTheHooks, UnknownIsRight)),
    Situation("a refusing hook", "L", _O.REFUSED, "prepare"),
    Situation("hooks that fail half-way", "E", _O.UNKNOWN, "prepare", engine=FailsHalfWay,
              mutants=(AnyFailureIsARefusal, UnknownIsRight)),
    Situation("graphs that do not come back", "R", _O.UNKNOWN, "rebuild", engine=CapturesNothing,
              mutants=(UnknownIsRight,)),
    Situation("a driver that refuses one rank", "E", _O.REFUSED, "checkpoint", "CUDA_ERROR_NOT_SUPPORTED",
              driver=OneRankRefuses, mutants=(FirstRanksError,)),
    Situation("one rank is left out", "E", _O.UNKNOWN, "lock", driver=OneRankOnly, mutants=(FirstRankOnly,)),
    Situation("a checkpoint of nothing", "E", _O.UNKNOWN, "checkpoint", driver=TakesNothing,
              mutants=(MemoryIsNoMatter,)),
    Situation("a driver that does not return", "E", _O.HANG, "checkpoint", driver=Hangs,
              mutants=(HangIsUnknown,)),
    Situation("ranks that have settled in prepare", "E", _O.HANG, "prepare", engine=SlowPrepare,
              mutants=(HangIsUnknown,)),
    Situation("a prepare that is only slow", "E", _O.UNKNOWN, "prepare", engine=SlowPrepare,
              apparatus=Undiagnosed, mutants=(DeadlineIsHang, UnknownIsRight)),
    Situation("another engine answers", "E", _O.UNKNOWN, "answers", engine=ComesBackAfresh,
              mutants=(AnyProcess,)),
    Situation("a rank dies at the first touch", "E", _O.LOST, "answers", engine=DiesAtFirstTouch,
              mutants=(DeadIsUnknown,)),
)  # fmt: skip
