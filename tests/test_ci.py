"""The scripts of ci/: an interpreter that is none is named, before anything is made."""

from __future__ import annotations

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
