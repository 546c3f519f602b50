"""What ``inspect`` says of a run that has not ended: it goes on, or it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from click.testing import CliRunner

from nvsnap_conformance import cli
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.outcomes import ExitCode
from nvsnap_conformance.report.record import read_results
from nvsnap_conformance.report.writing import Hold, is_written, writing

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

RUN = """
import os, signal
import pytest

@pytest.mark.clause("SUITE-LEAVES-NOTHING")
def test_first(host_arm):
    pass

@pytest.mark.clause("SUITE-LEAVES-NOTHING")
def test_second(host_arm):
    open("reached", "w").close()
    {body}
"""


def inspect(path: Path) -> str:
    result = CliRunner().invoke(cli.main, ["inspect", str(path)])
    assert result.exit_code == ExitCode.INCOMPLETE, result.output
    return result.output


def test_a_folder_is_held_as_long_as_somebody_writes(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert is_written(folder) is None
    with writing(folder):
        assert is_written(folder) is True
        other = Hold(folder)
    assert is_written(folder) is True
    other.close()
    other.close()
    assert is_written(folder) is False


def test_what_cannot_be_locked_is_written_all_the_same(tmp_path: Path) -> None:
    Hold(tmp_path / "nowhere").close()


def test_a_killed_run_never_ended(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_case=RUN.format(body="os.kill(os.getpid(), signal.SIGKILL)"))
    result = pytester.runpytest_subprocess("--nvs-out=out", "--nvs-profile=liveness")
    assert result.ret == -signal.SIGKILL
    out = pytester.path / "out"
    assert read_results(out / "results.json").state == "running"
    for path in (out, out / "results.json", out / "events.jsonl"):
        assert "run record, running: INCOMPLETE: the run never ended: no process of it is alive" in inspect(
            path
        )
    (out / "results.json").unlink()
    assert "its events end after 1 cases; the run never ended" in inspect(out)


def test_a_run_that_goes_on_is_told_from_it(pytester: pytest.Pytester) -> None:
    # The second case waits for its standard input to close, which is the test's to do.
    pytester.makepyfile(test_case=RUN.format(body="os.read(0, 1)"))
    command = [sys.executable, "-m", "pytest", "-s", "--nvs-out=out", "--nvs-profile=liveness"]
    with subprocess.Popen(
        command, cwd=pytester.path, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as run:
        wait_for("the second case to begin", (pytester.path / "reached").exists, Deadline.after(60))
        assert "run record, running: INCOMPLETE: the run still goes on" in inspect(pytester.path / "out")
        run.communicate()
    assert is_written(pytester.path / "out") is False
