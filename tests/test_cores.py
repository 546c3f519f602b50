"""Cores are shared out whole, in the order of asking, and come back whatever became of their holder."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance import cores
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded

if TYPE_CHECKING:
    from pathlib import Path

HOLDER = """
import sys
from pathlib import Path
from nvsnap_conformance import cores
from nvsnap_conformance.deadline import Deadline
cores.usable = lambda: 2
with cores.held(int(sys.argv[2]), Deadline.after(30), folder=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable", lambda: 2)


def holder(folder: Path, count: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def free(folder: Path, count: int) -> bool:
    try:
        with cores.held(count, Deadline.after(0.3), folder=folder):
            return True
    except DeadlineExceeded:
        return False


def test_narrow_engines_share_and_wide_ones_wait(tmp_path: Path) -> None:
    with cores.held(1, Deadline.after(5), folder=tmp_path) as one, holder(tmp_path, 1) as other:
        assert one == 1
        assert not free(tmp_path, 1)
        other.kill()
        other.wait()
        assert free(tmp_path, 1)
        assert not free(tmp_path, 2)
    assert free(tmp_path, 2)


def test_more_than_there_are_means_all(tmp_path: Path) -> None:
    with cores.held(8, Deadline.after(5), folder=tmp_path) as got:
        assert got == 2
        assert not free(tmp_path, 1)


def test_none_waits_for_nobody(tmp_path: Path) -> None:
    with holder(tmp_path, 2) as other:
        assert free(tmp_path, 0)
        other.kill()


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    with holder(tmp_path, 2) as other:
        assert not free(tmp_path, 2)
        other.kill()
        other.wait()
        assert free(tmp_path, 2)


def test_an_attempt_that_fails_keeps_nothing(tmp_path: Path) -> None:
    with holder(tmp_path, 1) as other:
        assert not free(tmp_path, 2)
        with holder(tmp_path, 1) as third:
            third.kill()
        other.kill()


def test_a_wide_engine_is_not_passed_by_a_narrow_one(tmp_path: Path) -> None:
    order: list[str] = []

    def take(name: str, count: int) -> None:
        with cores.held(count, Deadline.after(30), folder=tmp_path):
            order.append(name)

    with holder(tmp_path, 1) as other:
        wide = threading.Thread(target=take, args=("wide", 2))
        wide.start()
        # The one core that is free belongs to the wide one now.
        wait_for("the wide one to have its first core", lambda: not free(tmp_path, 1), Deadline.after(10))
        narrow = threading.Thread(target=take, args=("narrow", 1))
        narrow.start()
        other.kill()
        other.wait()
        wide.join(30)
        narrow.join(30)
    assert order == ["wide", "narrow"]


def test_whoever_waits_too_long_hears_why(tmp_path: Path) -> None:
    with (
        holder(tmp_path, 2) as other,
        pytest.raises(DeadlineExceeded, match="2 of 2 cores") as caught,
        cores.held(2, Deadline.after(0.2), folder=tmp_path),
    ):
        pass
    other.kill()
    assert str(tmp_path) in caught.value.cause
    assert caught.value.next_step
