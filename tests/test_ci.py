"""The scripts of ci/: no interpreter is guessed at, and a pipeline ends as its run and its audit did."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=["true", "false", "echo python 3 10", "echo", "missing"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Give a program that is no Python which the suite can use."""
    path = tmp_path / "program"
    if request.param != "missing":
        path.write_text(f"#!/bin/sh\n{request.param}\n")
        path.chmod(0o755)
    return path


def refused(script: Path, *words: str, **env: str) -> None:
    done = subprocess.run(
        [script, *words], env=os.environ | env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 7, done.stderr
    assert "is not Python 3.11 to 3.13; set NVS_" in done.stderr
    assert "pip" not in done.stderr


@pytest.mark.parametrize("name", ["conformance", "test"])
def test_a_program_that_is_no_python_is_not_blamed_on_pip(name: str, program: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ci", tmp_path / "checkout" / "ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "checkout")
    refused(tmp_path / "checkout" / "ci" / name, NVS_PYTHON=str(program))
    assert not (tmp_path / "checkout" / ".venv").exists()


def test_a_gpu_host_without_python_is_not_conformant(program: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    refused(ROOT / "ci" / "gpu-run", str(tmp_path), NVS_HOST_PYTHON=str(program), NVS_RECORDS=str(records))
    assert not records.exists()


@pytest.mark.parametrize(
    ("run", "audit", "expected"), [(0, 0, 0), (0, 1, 1), (0, 7, 7), (1, 0, 1), (6, 7, 6), (7, 1, 7)]
)
def test_a_pipeline_fails_where_a_run_that_passed_left_something(
    run: int, audit: int, expected: int, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    # As if it had been set up: the pipeline then takes the programs that are there.
    made_of = b"".join((tmp_path / name).read_bytes() for name in ("pyproject.toml", "ci/setup.sh"))
    (programs.parent / "nvs-setup-stamp").write_text(hashlib.sha256(made_of).hexdigest())
    log = tmp_path / "log"
    suite = f'#!/bin/sh\necho "$@" >>{log}\ncase $1 in run) exit {run} ;; audit) exit {audit} ;; esac\n'
    for name, text in (("python", "#!/bin/sh\n"), ("nvsnap-conformance", suite)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = {**os.environ, "NVS_ENGINE_PYTHON": "/usr/bin/python3", "NVS_OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [tmp_path / "ci" / "gpu" / "pipeline"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == expected, done.stderr
    assert log.read_text().splitlines()[-1] == "audit --gpus"
