"""Without the right to trace, the error names it and what to set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.hang import procfs, rights
from tests.planted import victims

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="dropping rights needs root")
ROOT = Path(__file__).parent.parent
DROP = (
    shutil.which("setpriv") or "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=-all",
    "--bounding-set=-all",
)


def without(capability: int) -> object:
    return lambda asked: asked != capability


def test_with_all_rights_there_is_no_problem() -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        assert rights.problems([one.pid]) == () or os.geteuid() != 0


def test_another_users_process_needs_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "capable", without(rights.CAP_SYS_PTRACE))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with victims.python(victims.SLEEPER) as (one, _), pytest.raises(EnvironmentFailure) as caught:
        rights.require([one.pid])
    assert "CAP_SYS_PTRACE is missing" in caught.value.what
    assert "--cap-add SYS_PTRACE" in caught.value.next_step
    assert "securityContext.capabilities.add" in caught.value.next_step


def test_yama_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "capable", lambda _: False)
    monkeypatch.setattr(rights, "ptrace_scope", lambda: 1)
    with victims.python(victims.SLEEPER) as (one, _), pytest.raises(EnvironmentFailure) as caught:
        rights.require([one.pid])
    assert "kernel.yama.ptrace_scope is 1" in caught.value.what
    assert "sysctl kernel.yama.ptrace_scope=0" in caught.value.next_step


def test_scope_three_forbids_it_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "capable", lambda _: True)
    monkeypatch.setattr(rights, "ptrace_scope", lambda: 3)
    with victims.python(victims.SLEEPER) as (one, _):
        problem = rights.problem(one.pid)
    assert problem is not None
    assert "forbids it to everybody" in problem[0]


def test_foreign_namespace_needs_the_other_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "capable", without(rights.CAP_SYS_ADMIN))
    ours = ("pid:[2]", "mnt:[2]", "user:[1]")
    with victims.python(victims.SLEEPER) as (one, _):
        # The user namespace cannot be read: nothing is claimed about it.
        theirs = {one.pid: ("pid:[1]", "mnt:[1]", "")}
        monkeypatch.setattr(procfs, "namespaces", lambda pid: theirs.get(pid, ours))
        assert rights.problem(one.pid) is None
        theirs[one.pid] = ("pid:[1]", "mnt:[1]", "user:[1]")
        problem = rights.problem(one.pid)
    assert problem is not None
    assert "CAP_SYS_ADMIN is missing" in problem[0]


def test_process_that_is_gone_is_no_matter_of_rights() -> None:
    rights.require([2**22 - 1])


@needs_root
def test_unprivileged_user_is_told_what_to_set() -> None:
    """For real: user nobody looks at a process of root."""
    code = (
        "import sys\nfrom nvsnap_conformance.hang import rights\n"
        "try:\n    rights.require([int(sys.argv[1])])\nexcept Exception as error:\n    print(error)"
    )
    with victims.python(victims.SLEEPER) as (one, _):
        done = subprocess.run(
            [*DROP, sys.executable, "-c", code, str(one.pid)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        )
    if "Permission denied" in done.stderr:
        pytest.skip(f"user nobody cannot run this interpreter: {done.stderr.strip()[-200:]}")
    assert f"no right to trace pid {one.pid} of user 0: CAP_SYS_PTRACE is missing" in done.stdout, done.stderr
    assert "Next step: run as root" in done.stdout
