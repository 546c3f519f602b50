"""The commands ``watch`` and ``inspect``: what they refuse, and what they say then."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner, Result

from nvsnap_conformance import cli
from nvsnap_conformance.outcomes import ExitCode

OWN = str(os.getpid())


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
