"""Watching from the command line: what ends a watch, what it may say then, and what it looks at."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from nvsnap_conformance import cli
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.hang import commands, progress, rights, watch
from nvsnap_conformance.hang.follow import follow
from nvsnap_conformance.outcomes import ExitCode
from tests.planted import synthetic as make
from tests.planted import victims

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENGINE = """
import os, signal, subprocess, sys
code = "import signal; signal.pause()"
ranks = [subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": str(n)}) for n in range(2)]
print(*(rank.pid for rank in ranks), flush=True)
signal.pause()
"""
THREAD = """
import signal, threading
threading.Thread(target=lambda: (print(threading.get_native_id(), flush=True), signal.pause())).start()
"""
QUICK = ("--stall", "0.2", "--poll", "0.1")


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.main, ["watch", *map(str, words)])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "bundle"


@pytest.fixture
def unreadable() -> Iterator[int]:
    """A process of which nothing but /proc can be read: no Python runs in it."""
    with subprocess.Popen(["/bin/sleep", "1000"], preexec_fn=victims.die_with_parent) as process:  # noqa: PLW1509
        yield process.pid
        process.kill()


def killed_once_found(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    """Kill these processes after the ranks were found, before they are watched."""

    def kill(_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(rights, "require", kill)


@pytest.mark.parametrize("dead", [1, 2])
def test_front_that_outlives_its_ranks_is_half_dead(
    monkeypatch: pytest.MonkeyPatch, out: Path, dead: int
) -> None:
    monkeypatch.setattr(watch, "LEAVING", 0.2)
    with victims.python(ENGINE) as (one, line):
        killed_once_found(monkeypatch, *map(int, line.split()[:dead]))
        result = call("--tree", one.pid, "--metrics", "none", "--out", out, "--timeout", 30)
    assert result.exit_code == ExitCode.NOT_CONFORMANT, result.output
    assert "DEAD_RANK" in result.stdout
    assert json.loads((out / "verdict.json").read_text())["missing"] == list(range(dead))


def test_engine_that_ends_with_its_root_has_ended(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    with victims.python(ENGINE) as (one, line):
        killed_once_found(monkeypatch, *map(int, line.split()), one.pid)
        result = call("--tree", one.pid, "--metrics", "none", "--out", out, "--timeout", 30)
    assert result.exit_code == ExitCode.CONFORMANT, result.output
    assert "the engine has ended" in result.stdout


@pytest.mark.parametrize("once", [["--once"], []])
def test_rank_that_was_dead_before_is_a_dead_rank(out: Path, once: list[str]) -> None:
    with victims.python(victims.PARENT_OF_ZOMBIE) as (_, zombie):
        result = call("--pid", zombie, "--metrics", "none", "--out", out, "--timeout", 30, *once)
    assert result.exit_code == ExitCode.NOT_CONFORMANT, result.output
    assert "DEAD_RANK" in result.stdout


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_cannot_be_read_is_not_said_to_be_well(unreadable: int, out: Path, form: str) -> None:
    result = call(
        "--pid", unreadable, *QUICK, "--metrics", "none", "--timeout", 2, "--out", out, "--format", form
    )
    assert result.exit_code == ExitCode.INCOMPLETE, result.output
    assert "nothing was stuck" not in result.output
    assert "cannot be told" in result.stderr
    if form == "json":
        assert json.loads(result.stdout)["kind"] == "UNKNOWN"
    else:
        assert "UNKNOWN" in result.stdout


def test_too_short_a_watch_tells_nothing(out: Path) -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        result = call("--pid", one.pid, "--stall", 60, "--metrics", "none", "--timeout", 0.3, "--out", out)
    assert result.exit_code == ExitCode.INCOMPLETE, result.output
    assert "too short" in result.stdout


def test_what_was_given_beside_the_stacks_is_looked_at(tmp_path: Path, out: Path) -> None:
    dumps, ras = tmp_path / "dumps", tmp_path / "ras.json"
    dumps.mkdir()
    entry = {"collective_seq_id": 7, "profiling_name": "nccl:all_reduce", "retired": False}
    (dumps / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [entry]}))
    ras.write_text('{"communicators": []}')
    code = "import signal\ndef f(word):\n    print('up', flush=True)\n    signal.pause()\nf('swordfish')"
    with victims.python(code) as (one, _):
        call(
            "--pid", one.pid, *QUICK, "--metrics", "none", "--timeout", 2, "--out", out, "--locals",
            "--flight-recorder", dumps, "--nccl-ras", ras,
        )  # fmt: skip
    evidence = json.loads((out / "bundle.json").read_text())["bundle"]["evidence"]
    assert evidence["flight_recorder"]["0"]["default"]["sequence"] == 7
    assert evidence["nccl_ras"] == [{"communicators": []}]
    assert any("swordfish" in path.read_text() for path in (out / "stacks").iterdir())


def test_evidence_is_read_anew_for_a_look(tmp_path: Path) -> None:
    """Dumps are written when an engine is stuck: after the watch began."""
    ras = tmp_path / "ras.json"
    before = {"nccl_ras": [{"communicators": ["before"]}]}
    assert commands._evidence_now(None, (ras,), before) == before
    ras.write_text('{"communicators": ["now"]}')
    assert commands._evidence_now(None, (ras,), before) == {"nccl_ras": [{"communicators": ["now"]}]}


def test_look_has_the_callers_time_and_the_allowance_that_the_help_states(
    monkeypatch: pytest.MonkeyPatch, unreadable: int, out: Path
) -> None:
    budgets = []

    def spied(*arguments: Any, deadline: Deadline, **options: Any) -> Any:
        budgets.append(deadline.budget)
        return follow(*arguments, deadline=deadline, **options)

    monkeypatch.setattr(watch, "follow", spied)
    call("--pid", unreadable, *QUICK, "--metrics", "none", "--timeout", 2, "--out", out)
    assert budgets
    assert all(watch.ALLOWANCE <= budget <= 2.0 + watch.ALLOWANCE for budget in budgets)
    assert f"{watch.ALLOWANCE:.0f} s more" in " ".join(call("--help").output.split())


def test_page_that_does_not_answer_is_said(unreadable: int, out: Path) -> None:
    page = "http://127.0.0.1:1/metrics"
    result = call("--pid", unreadable, *QUICK, "--metrics", page, "--timeout", 0.3, "--out", out)
    assert "watching 1 process by the kernel's counters" in result.stdout
    assert f"{page} does not answer" in result.stderr


@pytest.mark.parametrize("option", ["--pid", "--tree"])
@pytest.mark.parametrize("once", [["--once"], ["--timeout", "1"]])
def test_thread_is_no_process(option: str, once: list[str]) -> None:
    with victims.python(THREAD) as (one, thread):
        result = call(option, thread, "--metrics", "none", *once)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert f"{thread} is a thread of process {one.pid}" in result.output


def test_rank_that_cannot_be_kept_in_view_is_an_environment_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", full)
    member = replace(make.member(0), pid=os.getpid())
    with pytest.raises(EnvironmentFailure, match="Too many open files"):
        watch.Watch([member], tmp_path).run(Deadline.after(1.0))


def test_network_that_cannot_be_entered_is_an_environment_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> None:
        raise EnvironmentFailure("cannot enter")

    monkeypatch.setattr(progress, "_enter_network", refused)
    with (
        pytest.raises(EnvironmentFailure, match="cannot enter"),
        contextlib.closing(progress.Metrics("http://127.0.0.1:1/metrics", 1)) as source,
    ):
        source.poll()
