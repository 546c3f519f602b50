"""The teardown experiment as a whole, on stand-ins: record, page, resume, several at once, sudden death."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import jsonschema
import pytest
from click.testing import CliRunner, Result

from nvsnap_conformance import cli
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.errors import TargetError
from nvsnap_conformance.experiments import apparatus as apparatus_module
from nvsnap_conformance.experiments.apparatus import TargetApparatus
from nvsnap_conformance.experiments.plan import PlanError, read_plan
from nvsnap_conformance.experiments.record import (
    FACTORS,
    ArmOutcome,
    ArmRecord,
)
from nvsnap_conformance.experiments.standin import StandInApparatus
from nvsnap_conformance.gpus import VISIBLE, Gpu, Lease, Visible
from nvsnap_conformance.hooks.injection import INJECT
from nvsnap_conformance.report.compare import compare
from nvsnap_conformance.report.compare_input import read_side
from nvsnap_conformance.targets.model import load_target

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import LaunchConfig
    from nvsnap_conformance.report.model import RunRecord

from tests.experiment_runs import EXPECTED, MEASURED, PLAN, ROOT, FakeNvml, experiment

# The arms ------------------------------------------------------------------------------------------


def test_the_shipped_arms_begin_with_one_that_is_known_to_be_good() -> None:
    assert MEASURED[PLAN.arm[0].name] is ArmOutcome.RIGHT


def test_every_measured_arm_is_declared_as_it_was_measured() -> None:
    declared = {arm.name: arm.factors for arm in PLAN.arm}
    assert declared.keys() == MEASURED.keys()
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
    assert (answer.checkpointable, answer.workspace, answer.workspace_alone, answer.kept_graphs) == (
        "yes",
        "must go",
        "not enough",
        "can be lost",
    )
    told = {c.factor: c for c in record.experiment.conclusions}
    graphs = {(pair.one, pair.other) for pair in told["cuda_graphs"].pairs}
    assert graphs == {("Q", "T")}
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
    assert [arm.name for arm in record.experiment.arms if "recapture" in arm.seconds] == ["R", "T"]
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
        (("--rehearse", "--tp", "1"), "nothing between GPUs with one rank"),
        (("--tp", "1"), "nothing between GPUs with one rank"),
        (("--rehearse", "--tp", "3"), "use one of --tp 2, 4, 8"),
        (("--rehearse", "--bandwidth"), "stand-ins copy nothing"),
        (("--rehearse", "--target", "vllm-gpu"), "--target means nothing with --rehearse"),
    ],
)
def test_usage_errors(words: tuple[str, ...], told: str) -> None:
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert told in result.output
