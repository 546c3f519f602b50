"""The teardown experiment as a whole, on stand-ins: record, page, resume, several at once, sudden death."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from nvsnap_conformance import cli
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.errors import EngineStartError, TargetError, UsageError
from nvsnap_conformance.experiments import apparatus as apparatus_module
from nvsnap_conformance.experiments import bandwidth, blame, gpu_memory
from nvsnap_conformance.experiments.apparatus import TargetApparatus
from nvsnap_conformance.experiments.gpu_memory import BY_DEVICE, BY_PROCESS, NvmlMemory, settled
from nvsnap_conformance.experiments.plan import Arm, Plan, PlanError, read_plan
from nvsnap_conformance.experiments.record import (
    FACTORS,
    ArmOutcome,
    ArmRecord,
    Factors,
    MemoryReading,
    PinnedCopy,
)
from nvsnap_conformance.experiments.runner import Experiment
from nvsnap_conformance.experiments.standin import StandInApparatus, StandInEngine
from nvsnap_conformance.gpus import VISIBLE, Gpu, Lease, Visible
from nvsnap_conformance.hooks.injection import INJECT
from nvsnap_conformance.processes import ProcessId
from nvsnap_conformance.report.compare import compare
from nvsnap_conformance.report.compare_input import read_expected, read_side
from nvsnap_conformance.targets.model import load_target

if TYPE_CHECKING:
    from nvsnap_conformance.engines.protocol import LaunchConfig
    from nvsnap_conformance.report.model import RunRecord

ROOT = Path(__file__).parents[1]
PLAN = read_plan()
EXPECTED = read_expected(ROOT / "docs" / "evidence" / "teardown.expected.toml")
MEASURED = {arm.name: arm.outcome for arm in EXPECTED.arm}


def as_record(arm: Arm, outcome: ArmOutcome) -> ArmRecord:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return ArmRecord(
        name=arm.name, summary=arm.summary, factors=arm.factors, outcome=outcome, phase=None, error=None,
        reason="", started=now, ended=now,
    )  # fmt: skip


def experiment(out: Path, apparatus: StandInApparatus | None = None, **more: Any) -> Experiment:
    names = more.pop("names", ())
    return Experiment(PLAN, PLAN.select(names), apparatus or StandInApparatus(2), out, **more)


def outcomes(record: RunRecord) -> dict[str, ArmOutcome]:
    assert record.experiment is not None
    return {arm.name: arm.outcome for arm in record.experiment.arms}


# The arms ------------------------------------------------------------------------------------------


def test_the_shipped_arms_begin_with_one_that_is_known_to_be_good() -> None:
    assert MEASURED[PLAN.arm[0].name] is ArmOutcome.RIGHT


def test_every_measured_arm_is_declared_as_it_was_measured() -> None:
    declared = {arm.name: arm.factors for arm in PLAN.arm}
    assert set("ACDEFGHIJKNOPRS") == set(MEASURED)
    for arm in EXPECTED.arm:
        assert declared[arm.name] == arm.factors


def test_every_factor_is_varied_alone_from_the_best_arm() -> None:
    best = next(arm for arm in PLAN.arm if arm.name == "J")
    varied = {d[0] for arm in PLAN.arm if len(d := best.factors.differing(arm.factors)) == 1}
    assert varied == set(FACTORS)


def test_every_arm_has_a_neighbour_in_one_factor() -> None:
    for arm in PLAN.arm:
        assert any(len(arm.factors.differing(other.factors)) == 1 for other in PLAN.arm), arm.name


def test_what_the_launch_leaves_out_is_not_the_hooks() -> None:
    (severed,) = PLAN.select(("E",))
    assert severed.teardown() == {
        "nccl": "live",
        "custom-allreduce": "live",
        "flashinfer-workspace": "freed",
        "cuda-graphs": "kept",
    }
    (best,) = PLAN.select(("R",))
    assert best.teardown() == {
        "nccl": "destroyed",
        "custom-allreduce": "closed",
        "flashinfer-workspace": "freed",
        "cuda-graphs": "dropped",
    }


TEARDOWN = INJECT / "nvsnap_hooks" / "teardown.py"


def test_the_hooks_know_what_the_arms_ask_for() -> None:
    # Read, not imported: it belongs to the engine's interpreter.
    (assigned,) = (
        node.value
        for node in ast.parse(TEARDOWN.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHOICES"
    )
    choices: dict[str, tuple[str, ...]] = ast.literal_eval(assigned)
    for arm in PLAN.arm:
        asked = arm.teardown()
        assert set(asked) == set(choices)
        for kind, choice in asked.items():
            assert choice in choices[kind], f"{arm.name}: {kind} = {choice}"


def test_an_arm_decides_over_the_target() -> None:
    args = (
        "--dtype",
        "half",
        "--no-enforce-eager",
        "--compilation-config",
        "{}",
        "--disable-custom-all-reduce",
    )
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    stock, severed = PLAN.select(("A", "E"))
    if stock.name != "A":
        stock, severed = severed, stock
    launched, settings = PLAN.launch(stock, args, env)
    assert launched == ("--dtype", "half", "--enforce-eager")
    assert settings == {"NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "1"}
    launched, settings = PLAN.launch(severed, ("--compilation-config={}",), env)
    assert launched == ("--disable-custom-all-reduce", "--enforce-eager")
    assert settings["NCCL_P2P_DISABLE"] == settings["NCCL_SHM_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('name = "J"', 'name = "E"'), "two arms are called 'E'"),
        (('level = "severed"', 'level = "sewered"'), "nccl has no level 'sewered'"),
        (('nccl = "severed"', 'nccl = "dead"'), "arm[0].nccl"),
        (("decides_args", "decide_args"), "unknown key 'decide_args'"),
        (('cuda_graphs = "none"', 'cuda_graphs = "kept"'), "have the same levels"),
    ],
)
def test_a_bad_file_of_arms_is_refused(change: tuple[str, str], told: str, tmp_path: Path) -> None:
    text = (ROOT / "nvsnap_conformance" / "experiments" / "teardown.toml").read_text()
    assert change[0] in text
    file = tmp_path / "arms.toml"
    file.write_text(text.replace(*change, 1) if "same" not in told else text.replace(*change))
    with pytest.raises(PlanError) as refused:
        read_plan(file)
    assert told in str(refused.value)


# A whole run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord, StandInApparatus]:
    out = tmp_path_factory.mktemp("experiment") / "run"
    apparatus = StandInApparatus(2)
    return out, experiment(out, apparatus, at_once=4).run(), apparatus


def test_the_physics_that_was_measured_gives_the_outcomes_that_were_measured(
    whole: tuple[Path, RunRecord, StandInApparatus],
) -> None:
    out, record, _ = whole
    expected = read_side(ROOT / "docs" / "evidence" / "teardown.expected.toml")
    found = compare(read_side(out), expected)
    # The conditions are the stand-in's, and that is told; every outcome, phase, error and level is the same.
    assert {d.kind.value for d in found} == {"condition"}
    assert record.exit_code == 0
    assert record.state == "complete"


def test_one_factor_comparison_says_what_was_found_by_hand(
    whole: tuple[Path, RunRecord, StandInApparatus],
) -> None:
    _, record, _ = whole
    assert record.experiment is not None
    answer = record.experiment.answer
    assert (answer.checkpointable, answer.workspace, answer.workspace_alone) == (
        "yes",
        "must go",
        "not enough",
    )
    told = {c.factor: c for c in record.experiment.conclusions}
    assert told["cuda_graphs"].conclusion == "no difference seen"
    workspace = {frozenset((pair.one, pair.other)) for pair in told["flashinfer_workspace"].pairs}
    assert {frozenset("DE"), frozenset("JP"), frozenset("RS")} <= workspace
    assert frozenset("AB") in {
        frozenset((pair.one, pair.other)) for pair in told["flashinfer_workspace"].same
    }


def test_every_conclusion_rests_on_arms_that_differ_in_one_factor(
    whole: tuple[Path, RunRecord, StandInApparatus],
) -> None:
    _, record, _ = whole
    assert record.experiment is not None
    factors = {arm.name: arm.factors for arm in record.experiment.arms}
    pairs = [(c.factor, pair) for c in record.experiment.conclusions for pair in (*c.pairs, *c.same)]
    assert pairs
    for factor, pair in pairs:
        assert factors[pair.one].differing(factors[pair.other]) == (factor,)


def test_each_arm_has_its_own_file_times_and_memory(
    whole: tuple[Path, RunRecord, StandInApparatus],
) -> None:
    out, record, _ = whole
    assert record.experiment is not None
    for arm in record.experiment.arms:
        assert ArmRecord.model_validate_json((out / "arms" / f"{arm.name}.json").read_text()) == arm
        assert {"start", "control", "quiesce", "stop"} <= set(arm.seconds)
    best = next(arm for arm in record.experiment.arms if arm.name == "J")
    assert {"lock", "checkpoint", "restore", "unlock", "rebuild"} <= set(best.seconds)
    assert [arm.name for arm in record.experiment.arms if "recapture" in arm.seconds] == ["R"]
    moments = {(r.moment, r.rank): r.bytes for r in best.gpu_memory}
    assert set(moments) == {
        (moment, rank)
        for moment in ("live", "prepared", "checkpointed", "restored", "rebuilt")
        for rank in (0, 1)
    }
    assert moments["checkpointed", 1] == 0
    assert best.control_equal is True
    assert best.after_equal == [True, True]


def test_the_record_is_of_the_published_form(whole: tuple[Path, RunRecord, StandInApparatus]) -> None:
    out, _, _ = whole
    schema = json.loads((ROOT / "docs" / "results.schema.json").read_text())
    jsonschema.validate(json.loads((out / "results.json").read_text()), schema)


def test_the_page_states_answer_conditions_and_arms(
    whole: tuple[Path, RunRecord, StandInApparatus],
) -> None:
    out, record, _ = whole
    assert record.experiment is not None
    page = (out / "teardown.md").read_text()
    answer = json.loads((out / "teardown.json").read_text())
    assert record.experiment.answer.statement in page
    assert "rehearsal" in page
    for word in ("stand-in of 580.159.04", "stand-in of vllm 0.31.0", "NVLS off"):
        assert word in page
    for arm in record.experiment.arms:
        assert f"| {arm.name} | {arm.factors.nccl} |" in page
    assert "\n\n\n" not in page
    assert answer["answer"]["checkpointable"] == "yes"
    assert answer["conditions"]["driver"] == record.experiment.conditions.driver
    assert answer["conditions"]["always_degraded"] == ["NVLS off"]
    assert len(answer["arms"]) == len(PLAN.arm)


def test_no_engine_is_left(whole: tuple[Path, RunRecord, StandInApparatus]) -> None:
    _, record, apparatus = whole
    assert record.experiment is not None
    assert len(apparatus.engines) == sum(arm.attempt for arm in record.experiment.arms) >= len(PLAN.arm)
    assert all(engine.process.closed for engine in apparatus.engines)
    assert record.experiment is not None
    assert {settling.back for settling in record.experiment.settling} == {True}


# Broken arms and resumption --------------------------------------------------------------------------


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
        "Q": (ArmOutcome.WRONG, 2),
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


# Blame, by laws ----------------------------------------------------------------------------------------

any_factors = st.builds(
    Factors.model_validate,
    st.fixed_dictionaries(
        {
            name: st.sampled_from([level.value for level in field.annotation])  # type: ignore[union-attr]
            for name, field in Factors.model_fields.items()
        }
    ),
)
any_arms = st.lists(any_factors, unique=True, max_size=12).flatmap(
    lambda levels: st.tuples(
        st.just(levels),
        st.lists(st.sampled_from(ArmOutcome), min_size=len(levels), max_size=len(levels)),
    )
)


def records(drawn: tuple[list[Factors], list[ArmOutcome]]) -> list[ArmRecord]:
    base = as_record(PLAN.arm[0], ArmOutcome.RIGHT)
    return [
        base.model_copy(update={"name": f"N{number}", "factors": levels, "outcome": outcome})
        for number, (levels, outcome) in enumerate(zip(*drawn, strict=True))
    ]


@given(any_arms)
def test_blame_never_rests_on_two_factors_or_on_the_unknown(
    drawn: tuple[list[Factors], list[ArmOutcome]],
) -> None:
    arms = records(drawn)
    by_name = {arm.name: arm for arm in arms}
    for conclusion in blame.conclusions(arms):
        assert (conclusion.conclusion == "matters") == bool(conclusion.pairs)
        assert (conclusion.conclusion == "not shown") == (not conclusion.pairs and not conclusion.same)
        for pair in (*conclusion.pairs, *conclusion.same):
            one, other = by_name[pair.one], by_name[pair.other]
            assert one.factors.differing(other.factors) == (conclusion.factor,)
            assert one.outcome.decided
            assert other.outcome.decided


@given(any_arms, st.randoms(use_true_random=False))
def test_the_order_of_the_arms_does_not_matter(
    drawn: tuple[list[Factors], list[ArmOutcome]], random: Any
) -> None:
    arms = records(drawn)
    shuffled = list(arms)
    random.shuffle(shuffled)
    for one, other in zip(blame.conclusions(arms), blame.conclusions(shuffled), strict=True):
        assert one.conclusion == other.conclusion
        assert {frozenset((p.one, p.other)) for p in one.pairs} == {
            frozenset((p.one, p.other)) for p in other.pairs
        }
    first, second = blame.answer(arms), blame.answer(shuffled)
    assert (first.checkpointable, first.workspace, first.workspace_alone) == (
        second.checkpointable,
        second.workspace,
        second.workspace_alone,
    )


@given(any_arms)
def test_a_yes_needs_a_witness_on_both_sides(drawn: tuple[list[Factors], list[ArmOutcome]]) -> None:
    arms = records(drawn)
    answer = blame.answer(arms)
    outcome = {arm.name: arm.outcome for arm in arms}
    if answer.checkpointable == "yes":
        assert {outcome[name] is ArmOutcome.RIGHT for name in answer.witnesses} == {True, False}
    if not any(arm.outcome.decided for arm in arms):
        assert answer.checkpointable == answer.workspace == answer.workspace_alone == "not shown"


@pytest.mark.parametrize(
    ("found", "checkpointable", "workspace", "alone"),
    [
        ({"A": "lost-at-restore", "I": "right"}, "yes", "not shown", "not shown"),
        ({"A": "unknown", "I": "right"}, "not shown", "not shown", "not shown"),
        ({"A": "right", "I": "right"}, "no", "not shown", "not shown"),
        ({"A": "lost-at-restore", "I": "lost-at-restore"}, "no", "not shown", "not shown"),
        ({"A": "lost-at-restore", "B": "right"}, "not shown", "must go", "enough"),
        ({"A": "lost-at-restore", "B": "lost-at-restore"}, "not shown", "not shown", "not enough"),
        ({"D": "right", "E": "right"}, "not shown", "no difference seen", "not shown"),
        ({"D": "hang", "E": "right"}, "not shown", "must go", "not shown"),
        ({"D": "hang", "E": "right", "A": "right", "B": "right"}, "no", "not shown", "enough"),
    ],
)
def test_the_answer(found: dict[str, str], checkpointable: str, workspace: str, alone: str) -> None:
    arms = [as_record(arm, ArmOutcome(found[arm.name])) for arm in PLAN.select(tuple(found))]
    answer = blame.answer(arms)
    assert (answer.checkpointable, answer.workspace, answer.workspace_alone) == (
        checkpointable,
        workspace,
        alone,
    )


# GPU memory ----------------------------------------------------------------------------------------


class FakeNvml:
    """What is used of NVML: devices with bytes (none: lost), and their processes with bytes."""

    class NVMLError(Exception):
        pass

    def __init__(self, **used: int) -> None:
        self.used = used
        self.processes: dict[str, dict[int, int | None]] = {}

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        if handle not in self.used:
            raise self.NVMLError("GPU is lost")
        return type("Info", (), {"used": self.used[handle]})

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        if handle not in self.used:
            raise self.NVMLError("GPU is lost")
        return [
            type("Process", (), {"pid": pid, "usedGpuMemory": held})
            for pid, held in self.processes.get(handle, {}).items()
        ]


def test_memory_by_process_counts_all_devices_and_what_is_gone_as_nothing() -> None:
    nvml = FakeNvml(a=0, b=0)
    memory = NvmlMemory(nvml, ["a", "b"], exclusive=False)
    nvml.processes = {"a": {1: 100, 2: 10}, "b": {2: 200, 9: 999}}
    assert memory.of_ranks([1, 2]) == [100, 210]
    assert memory.source == BY_PROCESS
    nvml.processes = {"a": {1: 100}}
    assert memory.of_ranks([1, 2]) == [100, 0]
    nvml.processes = {"a": {1: 100, 2: None}}
    assert memory.of_ranks([1, 2]) == [100, None]


def test_pids_of_another_namespace_are_not_believed() -> None:
    nvml = FakeNvml(a=1000, b=2000)
    memory = NvmlMemory(nvml, ["a", "b"], exclusive=False)
    nvml.processes = {"a": {1: 100}, "b": {70001: 200}}
    assert memory.of_ranks([1, 2]) == [None, None]
    assert "not told" in memory.source


def test_alone_on_its_devices_a_rank_holds_what_its_device_has_more() -> None:
    nvml = FakeNvml(a=1000, b=2000)
    memory = NvmlMemory(nvml, ["a", "b"], exclusive=True)
    nvml.used = {"a": 1500, "b": 2700}
    assert memory.of_ranks([1, 2]) == [500, 700]
    assert memory.source == BY_DEVICE


def test_a_process_without_a_number_and_a_lost_gpu_are_no_reading() -> None:
    nvml = FakeNvml(a=1000, b=2000)
    memory = NvmlMemory(nvml, ["a", "b"], exclusive=True)
    nvml.processes = {"a": {1: None}, "b": {2: 5}}
    nvml.used = {"a": 1007, "b": 2005}
    assert memory.of_ranks([1, 2]) == [7, 5]
    assert memory.source == BY_DEVICE
    before = memory.of_devices()
    del nvml.used["b"]
    assert memory.of_ranks([1, 2]) == [None, None]
    assert settled(memory, before) == (None, "NVML does not say any more what is used")


def test_a_device_is_back_within_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "SETTLE_SECONDS", 0.05)
    nvml = FakeNvml(a=0)
    memory = NvmlMemory(nvml, ["a"], exclusive=True)
    before = memory.of_devices()
    nvml.used = {"a": 60 << 20}
    assert settled(memory, before) == (True, "back at the baseline")
    nvml.used = {"a": 70 << 20}
    back, note = settled(memory, before)
    assert back is False
    assert "a has 70 MiB more" in note
    assert settled(memory, None)[0] is None


# Speed -------------------------------------------------------------------------------------------------


def test_only_arms_that_ran_alone_are_related_to_the_pinned_copy(tmp_path: Path) -> None:
    out = tmp_path / "run"
    apparatus = StandInApparatus(2)
    apparatus.conditions = apparatus.conditions.model_copy(update={"stand_in": False})
    experiment(out, apparatus, names=("E", "J"), at_once=2, bandwidth=True).run()
    assert "## Speed" not in (out / "teardown.md").read_text()
    experiment(out, apparatus, names=("I", "L", "A"), resume=True).run()
    told = json.loads((out / "teardown.json").read_text())["speeds"]
    assert [speed["name"] for speed in told] == ["I"]
    assert told[0]["moved"] == 877 << 20
    assert "## Speed" in (out / "teardown.md").read_text()


def test_a_share_of_the_pinned_copy() -> None:
    arm = as_record(PLAN.arm[0], ArmOutcome.RIGHT).model_copy(
        update={
            "seconds": {"checkpoint": 2.0, "restore": 1.0},
            "gpu_memory": [
                MemoryReading(moment=moment, rank=rank, bytes=held)
                for moment, rank, held in (
                    ("prepared", 0, 10 << 30), ("prepared", 1, 11 << 30),
                    ("checkpointed", 0, 0), ("checkpointed", 1, 1 << 30),
                )
            ],
        }
    )  # fmt: skip
    copy = PinnedCopy(d2h=float(50 << 30), h2d=float(20 << 30))
    lost = arm.model_copy(update={"outcome": ArmOutcome.LOST})
    assert bandwidth.speeds([lost], [arm.name], copy) == []
    at_no_time = arm.model_copy(update={"seconds": {"checkpoint": 0.0, "restore": 1.0}})
    assert bandwidth.speeds([at_no_time], [arm.name], copy) == []
    (speed,) = bandwidth.speeds([arm], [arm.name], copy)
    assert speed["moved"] == 10 << 30
    assert (speed["checkpoint_share"], speed["restore_share"]) == (0.1, 0.5)
    assert bandwidth.speeds([arm], [], copy) == []


FAKE_TORCH = """
class cuda:
    device_count = staticmethod(lambda: 2)
    synchronize = staticmethod(lambda: None)
    class device:
        def __init__(self, number): pass
        def __enter__(self): pass
        def __exit__(self, *_): pass
