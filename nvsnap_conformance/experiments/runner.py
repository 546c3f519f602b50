"""Runs the arms of an experiment, several at once where asked, and keeps the record as they come.

Below ``--out``: ``arms/NAME.json``, written whole as each arm ends; ``results.json``, the run record with
the arms so far; ``teardown.md`` and ``teardown.json``, the page; ``engines/NAME-ATTEMPT/``, what each engine
wrote.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from nvsnap_conformance import __version__
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.process import close_all
from nvsnap_conformance.errors import NvsnapError, UsageError
from nvsnap_conformance.experiments import blame
from nvsnap_conformance.experiments.arm import ArmRun
from nvsnap_conformance.experiments.gpu_memory import settled
from nvsnap_conformance.experiments.judge import Judge
from nvsnap_conformance.experiments.page import JSON, MARKDOWN, write_page
from nvsnap_conformance.experiments.record import (
    PROFILE,
    ArmOutcome,
    ArmRecord,
    ExperimentRecord,
    PinnedCopy,
    Settling,
)
from nvsnap_conformance.files import read_text
from nvsnap_conformance.outcomes import ExitCode
from nvsnap_conformance.report.compare_input import read_record
from nvsnap_conformance.report.model import RunRecord
from nvsnap_conformance.report.record import write_results, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvsnap_conformance.experiments.apparatus import Apparatus
    from nvsnap_conformance.experiments.plan import Arm, Plan

    Say = Callable[[str], None]

_RESULTS = "results.json"

_DOUBTFUL = {ArmOutcome.LOST, ArmOutcome.WRONG, ArmOutcome.HANG, ArmOutcome.UNKNOWN}
"""What may be a neighbour's doing, where the driver itself has answered nothing but success."""


