"""Temporary folders go, whatever was killed, and whenever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvsnap_conformance.checkpoint.device_ranks import DeviceRanks
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.held_folder import (
    DEVICE,
    LOCKED,
    PREFIXES,
    RANK_SERVER,
    held,
    new_folder,
    sweep,
    unheld,
)
from nvsnap_conformance.lifecycle.residue import RUN_ID, marks
from nvsnap_conformance.processes import ProcessId

# The server imports torch first of all: this one tells that it does, and waits there for a line.
TORCH = """
import os
os.mkfifo(os.environ["GATE"] + ".here")
open(os.environ["GATE"]).read()
def set_num_threads(_count): pass
__version__ = "0"
"""
STARTER = """
import sys
from pathlib import Path
from nvsnap_conformance.hang.ranks.client import RankServer
import os
RankServer(
    Path(sys.executable), environment={"PYTHONPATH": os.environ["TORCH"], "GATE": os.environ["GATE"]}
)
sys.stdin.read()
"""


def folders(place: Path) -> list[Path]:
    return list(place.glob("nvsnap-rank-server-*"))


@pytest.mark.parametrize("loading", [True, False], ids=["while-it-loads", "while-it-serves"])
def test_a_starter_that_is_killed_leaves_no_folder(tmp_path: Path, loading: bool) -> None:
    place, gate = tmp_path / "tmp", tmp_path / "gate"
    place.mkdir()
    os.mkfifo(gate)
    torch = tmp_path / "torch"
    (torch / "torch").mkdir(parents=True)
    (torch / "torch" / "__init__.py").write_text(TORCH)
    (torch / "torch" / "distributed.py").touch()
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(place), "TORCH": str(torch), "GATE": str(gate)}
    with subprocess.Popen([sys.executable, "-c", STARTER], env=env, stdin=subprocess.PIPE) as starter:
        wait_for("torch's import", Path(f"{gate}.here").exists, Deadline.after(60.0))
        assert len(folders(place)) == 1
        (server,) = ProcessId.of(starter.pid).process().children()  # type: ignore[union-attr]
        if loading:
            starter.send_signal(signal.SIGKILL)
            starter.wait()
        gate.write_text("go on")
        if not loading:
            starter.send_signal(signal.SIGKILL)
        server.wait(timeout=60)
    wait_for("the folder to go", lambda: not folders(place), Deadline.after(60.0))


def test_the_folder_of_killed_owners_goes_with_the_next_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import os, signal; from nvsnap_conformance.held_folder import new_folder\n"
        f"kept = new_folder({RANK_SERVER!r}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=False, timeout=60)
    (left,) = folders(tmp_path)
    sweep(tmp_path)
    assert left.exists(), "one so young may not be locked yet"
    os.utime(left, (0, 0))
    owned, errors = new_folder(RANK_SERVER)
    assert folders(tmp_path) == [owned]
    os.utime(owned, (0, 0))
    sweep(tmp_path)
    assert owned.exists(), "its owner lives"
    errors.close()
    sweep(tmp_path)
    assert not owned.exists()


def test_what_somebody_else_put_there_stays(tmp_path: Path) -> None:
    (tmp_path / "nvsnap-rank-server-file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOCKED).touch()
    before = sorted(tmp_path.iterdir())
    sweep(tmp_path, older_than=0.0)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_without_a_lock_goes_only_while_it_is_empty(tmp_path: Path) -> None:
    """Its maker was killed before the lock; or it is of a version that had none, and may be in use."""
    empty, full = tmp_path / f"{DEVICE}empty", tmp_path / f"{DEVICE}full"
    for folder in (empty, full):
        folder.mkdir()
    (full / "faults.json").touch()
    sweep(tmp_path, older_than=0.0)
    assert not empty.exists()
    assert full.exists()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_folder_is_held_for_as_long_as_its_block(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with held(prefix) as folder:
        assert unheld(tmp_path) == []
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    assert unheld(tmp_path) == [folder]
    (folder / LOCKED).touch()
    assert unheld(tmp_path) == [folder]


DEVICE_CASE = """
import sys
from nvsnap_conformance.checkpoint.device_ranks import DeviceRanks
with DeviceRanks("stand-in") as ranks:
    print(*ranks.pids, *ranks.context_free, flush=True)
    sys.stdin.read()
"""


def test_a_device_case_that_is_killed_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", DEVICE_CASE], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as case:
        assert case.stdout is not None
        ranks = [ProcessId.of(int(word)) for word in case.stdout.readline().split()]
        (left,) = tmp_path.iterdir()
        assert unheld(tmp_path) == []
        marked = marks(RUN_ID)
        for rank in ranks:
            assert rank is not None
            opened = [link.readlink() for link in Path(f"/proc/{rank.pid}/fd").iterdir()]
            assert left / LOCKED in opened, "the folder is not this rank's too"
        case.kill()
        case.wait()
    assert len(ranks) == 3
    assert set(ranks) <= set(marked), "an audit could not tell that they are a run's"
    wait_for(
        "the ranks' end",
        lambda: not any(rank.alive for rank in ranks if rank),
        Deadline.after(60.0),
    )
    wait_for("the lock's end", lambda: unheld(tmp_path) == [left], Deadline.after(60.0))
    os.utime(left, (0, 0))
    with DeviceRanks("stand-in"):
        assert left not in list(tmp_path.iterdir())
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
