"""Arms that break, runs that are killed or go on, and neighbours on one GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import EngineStartError, UsageError
from nvsnap_conformance.experiments import gpu_memory
from nvsnap_conformance.experiments.plan import Arm, Plan
from nvsnap_conformance.experiments.record import (
    ArmOutcome,
)
from nvsnap_conformance.experiments.runner import Experiment
from nvsnap_conformance.experiments.standin import StandInApparatus, StandInEngine
from nvsnap_conformance.processes import ProcessId
from tests.experiment_runs import PLAN, experiment, outcomes

if TYPE_CHECKING:
    from pathlib import Path


class BrokenOnce(StandInApparatus):
    """Cannot start the engines of ``broken`` at their first attempt."""

    def __init__(self, *broken: str) -> None:
        super().__init__(2)
        self.broken = set(broken)
        self.started: list[str] = []

    def start(self, plan: Plan, arm: Arm, *rest: Any) -> StandInEngine:
        self.started.append(arm.name)
        if arm.name in self.broken:
            self.broken.remove(arm.name)
            raise EngineStartError("it did not come up", cause="no memory")
        return super().start(plan, arm, *rest)


def test_what_broke_is_unknown_and_runs_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    apparatus = BrokenOnce("E")
    first = experiment(out, apparatus, names=("E", "J", "A")).run()
    assert outcomes(first) == {
        "E": ArmOutcome.UNKNOWN,
        "J": ArmOutcome.RIGHT,
        "A": ArmOutcome.LOST,
    }
    assert (first.exit_code, first.state) == (6, "aborted")
    second = experiment(out, apparatus, names=("E", "J", "A"), resume=True).run()
    assert apparatus.started == ["E", "J", "A", "E"]
    assert (second.exit_code, outcomes(second)["E"]) == (0, ArmOutcome.RIGHT)
    assert second.experiment is not None
    assert {arm.name: arm.attempt for arm in second.experiment.arms} == {"E": 2, "J": 1, "A": 1}
    assert sorted(path.name for path in (out / "engines").iterdir()) == ["A-1", "E-1", "E-2", "J-1"]


class TakenAlong(StandInApparatus):
    """The first engines of ``victims`` fail."""

    def __init__(self, *victims: str) -> None:
        super().__init__(2)
        self.victims = victims
        self.started: list[str] = []

    def start(self, plan: Plan, arm: Arm, *rest: Any) -> StandInEngine:
        self.started.append(arm.name)
        if arm.name in self.victims and self.started.count(arm.name) == 1:
            raise EngineStartError("CUDA error: unspecified launch failure", cause="a neighbour")
        return super().start(plan, arm, *rest)


def test_what_a_neighbour_may_have_done_is_unknown_and_runs_again_alone(tmp_path: Path) -> None:
    apparatus = TakenAlong("S")
    record = experiment(tmp_path / "run", apparatus, names=("S", "D", "P"), at_once=3).run()
    assert sorted(apparatus.started) == ["D", "P", "S", "S"]
    assert apparatus.started[-1] == "S"
    assert outcomes(record) == dict.fromkeys(("S", "D", "P"), ArmOutcome.LOST)
    assert record.experiment is not None
    assert {arm.name: arm.attempt for arm in record.experiment.arms} == {"S": 2, "D": 1, "P": 1}
    assert record.experiment.settling[-1].arms == ["S"]


def test_until_it_has_run_again_it_is_unknown_beside_whom_it_was(tmp_path: Path) -> None:
    class Stopped(TakenAlong):
        def start(self, plan: Plan, arm: Arm, *rest: Any) -> StandInEngine:
            if self.started.count("S"):
                raise KeyboardInterrupt
            return super().start(plan, arm, *rest)

    with pytest.raises(KeyboardInterrupt):
        experiment(tmp_path / "run", Stopped("S"), names=("D", "S"), at_once=2).run()
    told = json.loads((tmp_path / "run" / "arms" / "S.json").read_text())
    assert (told["outcome"], told["attempt"]) == ("unknown", 1)
    assert "unspecified launch failure" in told["reason"]


def test_a_bad_end_counts_where_it_comes_alone_too(tmp_path: Path) -> None:
    record = experiment(tmp_path / "run", names=("E", "Q"), at_once=2).run()
    assert record.experiment is not None
    assert {arm.name: (arm.outcome, arm.attempt) for arm in record.experiment.arms} == {
        "E": (ArmOutcome.RIGHT, 1),
        "Q": (ArmOutcome.LOST, 2),
    }
    assert [group.arms for group in record.experiment.settling] == [["E", "Q"], ["Q"]]


def test_what_a_killed_run_has_left_is_no_engine_s_folder(tmp_path: Path) -> None:
    left = tmp_path / "run" / "engines" / "E-1"
    left.mkdir(parents=True)
    (left / "engine.log").write_text("killed")
    record = experiment(tmp_path / "run", names=("E",)).run()
    assert record.experiment is not None
    assert record.experiment.arms[0].attempt == 2
    assert [path.name for path in left.iterdir()] == ["engine.log"]


def test_with_no_arm_decided_it_is_the_environment(tmp_path: Path) -> None:
    record = experiment(tmp_path / "run", BrokenOnce("E"), names=("E",)).run()
    assert record.exit_code == 7


def test_a_part_can_be_run_and_the_rest_added(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment(out, names=("D",)).run()
    record = experiment(out, names=("E",), resume=True).run()
    assert record.experiment is not None
    assert record.experiment.planned == ["E", "D"]
    assert record.experiment.answer.workspace == "must go"


def test_when_the_time_is_up_nothing_more_is_begun(tmp_path: Path) -> None:
    apparatus = BrokenOnce()
    record = experiment(tmp_path / "run", apparatus, names=("E", "J"), seconds=0.0).run()
    assert apparatus.started == []
    assert record.exit_code == 7
    assert record.experiment is not None
    assert record.experiment.planned == ["E", "J"]


def test_two_runs_are_never_mixed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment(out, names=("E",)).run()
    with pytest.raises(UsageError, match="earlier run"):
        experiment(out, names=("E",)).run()
    other = StandInApparatus(2)
    other.conditions = other.conditions.model_copy(update={"driver": "590"})
    with pytest.raises(UsageError, match=r"driver was stand-in of 580\.159\.04, is 590"):
        experiment(out, other, names=("J",), resume=True).run()
    (out / "arms" / "E.json").write_text("{")
    with pytest.raises(UsageError, match=r"E\.json is no arm"):
        experiment(out, names=("E",), resume=True).run()
    (out / "arms" / "E.json").unlink()
    os.mkfifo(out / "arms" / "E.json")
    with pytest.raises(UsageError, match="no regular file but a named pipe"):
        experiment(out, names=("E",), resume=True).run()


@pytest.mark.parametrize("name", ["arms", "engines", "teardown.md", "teardown.json"])
def test_what_stands_in_the_record_s_place_is_told_before_an_engine_is_started(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    place = tmp_path / "run" / name
    place.mkdir() if "." in name else place.touch()
    apparatus = BrokenOnce()
    with pytest.raises(UsageError, match=f"{name} is (no|a) folder"):
        experiment(tmp_path / "run", apparatus, names=("E",)).run()
    assert apparatus.started == []


def test_an_arm_that_is_defined_otherwise_now_runs_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment(out, names=("E",)).run()
    live = PLAN.arm[0].model_dump() | {"flashinfer_workspace": "live"}
    others = [arm.model_dump() for arm in PLAN.arm[1:] if arm.name != "D"]
    changed = Plan.model_validate(PLAN.model_dump() | {"arm": [live, *others]})
    apparatus = BrokenOnce()
    record = Experiment(changed, changed.select(("E",)), apparatus, out, resume=True).run()
    assert apparatus.started == ["E"]
    assert outcomes(record) == {"E": ArmOutcome.LOST}


class Faulty(StandInApparatus):
    """Has a defect of the suite's own in one arm."""

    def checkpointer(self) -> Any:
        raise ZeroDivisionError("a defect")


