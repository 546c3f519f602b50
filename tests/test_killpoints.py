"""The kill-point tool finds a run that leaves things, and passes one that does not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests import killpoints

if TYPE_CHECKING:
    import pytest

OWNED = """
import sys, tempfile
from pathlib import Path
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.process import EngineProcess
for number, isolate in enumerate((True, False)):
    with tempfile.TemporaryDirectory() as folder:
        print("launching", number)
        engine = EngineProcess.launch(
            ["sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"], env={"PATH": "/usr/bin:/bin"},
            workdir=Path(folder), isolate=isolate,
        )
        print("entering", number)
        engine.run_inside(["sleep", "0.05"], timeout=20)
        print("ending", number)
        engine.terminate(Deadline.after(0.1))
        print("ended", number)
"""

ABANDONED = """
import subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("launched")
child.wait()
"""


def test_owned_processes_leave_nothing_at_any_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert killpoints.main(["--points", "8", "--seed", "3", "--", sys.executable, "-c", OWNED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("killed after" in line and "clean" in line for line in lines) == 8
    assert lines[-1] == "8 points, seed 3: 0 failed"


def test_abandoned_process_is_residue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killpoints, "GONE_SECONDS", 0.2)
    point = killpoints.Point(None, "launched", group=True)
    good, words = killpoints.strike([sys.executable, "-c", ABANDONED], point, 20)
    assert not good
    assert "RESIDUE:PROCESS" in words
    assert "sleep" in words


def test_point_that_is_not_reached_is_a_failure() -> None:
    point = killpoints.Point(None, "never", group=False)
    good, words = killpoints.strike([sys.executable, "-c", "print('up')"], point, 20)
    assert not good
    assert "ended by itself (status 0); clean" in words


def test_undisturbed_run_that_fails_is_of_no_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert killpoints.main(["--", sys.executable, "-c", "print('bad usage'); raise SystemExit(2)"]) == 2
    assert "bad usage" in capsys.readouterr().out


def test_points_are_seeded_and_spread() -> None:
    lines = ["start", "", "rank 0 up", "rank 1 up", "end"]
    shapes = [killpoints.shape(line) for line in lines]
    points = killpoints.choose(10, 7, 20.0, shapes)
    assert points == killpoints.choose(10, 7, 20.0, shapes)
    assert points != killpoints.choose(10, 8, 20.0, shapes)
    assert {point.line for point in points} == {None, "start", "rank # up", "end"}
    moments = sorted(point.seconds for point in points if point.seconds is not None)
    assert [int(moment / 20 * 7) for moment in moments] == list(range(7))
    assert sum(point.group for point in points) == 5
