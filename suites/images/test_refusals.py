"""Dumps and restores that cannot be: each is refused in plain words, and nothing is lost or left over.

The programs are small, the checkpointer and the kernel are the real ones.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure, Kind
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.fixtures.arms import implementation
from nvsnap_conformance.outcomes import Finding, finding, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvsnap_conformance.checkpoint.protocol import HostCheckpointer
    from nvsnap_conformance.session.arms import Arm

SECONDS = 60.0
LOG_UP = "program: up"
PORT = 8111

PROGRAM = f"""
import socket, sys
listener = socket.create_server(("127.0.0.1", {PORT}))
notes = open(sys.argv[1], "r+")
memory = bytearray(int(sys.argv[2]))
memory[::4096] = b"x" * len(memory[::4096])
print("{LOG_UP}", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(b"alive")
    connection.close()
"""


@pytest.fixture
def checkpointer(host_arm: Arm) -> HostCheckpointer:
    """Return CRIU, or the mutant of the image layer in its place."""
    made: HostCheckpointer = implementation(host_arm.mutant, "image", CriuCheckpointer)()
    return made


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Give a function that starts the program and waits until it serves."""
    with ExitStack() as stack:

        def start(notes: Path, *, megabytes: int = 4) -> EngineProcess:
            workdir = tmp_path / f"work-{len(list(tmp_path.glob('work-*')))}"
            workdir.mkdir()
            notes.write_text("notes\n")
            argv = [sys.executable, "-c", PROGRAM, str(notes), str(megabytes << 20)]
            process = EngineProcess.launch(argv, env={"PATH": "/usr/bin:/bin"}, workdir=workdir)
            stack.callback(process.close)
            wait_for(
                "the program to serve",
                lambda: LOG_UP in process.log_path.read_text(),
                Deadline.after(SECONDS),
                detail=lambda: process.log_tail(10),
            )
            return process

        yield start


def serves(process: EngineProcess) -> bool:
    """Whether the program answers on its port, in its own network namespace."""

    def ask() -> bool:
        with socket.create_connection(("127.0.0.1", PORT), timeout=SECONDS) as connection:
            return connection.recv(16) == b"alive"

    try:
        return process.network_executor(1).submit(ask).result(SECONDS)
    except OSError:
        return False


def signalled(process: EngineProcess, pid: int, name: str) -> bool:
    """Send a signal by name to a pid of the program's own namespace; return whether there is such a pid."""
    done = process.run_inside(["/bin/sh", "-c", f"kill -s {name} {pid}"], timeout=SECONDS)
    return done.returncode == 0


def refused(call: Callable[[], object], kind: Kind, words: str) -> list[Finding]:
    """Call what must fail; check that the failure is of ``kind`` and names ``words``."""
    try:
        call()
    except CriuFailure as failure:
        if failure.kind is kind and words in str(failure) and failure.next_step:
            return []
        told = f"kind {failure.kind}: {failure}"
    except EnvironmentFailure as error:
        told = f"{type(error).__name__}: {error}"
    else:
        return [finding(f"what cannot be ({kind}) was reported as a success", "IMAGE:FALSE_SUCCESS")]
    return [finding(f"expected {kind} with {words!r} and a next step, was told: {told}", "IMAGE:UNNAMED")]


def nothing_runs(process: EngineProcess) -> list[Finding]:
    """Check that a refused restore left no process of the image behind."""
    left = process.tree()
    return (
        [finding(f"a refused restore left processes running: {left}", "IMAGE:LEFT_RUNNING")] if left else []
    )


def _no_manifest(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _half_written(folder: Path) -> None:
    (folder / "checkpoint.json").write_text((folder / "checkpoint.json").read_text()[:40])


def _cut_short(folder: Path) -> None:
    pages = max((folder / "images").glob("pages-*.img"), key=lambda path: path.stat().st_size)
    os.truncate(pages, pages.stat().st_size // 2)


def _without_a_file(folder: Path) -> None:
    next((folder / "images").glob("core-*.img")).unlink()


@pytest.mark.clause("IMAGE-DAMAGED-REFUSED")
@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (_no_manifest, Kind.NO_IMAGE),
        (_empty, Kind.NO_IMAGE),
        (_half_written, Kind.NO_IMAGE),
        (_cut_short, Kind.IMAGE_DAMAGED),
        (_without_a_file, Kind.IMAGE_DAMAGED),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else None,
)
def test_a_damaged_image_is_refused(
    checkpointer: HostCheckpointer,
    launch: Callable[..., EngineProcess],
    tmp_path: Path,
    damage: Callable[[Path], None],
    kind: Kind,
) -> None:
    """Each kind of damage is named, and the restore starts nothing."""
    process = launch(tmp_path / "notes")
    folder = tmp_path / "image"
    checkpointer.dump(process, folder, Deadline.after(SECONDS))
    damage(folder)
    found = refused(lambda: checkpointer.load(process, folder, Deadline.after(SECONDS)), kind, "")
    require(found + nothing_runs(process))


@pytest.mark.clause("IMAGE-FAILURE-NAMED")
def test_a_taken_pid_is_named(
    checkpointer: HostCheckpointer, launch: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """A pid of the image that another process has is refused by number; freed, it restores."""
    process = launch(tmp_path / "notes")
    pid = process.namespace_pid(process.root)
    folder = tmp_path / "image"
    checkpointer.dump(process, folder, Deadline.after(SECONDS))
    squat = f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid; sleep {SECONDS} & wait"
    with ThreadPoolExecutor(1) as executor:
        squatting = executor.submit(process.run_inside, ["/bin/sh", "-c", squat], timeout=SECONDS)
        wait_for("the pid to be taken", lambda: signalled(process, pid, "0"), Deadline.after(SECONDS / 4))
        found = refused(
            lambda: checkpointer.load(process, folder, Deadline.after(SECONDS)), Kind.PID_TAKEN, str(pid)
        )
        assert signalled(process, pid, "KILL")
        squatting.result(SECONDS)
    require(found)
    checkpointer.load(process, folder, Deadline.after(SECONDS))
    assert serves(process)


@pytest.mark.clause("IMAGE-FAILURE-NAMED")
def test_a_taken_port_is_named(
    checkpointer: HostCheckpointer, launch: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """A port of the image on which another program listens is refused by number; freed, it restores."""
    process = launch(tmp_path / "notes")
    folder = tmp_path / "image"
    checkpointer.dump(process, folder, Deadline.after(SECONDS))

    def listen() -> socket.socket:
        return socket.create_server(("127.0.0.1", PORT))

    listener = process.network_executor(1).submit(listen).result(SECONDS)
    with listener:
        found = refused(
            lambda: checkpointer.load(process, folder, Deadline.after(SECONDS)), Kind.PORT_TAKEN, str(PORT)
        )
        found += nothing_runs(process)
    require(found)
    checkpointer.load(process, folder, Deadline.after(SECONDS))
    assert serves(process)


@pytest.mark.clause("IMAGE-FAILURE-NAMED")
def test_a_replaced_file_is_named(
    checkpointer: HostCheckpointer, launch: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """A file that the program had open and that is another one now is refused; put back, it restores."""
    notes = tmp_path / "notes"
    process = launch(notes)
    folder = tmp_path / "image"
    checkpointer.dump(process, folder, Deadline.after(SECONDS))
    kept = notes.read_text()
    notes.unlink()
    notes.write_text(kept * 3)
    found = refused(
        lambda: checkpointer.load(process, folder, Deadline.after(SECONDS)), Kind.FILE_CHANGED, "notes"
    )
    found += nothing_runs(process)
    require(found)
    notes.write_text(kept)
    checkpointer.load(process, folder, Deadline.after(SECONDS))
    assert serves(process)


@pytest.mark.clause("IMAGE-FAILURE-NAMED")
def test_a_missing_file_is_named(
    checkpointer: HostCheckpointer, launch: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """A file that the program had open and that is gone is refused by name."""
    notes = tmp_path / "notes"
    process = launch(notes)
    folder = tmp_path / "image"
    checkpointer.dump(process, folder, Deadline.after(SECONDS))
    notes.unlink()
    found = refused(
        lambda: checkpointer.load(process, folder, Deadline.after(SECONDS)), Kind.FILE_MISSING, "notes"
    )
    require(found + nothing_runs(process))


@pytest.mark.clause("IMAGE-FAILURE-NAMED")
def test_a_full_disk_is_named_and_the_program_runs_on(
    checkpointer: HostCheckpointer,
    small_disk: Path,
    launch: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    """An image that does not fit on the disk fails the dump by name, and the program serves as before."""
    process = launch(tmp_path / "notes", megabytes=128)
    found = refused(
        lambda: checkpointer.dump(process, small_disk / "image", Deadline.after(SECONDS)), Kind.NO_SPACE, ""
    )
    if not serves(process):
        found.append(finding("after a dump onto a full disk the program does not serve", "DUMP:ENGINE_LOST"))
    require(found)