def test_a_defect_of_the_suite_is_no_verdict(tmp_path: Path) -> None:
    record = experiment(tmp_path / "run", Faulty(2), names=("E",)).run()
    assert record.experiment is not None
    (arm,) = record.experiment.arms
    assert arm.outcome is ArmOutcome.UNKNOWN
    assert "the suite failed: ZeroDivisionError" in arm.reason
    assert "ZeroDivisionError" in (tmp_path / "run" / "engines" / "E-1" / "suite-error.txt").read_text()


class Leaking(StandInApparatus):
    """Its engines' memory stays on the device."""

    def start(self, *args: Any) -> StandInEngine:
        engine = super().start(*args)
        engine.process.close = lambda: None
        return engine


def test_memory_that_does_not_come_back_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "SETTLE_SECONDS", 0.05)
    said: list[str] = []
    record = experiment(tmp_path / "run", Leaking(2), names=("E",), say=said.append).run()
    assert record.experiment is not None
    (settling,) = record.experiment.settling
    assert settling.back is False
    assert "MiB more" in settling.note
    assert any("MiB more" in line for line in said)
    assert settling.note in (tmp_path / "run" / "teardown.md").read_text()


# Sudden death ------------------------------------------------------------------------------------------

STUCK = """
import sys
from pathlib import Path
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.experiments.plan import read_plan
from nvsnap_conformance.experiments.runner import Experiment
from nvsnap_conformance.experiments.standin import StandInApparatus

class Real(StandInApparatus):
    # Engines with real processes, in whose start the arms are stuck.
    def start(self, plan, arm, workdir, say):
        argv = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
        process = EngineProcess.launch(argv, env={}, workdir=workdir)
        sys.stdout.write(f"{process.root.pid} {process.root.create_time}\\n")
        sys.stdout.flush()
        wait_for("its end", lambda: process.poll() is not None, Deadline.after(600))
        from nvsnap_conformance.errors import EngineStartError
        raise EngineStartError("it has ended")

plan = read_plan()
Experiment(plan, plan.select(("E", "J")), Real(2), Path(sys.argv[1]), at_once=2).run()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_experiment(tmp_path: Path, signum: signal.Signals) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    engines = [
        ProcessId(int(pid), float(created))
        for pid, created in (run.stdout.readline().split() for _ in range(2))
    ]
    assert all(engine.alive for engine in engines)
    run.send_signal(signum)
    wait_for("the experiment's end", lambda: run.poll() is not None, Deadline.after(60))
    wait_for("the engines' end", lambda: not any(engine.alive for engine in engines), Deadline.after(60))
    run.stdout.close()
    state = json.loads((tmp_path / "run" / "results.json").read_text())["state"]
    assert state == ("running" if signum is signal.SIGKILL else "aborted")