@dataclass
class Experiment:
    """One run of the arms ``chosen`` of ``plan``, into the folder ``out``.

    ``bandwidth`` times pinned copies first. ``seconds`` bounds the run: no group of arms is begun once it
    has passed. With ``resume`` the arms that are decided in ``out`` already are left alone; the others run
    again.
    """

    plan: Plan
    chosen: Sequence[Arm]
    apparatus: Apparatus
    out: Path
    at_once: int = 1
    resume: bool = False
    bandwidth: bool = False
    seconds: float | None = None
    say: Say = lambda _text: None
    judge: Judge = field(default_factory=Judge)
    _arms: dict[str, ArmRecord] = field(default_factory=dict, init=False)
    _settling: list[Settling] = field(default_factory=list, init=False)
    _copy: PinnedCopy | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _started: datetime = field(default_factory=lambda: datetime.now(UTC), init=False)

    def run(self) -> RunRecord:
        """Run what is to be run and return the record.

        Raises :class:`UsageError` for a folder that holds another run, or one under other conditions.
        """
        self._load()
        left = [arm for arm in self.chosen if not self._decided(arm)]
        for arm in self.chosen:
            if arm not in left:
                self.say(f"{arm.name}: {self._arms[arm.name].outcome}, decided already")
        deadline = None if self.seconds is None else Deadline.after(self.seconds)
        self._write("running")
        if self.bandwidth and left:
            self._measure()
        baseline = self.apparatus.memory.of_devices()
        groups = [left[first : first + self.at_once] for first in range(0, len(left), self.at_once)]
        try:
            while groups:
                if deadline is not None and deadline.expired:
                    self.say("the time is up: the arms that are left can be run with --resume")
                    break
                again = self._group(groups.pop(0), baseline)
                groups += [[arm] for arm in again]
        except BaseException:
            self._write("aborted")
            raise
        return self._write("complete" if all(self._decided(arm) for arm in self.chosen) else "aborted")

    def _group(self, arms: Sequence[Arm], baseline: dict[str, int] | None) -> list[Arm]:
        """Run ``arms`` side by side and see the GPU memory back where it was; return who runs again."""
        with ThreadPoolExecutor(len(arms), thread_name_prefix="arm") as pool:
            try:
                list(pool.map(self._one, arms))
            except BaseException:
                # Their engines gone, the other arms end at once, and the pool can be left.
                close_all()
                raise
        back, note = settled(self.apparatus.memory, baseline)
        names = [arm.name for arm in arms]
        self._settling.append(Settling(arms=names, back=back, note=note))
        if back is not True:
            self.say(f"GPU memory after {', '.join(names)}: {note}")
        return self._taken_along(arms)

    def _taken_along(self, arms: Sequence[Arm]) -> list[Arm]:
        """Return the arms whose end may be a neighbour's doing, call them unknown, and have them run alone.

        Engines that share GPUs wait for each other's spinning kernels. With four at TP=2 some of those that
        had come back failed seconds later (``cudaErrorLaunchFailure``) where alone they are right (driver
        580.159.04, 2x H200). What the driver itself answers to an arm, and right tokens, are that arm's own.
        """
        records = [self._arms[arm.name] for arm in arms]
        again: list[Arm] = []
        for arm, record in zip(arms, records, strict=True):
            beside = ", ".join(other.name for other in arms if other is not arm)
            if not beside or record.rank_errors or record.outcome not in _DOUBTFUL:
                continue
            if record.outcome.decided:
                self._keep(
                    record.model_copy(
                        update={
                            "outcome": ArmOutcome.UNKNOWN,
                            "reason": f"{record.outcome} beside {beside}, perhaps by them: {record.reason}",
                        }
                    )
                )
            self.say(f"{arm.name}: runs again alone, for it was beside {beside}")
            again.append(arm)
        return again

    def _one(self, arm: Arm) -> None:
        attempt, folder = self._folder(arm)
        self.say(f"{arm.name}: {arm.summary}")
        record = ArmRun(
            self.apparatus,
            self.plan,
            arm,
            folder,
            judge=self.judge,
            say=lambda text: self.say(f"{arm.name}: {text}"),
            attempt=attempt,
        ).run()
        self._keep(record)

    def _keep(self, record: ArmRecord) -> None:
        with self._lock:
            write_whole(self.out / "arms" / f"{record.name}.json", record.model_dump_json(indent=1) + "\n")
            self._arms[record.name] = record
            self._write("running")

    def _measure(self) -> None:
        """Time pinned copies; no outcome depends on them, so a failure is told and no more."""
        folder = Path(tempfile.mkdtemp(prefix="bandwidth-", dir=self.out))
        try:
            self._copy = self.apparatus.pinned_copy(folder)
        except NvsnapError as error:
            self.say(f"no pinned copies: {error}")
        else:
            self.say(
                f"pinned copy: {self._copy.d2h / 1e9:.1f} GB/s to the host, {self._copy.h2d / 1e9:.1f} back"
            )

    def _folder(self, arm: Arm) -> tuple[int, Path]:
        """Return the number of an arm's next attempt and its new folder; a killed run may have left some."""
        earlier = self._arms.get(arm.name)
        attempt = 0 if earlier is None else earlier.attempt
        while True:
            attempt += 1
            folder = self.out / "engines" / f"{arm.name}-{attempt}"
            if not folder.exists():
                folder.mkdir(parents=True)
                return attempt, folder

    # The record -----------------------------------------------------------------------------------

    def _decided(self, arm: Arm) -> bool:
        """Whether an arm has an outcome; one of another definition has to be run again."""
        record = self._arms.get(arm.name)
        return record is not None and record.outcome.decided and record.factors == arm.factors

    def _load(self) -> None:
        """Read the arms of an earlier run in ``out``; refuse to mix two runs, or two conditions."""
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"{self.out} is a file", next_step="name a folder, which may not exist yet")
        for name, folder in (("arms", True), ("engines", True), (MARKDOWN, False), (JSON, False)):
            place = self.out / name
            if place.exists() and place.is_dir() is not folder:
                raise UsageError(
                    f"{place} is {'no' if folder else 'a'} folder",
                    cause="the record of an experiment has its own files there",
                    next_step="name another folder with --out",
                )
        files = sorted((self.out / "arms").glob("*.json"))
        if not files and not (self.out / _RESULTS).exists():
            return
        if not self.resume:
            raise UsageError(
                f"{self.out} holds the record of an earlier run",
                next_step="give --resume to go on with it, or name another folder with --out",
            )
        earlier = read_record(self.out).experiment
        if earlier is None:
            raise UsageError(f"{self.out} holds the record of a run that is no experiment")
        mine, theirs = self.apparatus.conditions.model_dump(), earlier.conditions.model_dump()
        if other := [f"{key} was {theirs[key]}, is {mine[key]}" for key in mine if mine[key] != theirs[key]]:
            raise UsageError(
                f"{self.out} holds arms under other conditions: {'; '.join(other)}",
                cause="arms under different conditions must not be compared with each other",
                next_step="name another folder with --out",
            )
        self._settling, self._copy = list(earlier.settling), earlier.pinned_copy
        for file in files:
            try:
                record = ArmRecord.model_validate_json(read_text(file))
            except (ValidationError, OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"{file} is no arm of this version: {error}", next_step="remove it to run the arm again"
                ) from error
            self._arms[record.name] = record

    def _write(self, state: Literal["running", "complete", "aborted"]) -> RunRecord:
        """Replace record and page; called under the lock while arms run."""
        arms = [self._arms[arm.name] for arm in self.plan.arm if arm.name in self._arms]
        names = {arm.name for arm in arms} | {arm.name for arm in self.chosen}
        experiment = ExperimentRecord(
            question=self.plan.question,
            conditions=self.apparatus.conditions,
            planned=[arm.name for arm in self.plan.arm if arm.name in names],
            arms=arms,
            settling=self._settling,
            pinned_copy=self._copy,
            conclusions=blame.conclusions(arms),
            answer=blame.answer(arms),
        )
        undecided = [arm.name for arm in self.chosen if not self._decided(arm)]
        record = RunRecord(
            suite_version=__version__,
            state=state,
            started=self._started,
            ended=None if state == "running" else datetime.now(UTC),
            command=sys.argv,
            targets=[self.apparatus.conditions.target],
            profiles=[PROFILE],
            machine={
                "kernel": platform.release(),
                "system": platform.platform(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "driver": self.apparatus.conditions.driver,
                "gpus": self.apparatus.conditions.gpus,
            },
            engines=[],
            cases=[],
            clauses=[],
            mutants=[],
            missing=[],
            degraded=sorted({name for arm in arms for name in arm.degraded}),
            verdict=state if state == "running" else _verdict(experiment, undecided),
            exit_code=None if state == "running" else int(_exit_code(experiment, undecided)),
            experiment=experiment,
        )
        write_results(self.out, record)
        if state != "running" or arms:
            write_page(self.out, record)
        return record


def _exit_code(experiment: ExperimentRecord, undecided: list[str]) -> ExitCode:
    if not undecided:
        return ExitCode.CONFORMANT
    decided = any(arm.outcome.decided for arm in experiment.arms)
    return ExitCode.INCOMPLETE if decided else ExitCode.ENVIRONMENT


def _verdict(experiment: ExperimentRecord, undecided: list[str]) -> str:
    text = f"{len(experiment.arms)} arms: {experiment.answer.statement}"
    return f"incomplete ({', '.join(undecided)} not decided): {text}" if undecided else text
