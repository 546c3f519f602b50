"""Known-bad orchestrators and answers: what the lifecycle's and the oracle's clauses must catch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.engines.protocol import Completion, EngineHandle, HooksSpec
from nvsnap_conformance.lifecycle.driver import (
    DISCARDS_WEIGHTS,
    SLEEP_SECONDS,
    LifecycleDriver,
    Variant,
    VerbFailed,
)
from nvsnap_conformance.lifecycle.trace import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.deadline import Deadline


class NeverQuiesces(LifecycleDriver):
    """Prepares a serving engine: a request can reach a prepared worker."""

    def verbs(self, variant: Variant, deadline: Deadline) -> None:
        """Leave quiesce and resume out."""
        self.prepare(deadline)
        self.snapshot("prepared", deadline)
        self.between("prepared")
        if variant is Variant.FULL:
            self.dump(deadline)
            self.load(deadline)
        self.rebuild(deadline)
        self.between("rebuilt")


class DumpsBeforePrepare(LifecycleDriver):
    """Freezes the engine first and releases the collectives afterwards."""

    def verbs(self, variant: Variant, deadline: Deadline) -> None:
        """Dump and load before prepare."""
        self.quiesce(deadline)
        if variant is Variant.FULL:
            self.dump(deadline)
            self.load(deadline)
        self.prepare(deadline)
        self.snapshot("prepared", deadline)
        self.between("prepared")
        self.rebuild(deadline)
        self.between("rebuilt")
        self.resume(deadline)


class NeverCheckpoints(LifecycleDriver):
    """Prepares, rebuilds and says that the engine was taken through a lifecycle."""

    def checkpoint_and_restore(self, deadline: Deadline) -> None:
        """Leave it out."""


class PromotesUnrebuilt(LifecycleDriver):
    """Lets a restored engine serve although its ranks have not rebuilt what they released."""

    def rebuild(self, deadline: Deadline) -> None:
        """Leave it out."""


class WakesWithoutReload(LifecycleDriver):
    """Sleeps at level 2, which drops the weights, and wakes as after level 1, which kept them.

    An engine without sleep mode (on CPU its workers ignore the calls) gets memory that holds something else
    from :data:`LOST`.
    """

    LOST = HooksSpec("nvsnap_lost_weights:LostWeights", path=Path(__file__).parent / "in_engine")

    def verbs(self, variant: Variant, deadline: Deadline) -> None:
        """Sleep at level 2, whatever the target says."""
        self.sleep_level = DISCARDS_WEIGHTS
        super().verbs(variant, deadline)

    def wake(self, level: int, deadline: Deadline) -> None:
        """Wake, and leave the weights as they are."""
        deadline = deadline.sooner(SLEEP_SECONDS)
        with self._front(Verb.WAKE):
            self.engine.wake(deadline, reload=False)
            if not self.engine.config.sleep_mode:
                replies = self.engine.rpc("lose", hooks=self.LOST, deadline=deadline)
                problems = [f"rank {reply.rank}: {reply.error}" for reply in replies if reply.error]
                if problems:
                    raise VerbFailed(f"after level {level}: {'; '.join(problems)}")


class DriftingAnswers:
    """An engine whose later answers differ in one token from the ones it gave first.

    Wraps a handle; everything but ``generate`` is the engine's own.
    """

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine
        self._calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompts: Sequence[str], *, max_tokens: int, deadline: Deadline) -> list[Completion]:
        """Change the last token of every answer but the first to each prompt."""
        answers = self._engine.generate(prompts, max_tokens=max_tokens, deadline=deadline)
        return [self._drift(answer) for answer in answers]

    def _drift(self, answer: Completion) -> Completion:
        calls = self._calls[answer.prompt] = self._calls.get(answer.prompt, 0) + 1
        if calls == 1:
            return answer
        return Completion(
            answer.prompt, (*answer.tokens[:-1], answer.tokens[-1] ^ 1), answer.logprobs, answer.text
        )


class DriftingLogprobs(DriftingAnswers):
    """An engine whose later answers have the same tokens, with log probabilities 1e-3 nats off.

    One part in a thousand is the tolerance of vLLM's own snapshot oracle, on one token.
    """

    def _drift(self, answer: Completion) -> Completion:
        calls = self._calls[answer.prompt] = self._calls.get(answer.prompt, 0) + 1
        if calls == 1:
            return answer
        shifted = tuple(value - 1e-3 for value in answer.logprobs)
        return Completion(answer.prompt, answer.tokens, shifted, answer.text)


class TiringAnswers(DriftingAnswers):
    """An engine that is right for a dozen answers, and wrong in one token from then on."""

    RIGHT = 12

    def _drift(self, answer: Completion) -> Completion:
        self._calls[""] = self._calls.get("", 0) + 1
        if self._calls[""] <= self.RIGHT:
            return answer
        return Completion(
            answer.prompt, (*answer.tokens[:-1], answer.tokens[-1] ^ 1), answer.logprobs, answer.text
        )


class CannedText(DriftingAnswers):
    """An engine that answers every prompt with the same fluent text."""

    def _drift(self, answer: Completion) -> Completion:
        return Completion(answer.prompt, answer.tokens, answer.logprobs, "Certainly! " * 8)
