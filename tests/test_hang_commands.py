"""The commands ``watch`` and ``inspect``: what they refuse, and what they say then."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from nvsnap_conformance import cli
from nvsnap_conformance.outcomes import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

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
    for word in (state, "NOT CONFORMANT", "LIFE-ORDER on mine-tp2", "missing: HANG-NAMES-MISSING@mine-tp2"):
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
