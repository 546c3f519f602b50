"""An arm with real processes and the suite's own device checkpointer over the stand-in driver."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.checkpoint import stand_in_driver
from nvsnap_conformance.checkpoint.cuda_driver import CudaDriverCheckpointer
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.experiments.arm import ArmRun
from nvsnap_conformance.experiments.judge import Judge
from nvsnap_conformance.experiments.plan import Arm, Plan, read_plan
from nvsnap_conformance.experiments.record import ArmOutcome
from nvsnap_conformance.experiments.standin import StandInApparatus, StandInEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.engines.protocol import Completion, RankReply

PLAN = read_plan()
RANKS = """
import os, signal
os.fork()
signal.pause()
"""


class RealProcesses(StandInEngine):
    """A stand-in whose ranks are real processes, and gone when these are."""

    def look(self) -> None:
        living = self.process.tree()
        for rank in self.state:
            rank.alive = rank.process in living

    def rpc(self, *args: Any, **more: Any) -> list[RankReply]:
        self.look()
        return super().rpc(*args, **more)

    def generate(self, *args: Any, **more: Any) -> list[Completion]:
        self.look()
        return super().generate(*args, **more)


class NotRead:
    """GPU memory that nobody can read."""

    source = "not read"

    def of_ranks(self, pids: Sequence[int]) -> list[int | None]:
        return [None] * len(pids)

    def of_devices(self) -> None:
        return None


class RealDriverApparatus(StandInApparatus):
    """Launches processes for the ranks, and drives them through the stand-in driver."""

    def __init__(self, folder: Path, fault: tuple[int, str, str] | None) -> None:
        super().__init__(2, engine=RealProcesses)
        self.memory = NotRead()
        self.folder = folder
        self.fault = fault

    def start(self, plan: Plan, arm: Arm, workdir: Path, say: Any) -> StandInEngine:
        engine = super().start(plan, arm, workdir, say)
        process = EngineProcess.launch([sys.executable, "-c", RANKS], env={}, workdir=workdir)
        members = wait_for(
            "both ranks",
            lambda: tree if len(tree := process.tree()) == 2 else None,
            Deadline.after(30),
        )
        for rank, member in zip(engine.state, members, strict=True):
            rank.process = member
            (self.folder / f"{member.pid}.state").write_text("CU_PROCESS_STATE_RUNNING")
            (self.folder / f"{member.pid}.memory").write_bytes(b"x")
        engine.process = process
        if self.fault is not None:
            number, verb, what = self.fault
            faults = {f"{members[number].pid}:{verb}": what}
            (self.folder / "faults.json").write_text(json.dumps(faults))
        return engine

    def checkpointer(self) -> Any:
        return CudaDriverCheckpointer(driver=Path(stand_in_driver.__file__))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (None, (ArmOutcome.RIGHT, None, None, [])),
        ((1, "restore", "LOST"), (ArmOutcome.LOST, "restore", "CUDA_ERROR_NOT_SUPPORTED", [0, 1])),
        (
            (1, "checkpoint", "CUDA_ERROR_NOT_SUPPORTED"),
            (ArmOutcome.REFUSED, "checkpoint", "CUDA_ERROR_NOT_SUPPORTED", []),
        ),
        ((0, "lock", "CUDA_ERROR_NOT_READY"), (ArmOutcome.REFUSED, "lock", "CUDA_ERROR_NOT_READY", [])),
        ((0, "checkpoint", "IDLE"), (ArmOutcome.UNKNOWN, "checkpoint", None, [])),
    ],
    ids=["sound", "lost at restore", "refused checkpoint", "refused lock", "a success that is none"],
)
def test_what_the_driver_answers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: tuple[int, str, str] | None,
    told: tuple[ArmOutcome, str | None, str | None, list[int]],
) -> None:
    folder, work = tmp_path / "driver", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    monkeypatch.setenv(stand_in_driver.FOLDER, str(folder))
    (arm,) = PLAN.select(("E",))
    apparatus = RealDriverApparatus(folder, fault)
    record = ArmRun(apparatus, PLAN, arm, work, judge=Judge(), say=lambda _: None).run()
    assert (record.outcome, record.phase, record.error, record.lost_ranks) == told, record.reason
    if fault is not None and record.error is not None:
        assert record.rank_errors == {str(fault[0]): record.error}
    assert not apparatus.engines[0].process.tree()
