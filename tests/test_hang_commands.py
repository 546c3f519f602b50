"""The commands ``watch`` and ``inspect``: what they refuse, and what they say then."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nvsnap_conformance import cli
from nvsnap_conformance.outcomes import ExitCode

OWN = str(os.getpid())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that is not refused after all writes its bundle here, not into the checkout."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.main, words)


@pytest.mark.parametrize("option", ["--pid", "--tree"])
@pytest.mark.parametrize("pid", ["-5", "-1", "0", "4194305", "99999999999999999999999", "1.5", "", "self"])
def test_what_can_be_no_pid_is_a_usage_error(option: str, pid: str) -> None:
    result = call("watch", option, pid, "--once")
    assert result.exit_code == ExitCode.USAGE
    assert option in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("option", ["--pid", "--tree"])
def test_a_process_that_is_not_there_is_named_with_a_next_step(option: str) -> None:
    with open("/proc/sys/kernel/pid_max") as file:  # noqa: PTH123 - no process has this pid
        absent = file.read().strip()
    result = call("watch", option, absent, "--once")
    assert result.exit_code == ExitCode.USAGE
    assert f"no such process: {absent}" in result.output
    assert "next step: " in result.output


@pytest.mark.parametrize("option", ["--stall", "--poll", "--timeout"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "1e300", "soon"])
def test_seconds_that_cannot_be_waited_for_are_a_usage_error(option: str, seconds: str) -> None:
    result = call("watch", "--pid", OWN, option, seconds, "--metrics", "none")
    assert result.exit_code == ExitCode.USAGE
    assert option in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--pid", OWN, "--tree", OWN],
        ["--pid", OWN, "--pid", OWN],
        ["--pid", OWN, "--metrics", "http://[", "--timeout", "1"],
    ],
)
def test_ranks_that_are_not_told_are_a_usage_error(words: list[str]) -> None:
    result = call("watch", *words)
    assert result.exit_code == ExitCode.USAGE
    assert "next step: " in result.output


# inspect of run records ---------------------------------------------------------------------------


def record(state: str = "complete", exit_code: int | None = 1) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "suite_version": "0",
        "state": state,
        "started": "2026-01-01T00:00:00Z",
        "ended": None,
        "command": [],
        "targets": ["mine"],
        "profiles": [],
        "machine": {},
        "engines": [],
        "cases": [],
        "clauses": [
            {
                "clause": clause,
                "arm": "mine-tp2",
                "mutant": None,
                "level": "MUST",
                "must_run": True,
                "outcome": outcome,
                "note": "why",
            }
            for clause, outcome in (("LIFE-ORDER", "failed"), ("COLL-BACKEND-AGREE", "passed"))
        ],
        "mutants": [],
        "missing": ["HANG-NAMES-MISSING@mine-tp2"],
        "degraded": [],
        "verdict": "NOT CONFORMANT",
        "exit_code": exit_code,
    }


@pytest.mark.parametrize(
    ("state", "own", "code"),
    [("complete", 1, 1), ("complete", 0, 0), ("complete", 7, 7), ("complete", None, 6), ("complete", 99, 6),
     ("aborted", 0, 6), ("running", None, 6)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["", "results.json", "renamed.txt"])
def test_a_run_record_is_summed_up(tmp_path: Path, state: str, own: int | None, code: int, name: str) -> None:
    (tmp_path / (name or "results.json")).write_text(json.dumps(record(state, own)))
    result = call("inspect", str(tmp_path / name))
    assert result.exit_code == code, result.output
    verdict = "the run never ended: no process of it is alive" if state == "running" else "NOT CONFORMANT"
    for word in (state, verdict, "LIFE-ORDER on mine-tp2", "missing: HANG-NAMES-MISSING@mine-tp2"):
        assert word in result.output
    assert "COLL-BACKEND-AGREE" not in result.output
    told = json.loads(call("inspect", str(tmp_path / name), "--format", "json").output)
    assert [entry["clause"] for entry in told["not_passed"]] == ["LIFE-ORDER"]


@pytest.mark.parametrize("name", ["", "events.jsonl"])
def test_events_of_an_aborted_run_are_incomplete(tmp_path: Path, name: str) -> None:
    events = [
        {"at": "1", "kind": "session", "targets": ["mine"]},
        {"at": "2", "kind": "case-start", "nodeid": "a", "arm": "x"},
        {
            "at": "3",
            "kind": "case",
            "nodeid": "a",
            "arm": "x",
            "outcome": "failed",
            "clauses": ["LIFE-ORDER"],
        },
        {"at": "4", "kind": "case-start", "nodeid": "b", "arm": "x"},
    ]
    text = "\n".join(map(json.dumps, events)) + '\n{"at": "5", "ki'
    (tmp_path / "events.jsonl").write_text(text)
    result = call("inspect", str(tmp_path / name))
    assert result.exit_code == ExitCode.INCOMPLETE, result.output
    assert "LIFE-ORDER" in result.output
    assert "missing: b on x began and did not end" in result.output


@pytest.mark.parametrize("name", ["results.json", "events.jsonl", "bundle.json", "other"])
@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff\0", b"[" * 5000, b'{"schema_version": 1}', b"7"]
)
def test_damage_is_a_typed_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        result = call("inspect", str(path))
        assert result.exit_code == ExitCode.USAGE, result.output
        assert isinstance(result.exception, SystemExit)
        assert "error: " in result.output


def test_events_beside_the_record_of_their_run_are_that_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"at": "1", "kind": "session"}\n')
    (tmp_path / "results.json").write_text(json.dumps(record("complete", 0)))
    result = call("inspect", str(tmp_path / "events.jsonl"))
    assert result.exit_code == ExitCode.CONFORMANT, result.output
    assert "run record, complete" in result.output


@pytest.mark.parametrize("value", [5, True, 1.5, "mine", {"a": 1}, [5, None, {}], "\ud800", ["\ud800"]])
@pytest.mark.parametrize("key", ["targets", "nodeid", "arm", "outcome", "clauses", "message"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_strange_values_in_events_end_in_text(tmp_path: Path, key: str, value: object, form: str) -> None:
    events = [{"at": "1", "kind": kind, key: value} for kind in ("session", "case-start", "case")]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    result = call("inspect", str(tmp_path), "--format", form)
    assert result.exit_code == ExitCode.INCOMPLETE, result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("name", ["bundle.json", "results.json", "events.jsonl", "other"])
def test_pipes_and_devices_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Nobody writes to the pipe: to read it would last forever."""
    os.mkfifo(tmp_path / name)
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path, says in (
        (tmp_path / name, "a named pipe"),
        (tmp_path, "no"),
        (tmp_path / "zero", "a character"),
    ):
        result = call("inspect", str(path))
        assert result.exit_code == ExitCode.USAGE, result.output
        assert says in result.output
        assert str(tmp_path) in result.output


def test_every_file_that_is_given_must_be_a_regular_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for option in ("--registry", "--nccl-ras"):
        for words in (["inspect", str(tmp_path)], ["watch", "--pid", OWN, "--once"]):
            (tmp_path / "bundle.json").write_text("{}")
            result = call(*words, option, str(pipe))
            assert result.exit_code == ExitCode.USAGE, result.output
            assert isinstance(result.exception, SystemExit)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who has no rights")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_another_may_not_read_is_a_usage_error(what: str) -> None:
    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        (folder / "bundle.json").write_text("{}")
        Path(name).chmod(0o755)
        locked = folder if what == "folder" else folder / "bundle.json"
        locked.chmod(0)
        code = f"""
import os
from nvsnap_conformance.report import inspected
from nvsnap_conformance.hang import bundle, corroborate
from nvsnap_conformance.errors import UsageError
from pathlib import Path
os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})
folder = Path({str(folder)!r})
for read in (inspected.find, bundle.read_bundle, corroborate.read_flight_recorder):
    try:
        read(folder)
    except UsageError:
        print("refused")
    else:
        print("read")
"""
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    refused = 3 if what == "folder" else 2  # the folder's names can be read: it is a bundle's
    assert answer.stdout.split().count("refused") == refused, answer.stderr