class Tensor:
    def copy_(self, other): pass
uint8 = None
empty = lambda *_, **__: Tensor()
"""


def test_pinned_copies_are_timed_in_the_engine_s_interpreter(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    work = tmp_path / "work"
    work.mkdir()
    copy = bandwidth.measure(Path(sys.executable), {"PYTHONPATH": str(tmp_path)}, work)
    assert copy.d2h > 0
    assert copy.h2d > 0


def test_no_pinned_copies_is_told_and_no_more(tmp_path: Path) -> None:
    class NoTorch(StandInApparatus):
        def pinned_copy(self, workdir: Path) -> PinnedCopy:
            return bandwidth.measure(Path(sys.executable), {"PYTHONPATH": "/nowhere"}, workdir)

    said: list[str] = []
    record = experiment(tmp_path / "run", NoTorch(2), names=("E",), bandwidth=True, say=said.append).run()
    assert record.exit_code == 0
    assert any("pinned copies could not be timed" in line and "torch" in line for line in said)


# The apparatus of a target ------------------------------------------------------------------------------


def test_a_target_without_a_device_checkpointer_is_refused() -> None:
    with pytest.raises(TargetError, match="no device checkpointer"):
        TargetApparatus(load_target("vllm-cpu"), 2, at_once=1, say=lambda _: None)


def test_an_arm_s_engine_is_the_target_s_on_the_leased_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "torch-2.11.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    target = load_target("vllm-cpu")
    engine = target.engine.model_copy(
        update={
            "processor": "cuda",
            "args": ("--disable-custom-all-reduce", "--seed", "7"),
            "env": {
                "NCCL_NVLS_ENABLE": "0",
                "NCCL_P2P_DISABLE": "1",
                "PYTHONPATH": str(info.parent),
            },
        }
    )
    checkpoint = target.checkpoint.model_copy(update={"device": "cuda-driver"})
    target = target.model_copy(update={"engine": engine, "checkpoint": checkpoint})
    environment = SimpleNamespace(
        python=Path(sys.executable), import_paths=(), distribution="vllm", version="0.31.0"
    )
    nvml = FakeNvml(a=1, b=2)
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    gpus = (Gpu("a", 3, "H200"), Gpu("b", 1, "H200"))
    released: list[bool] = []

    class FakeLease(Lease):
        def release(self, _deadline: Deadline | None = None) -> list[str]:
            released.append(True)
            return []

    started: list[LaunchConfig] = []

    def bring_up(_engine: object, config: LaunchConfig, *, cold: bool, **_: object) -> SimpleNamespace:
        assert cold
        started.append(config)
        return SimpleNamespace(handle="handle")

    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(EngineEnvironment, "for_target", lambda *_, **__: environment)
    monkeypatch.setattr(apparatus_module, "lease", lambda *_: FakeLease(gpus, {}, [], tmp_path))
    monkeypatch.setattr(apparatus_module, "visible", lambda: Visible(gpus, "580.159.04"))
    monkeypatch.setattr(apparatus_module, "bring_up", bring_up)
    with TargetApparatus(target, 2, at_once=1, say=lambda _: None) as apparatus:
        told = apparatus.conditions
        assert (told.engine, told.driver, told.gpus) == ("vllm 0.31.0", "580.159.04", ["H200", "H200"])
        assert apparatus.memory.of_devices() == {"a": 1, "b": 2}
        assert told.libraries == {"torch": "2.11.0"}
        (arm,) = PLAN.select(("J",))
        apparatus.start(PLAN, arm, tmp_path, lambda _: None)
        assert not released
    assert released == [True]
    nvml.used.clear()
    monkeypatch.setattr(apparatus_module, "visible", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TargetApparatus(target, 2, at_once=1, say=lambda _: None).__enter__()
    assert released == [True, True]
    (config,) = started
    assert config.args[:3] == ("--seed", "7", "--no-enforce-eager")
    assert config.env == {
        "PYTHONPATH": str(info.parent),
        "NCCL_NVLS_ENABLE": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "1",
        VISIBLE: "3,1",
    }
    assert (config.processor, config.tensor_parallel, config.workdir) == ("cuda", 2, tmp_path)


# The command -------------------------------------------------------------------------------------------


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["experiment", "teardown", *map(str, words)])


def test_a_rehearsal_by_the_command(tmp_path: Path) -> None:
    result = call("--rehearse", "--out", tmp_path / "run", "--arm", "D", "--arm", "E", "--at-once", "2")
    assert result.exit_code == 0, result.output
    assert (
        "FlashInfer workspace matters: live ends lost-at-restore where freed ends right (D/E)"
        in result.output
    )
    again = call("--rehearse", "--out", tmp_path / "run", "--arm", "D", "--resume")
    assert again.exit_code == 0, again.output
    assert "D: lost-at-restore, decided already" in again.output


def test_the_arms_can_be_listed() -> None:
    result = call("--list", "--arm", "J")
    assert result.exit_code == 0
    assert (
        "NCCL destroyed, custom all-reduce closed, FlashInfer workspace freed, CUDA graphs kept"
        in result.output
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rehearse", "--arm", "JJ"), "no arm is called 'JJ'"),
        (("--rehearse", "--resume"), "--resume without --out"),
        (("--target", "vllm-cpu"), "no device checkpointer"),
        (("--target", "vllm-gpx"), "no shipped target"),
        (("--rehearse", "--arms", "nowhere.toml"), "does not exist"),
        (("--rehearse", "--at-once", "0"), "at-once"),
    ],
)
def test_usage_errors(words: tuple[str, ...], told: str) -> None:
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert told in result.output


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
