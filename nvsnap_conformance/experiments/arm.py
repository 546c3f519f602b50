"""One arm, from the start of its engine to its end: observes, has it judged, and returns its record."""

from __future__ import annotations

import time
import traceback
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import HooksSpec, RequestFailed
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.experiments.cycle import ArmCycle, device_calls
from nvsnap_conformance.experiments.judge import (
    REPEATS,
    ArmObservation,
    Judge,
    device_errors,
    drift,
    same_tokens,
)
from nvsnap_conformance.experiments.record import ArmRecord, CudaGraphs, MemoryReading
from nvsnap_conformance.lifecycle.driver import Variant
from nvsnap_conformance.lifecycle.observe import observe_cycle
from nvsnap_conformance.lifecycle.oracle import take_answers
from nvsnap_conformance.report.degraded import degradations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvsnap_conformance.engines.protocol import EngineHandle, Rank
    from nvsnap_conformance.experiments.apparatus import Apparatus
    from nvsnap_conformance.experiments.plan import Arm, Plan
    from nvsnap_conformance.lifecycle.observe import Diagnosis

    Say = Callable[[str], None]

CONTROL_SECONDS = 120.0
"""Allowance for the control's answers, in seconds. The first ones of an engine may compile kernels."""

STOP_SECONDS = 20.0


class ArmRun:
    """Runs one arm. ``folder`` becomes the engine's working directory; it exists and is empty."""

    def __init__(
        self,
        apparatus: Apparatus,
        plan: Plan,
        arm: Arm,
        folder: Path,
        *,
        judge: Judge,
        say: Say,
        attempt: int = 1,
    ) -> None:
        self._apparatus = apparatus
        self._plan = plan
        self._arm = arm
        self._folder = folder
        self._judge = judge
        self._say = say
        self._attempt = attempt
        self._ranks: list[Rank] = []
        self._seconds: dict[str, float] = {}
        self._degraded: list[str] = []
        self._driver: ArmCycle | None = None
        self._phase = "start"

    def run(self) -> ArmRecord:
        """Return the arm's record; whatever breaks is in it, and the engine is gone."""
        began = datetime.now(UTC)
        arm = self._arm
        seen = ArmObservation(arm.factors, self._apparatus.conditions.tensor_parallel)
        engine: EngineHandle | None = None
        try:
            with self._timed("start"):
                engine = self._apparatus.start(self._plan, arm, self._folder, self._say)
            self._observe(engine, seen)
        except (NvsnapError, RequestFailed) as error:
            seen.broken, seen.broken_phase = f"{type(error).__name__}: {one_line(str(error))}", self._phase
        except Exception as error:  # noqa: BLE001 - one arm must not take the others along
            (self._folder / "suite-error.txt").write_text(traceback.format_exc(), encoding="utf-8")
            seen.broken, seen.broken_phase = f"the suite failed: {type(error).__name__}: {error}", self._phase
        left = self._end(engine)
        judgement = self._judge.judge(seen)
        self._say(f"{judgement.outcome}{f' at {judgement.phase}' if judgement.phase else ''}")
        cycle = seen.cycle
        failure = None if cycle is None else cycle.record.failure
        return ArmRecord(
            name=arm.name,
            summary=arm.summary,
            factors=arm.factors,
            outcome=judgement.outcome,
            phase=judgement.phase,
            error=judgement.error,
            reason=one_line(f"{judgement.reason}; {left}" if left else judgement.reason),
            rank_errors={}
            if failure is None
            else {str(rank): error for rank, error in sorted(device_errors(seen, failure.verb).items())},
            lost_ranks=seen.lost,
            control_equal=same_tokens(*seen.control) if len(seen.control) == REPEATS else None,
            after_equal=self._judge.equal(seen) if cycle is not None and cycle.after else [],
            logprob_drift=self._drift(seen),
            seconds={**self._seconds, **({} if cycle is None else cycle.record.seconds())},
            gpu_memory=seen.memory,
            memory_source=self._apparatus.memory.source,
            degraded=self._degraded,
            bundle=None if seen.diagnosis is None else seen.diagnosis.bundle,
            attempt=self._attempt,
            started=began,
            ended=datetime.now(UTC),
        )

    def _end(self, engine: EngineHandle | None) -> str:
        """End the engine; return what is left of it in words, empty for nothing."""
        if engine is None:
            return ""
        try:
            with self._timed("stop"):
                engine.process.close()
        except NvsnapError as error:
            return one_line(str(error))
        return ""

    def _observe(self, engine: EngineHandle, seen: ArmObservation) -> None:
        self._phase = "control"
        deadline = Deadline.after(CONTROL_SECONDS)
        self._ranks = engine.ranks(deadline)
        seen.processes = {rank.rank: rank.process.pid for rank in self._ranks}
        with self._timed("control"):
            first = take_answers(engine, deadline)
        seen.environment = engine.communication_environment()
        self._degraded = list(degradations(seen.environment))
        seen.memory += self._memory("live")
        self._driver = ArmCycle(
            engine,
            self._hooks(),
            None,
            self._folder / "checkpoint",
            device=self._apparatus.checkpointer(),
            between=lambda moment: seen.memory.extend(self._memory(moment)),
        )
        self._driver.recapture = self._arm.cuda_graphs is CudaGraphs.DROPPED

        def diagnose(reason: str) -> Diagnosis:
            bundles = self._folder.parent.parent / "bundles"
            return self._apparatus.diagnose(engine, self._ranks, bundles, reason)

        self._phase = "cycle"
        self._say("control answered; the cycle begins")
        try:
            # The cycle's own reference, taken before anything is done, is the control's second answer.
            seen.cycle = observe_cycle(engine, self._driver, Variant.FULL, diagnose=diagnose)
            seen.control = [first, seen.cycle.reference]
            seen.diagnosis = seen.cycle.diagnosis
            if seen.cycle.broken is not None and seen.cycle.broken.startswith("DeadlineExceeded"):
                seen.diagnosis = diagnose(f"no answer after the cycle: {seen.cycle.broken}")
        finally:
            living = engine.process.tree()
            seen.lost = [rank.rank for rank in self._ranks if rank.process not in living]
            seen.device_calls = device_calls(self._driver.record)
            if self._driver.recapture_seconds is not None:
                self._seconds["recapture"] = self._driver.recapture_seconds

    def _hooks(self) -> HooksSpec:
        hooks = self._apparatus.hooks
        return HooksSpec(
            hooks.implementation, hooks.path, {**hooks.options, "teardown": self._arm.teardown()}
        )

    def _memory(self, moment: str) -> list[MemoryReading]:
        held = self._apparatus.memory.of_ranks([rank.process.pid for rank in self._ranks])
        return [
            MemoryReading(moment=moment, rank=rank.rank, bytes=bytes_)
            for rank, bytes_ in zip(self._ranks, held, strict=True)
        ]

    def _drift(self, seen: ArmObservation) -> dict[str, float]:
        found: dict[str, float] = {}
        if len(seen.control) > 1:
            found["control"] = drift(seen.control[0], seen.control[1])
        if seen.cycle is not None and seen.cycle.after:
            found["after"] = max(drift(seen.control[0], answers) for answers in seen.cycle.after)
        return found

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[what] = round(time.monotonic() - began, 3)


def one_line(text: str, limit: int = 1200) -> str:
    """Return ``text`` on one line, cut at ``limit`` characters."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"
