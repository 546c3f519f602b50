"""How the loader gets into an engine: what it shadows, whom it reaches, and which interpreters it refuses.

All but one of the cases start plain interpreters with the engine's PYTHONPATH and a package of two classes in
the engine's place; what is looked at is the start of Python and of its children, not the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.vllm import LOADER
from nvsnap_conformance.errors import TargetError
from nvsnap_conformance.fixtures.arms import implementation
from nvsnap_conformance.hooks.injection import Injection, Way
from nvsnap_conformance.lifecycle import accounting
from nvsnap_conformance.outcomes import Finding, finding, require

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nvsnap_conformance.engines.protocol import EngineHandle
    from nvsnap_conformance.session.arms import Arm

SECONDS = 60.0

SHADOWED = """
import os, sys
os.environ["NVSNAP_CASE_SHADOWED"] = os.environ.get("NVSNAP_CASE_SHADOWED", "") + "x"
sys.nvsnap_case_shadowed = __name__
"""
"""What a host's own sitecustomize leaves behind: a setting for children, and one in its interpreter."""

LOOK = """
import json, multiprocessing, os, sys

def look(_=None):
    shadowed = getattr(sys, "nvsnap_case_shadowed", None)
    try:
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError:
        return {"shadowed": shadowed, "rpc": False}
    return {"shadowed": shadowed, "rpc": hasattr(WorkerBase, "nvsnap_rpc"), "pid": os.getpid()}

if __name__ == "__main__":
    found = {"main": look()}
    for method in sys.argv[1:]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.map(look, [0])[0]
    print(json.dumps(found))
"""


@pytest.fixture
def injection(host_arm: Arm) -> Injection:
    """Return the way in by sitecustomize, or a known-bad one in its place."""

    def shipped() -> Injection:
        return Injection(Way.SITECUSTOMIZE)

    made: Injection = implementation(host_arm.mutant, "injection", shipped)()
    return made


@pytest.fixture
def start(injection: Injection, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that starts an interpreter as an engine's is started, on a host's sitecustomize."""
    worker = tmp_path / "engine" / "vllm" / "v1" / "worker" / "worker_base.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("class WorkerBase:\n    pass\n")
    (tmp_path / "host").mkdir()
    (tmp_path / "look.py").write_text(LOOK)

    def run(shadowed: str, *methods: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "host" / "sitecustomize.py").write_text(shadowed)
        folders = [*injection.first(), *injection.folders(), tmp_path / "host", tmp_path / "engine"]
        return subprocess.run(
            [sys.executable, str(tmp_path / "look.py"), *methods],
            env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )

    return run


@pytest.mark.clause("HOOKS-SHADOWED-SITE-RUNS")
def test_a_shadowed_sitecustomize_runs(start: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The host's own sitecustomize has run, once and under its name, in the interpreter and in a child."""
    done = start(SHADOWED, "spawn")
    found = _check_started(done)
    for who, seen in _told(done).items():
        if seen["shadowed"] != "sitecustomize":
            found.append(
                finding(f"{who}: the shadowed sitecustomize did not run: {seen}", "SITE:SHADOWED_LOST")
            )
    require(found + _check_rpc(done))


@pytest.mark.clause("HOOKS-SITE-NEVER-BREAKS")
@pytest.mark.parametrize(
    "shadowed",
    ["raise RuntimeError('the shadowed one fails')", "import no_such_module_anywhere", "def broken(:"],
    ids=["raises", "import-error", "syntax-error"],
)
def test_a_broken_sitecustomize_breaks_nothing(
    start: Callable[..., subprocess.CompletedProcess[str]], shadowed: str
) -> None:
    """Where the shadowed one fails, that is told on stderr, the interpreter starts and has the loader."""
    done = start(shadowed)
    found = _check_started(done) + _check_rpc(done)
    if "sitecustomize.py" not in done.stderr:
        found.append(finding(f"the failure is not told: {done.stderr[-500:]!r}", "SITE:FAILURE_HIDDEN"))
    require(found)


@pytest.mark.clause("HOOKS-CHILDREN-REACHED")
def test_children_are_reached(start: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Children by spawn and by forkserver have the loader on their class of workers."""
    done = start("", "spawn", "forkserver")
    require(_check_started(done) + _check_rpc(done))


@pytest.mark.clause("HOOKS-INTERPRETER-REFUSED")
@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_an_interpreter_out_of_reach_is_refused(injection: Injection, flag: str) -> None:
    """An interpreter that the loader cannot reach is refused before a start, and its option named."""
    folders = [*injection.first(), *injection.folders()]
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    injection.require_reached([sys.executable], env)
    try:
        injection.require_reached([sys.executable, flag], env)
    except TargetError as error:
        if flag not in str(error):
            require([finding(f"the refusal does not name {flag}: {error}", "INJECT:UNNAMED")])
        return
    require([finding(f"an interpreter with {flag} was accepted", "INJECT:UNREACHED_ACCEPTED")])


@pytest.mark.clause("HOOKS-WAY-TOLD")
def test_every_rank_tells_the_way_in(engine: EngineHandle, arm: Arm) -> None:
    """Every rank says by which one way the loader came in, the target's, and that nothing went wrong."""
    assert arm.target is not None
    wanted = [arm.target.hooks.inject.value]
    replies = engine.rpc("identify", hooks=LOADER, deadline=Deadline.after(SECONDS))
    found = accounting.check_every_rank(replies, ranks=arm.tensor_parallel, verb="identify")
    for reply in replies:
        arrival = reply.value.get("arrival", {}) if isinstance(reply.value, dict) else {}
        if arrival.get("ways") != wanted:
            found.append(
                finding(
                    f"rank {reply.rank}: the loader came in by {arrival.get('ways')}, not by {wanted}",
                    "LOADER:WAY",
                )
            )
        told = [*arrival.get("problems", []), arrival.get("shadowed_problem")]
        found += [finding(f"rank {reply.rank}: {problem}", "LOADER:PROBLEM") for problem in told if problem]
    require(found)


def _told(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    try:
        told: dict[str, dict[str, Any]] = json.loads(done.stdout)
    except ValueError:
        return {}
    return told


def _check_started(done: subprocess.CompletedProcess[str]) -> list[Finding]:
    if done.returncode == 0 and _told(done):
        return []
    return [
        finding(
            f"the interpreter ended with status {done.returncode}: {done.stderr[-1000:]}", "SITE:START_BROKEN"
        )
    ]


def _check_rpc(done: subprocess.CompletedProcess[str]) -> list[Finding]:
    return [
        finding(f"{who}: the loader is missing: {seen}; {done.stderr[-500:]}", "LOADER:MISSING")
        for who, seen in _told(done).items()
        if not seen["rpc"]
    ]
