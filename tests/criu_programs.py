"""What the tests of images need: small programs, their launch, and a look at them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.checkpoint.criu_program import check_kernel, find_criu
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.namespaces import isolation_gap
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.errors import EnvironmentFailure

if TYPE_CHECKING:
    from pathlib import Path

ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
PORT = 8100

# Holds a number that nobody else knows, and counts; answers "NUMBER COUNT MONOTONIC" to every connection. The
# sleep only keeps the count from taking a core: nothing waits for it.
COUNTER = f"""
import fcntl, os, secrets, signal, socket, threading, time
secret = secrets.token_hex(8)
count = 0
def tick():
    global count
    while True:
        count += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
listener = socket.create_server(("127.0.0.1", {PORT}))
here, there = socket.create_connection(("127.0.0.1", {PORT})), listener.accept()[0]  # it talks to itself too
kept = open("/dev/shm/kept", "w+")
kept.write(secret); kept.flush()
unlinked = open("/dev/shm/unlinked", "w+")
os.link("/dev/shm/unlinked", "/dev/shm/other-name")
os.unlink("/dev/shm/unlinked")
with open(os.environ["TMPDIR"] + "/note", "w") as note:
    note.write(secret)
locked = open(os.environ["TMPDIR"] + "/lock", "w")
fcntl.flock(locked, fcntl.LOCK_EX)
child = os.fork()
if child == 0:
    signal.pause()
print("up", flush=True)
while True:
    connection, _ = listener.accept()
    request = connection.recv(16)
    if request == b"say":
        print("said", flush=True)
    here.sendall(b"x"); assert there.recv(1) == b"x"
    connection.sendall(f"{{secret}} {{count}} {{time.monotonic()}}".encode())
    connection.close()
"""

# Accepts one connection when told to by a line of a FIFO; else it does nothing.
HESITANT = f"""
import os, socket
os.mkfifo("gate")
listener = socket.create_server(("127.0.0.1", {PORT}))
print("up", flush=True)
while True:
    with open("gate") as gate:
        gate.read()
    connection, _ = listener.accept()
    connection.sendall(b"at last")
    connection.close()
"""

Launch = Callable[..., EngineProcess]


def gap() -> str | None:
    """Return what keeps this machine from taking images, ``None`` where nothing does."""
    missing = isolation_gap()
    if missing:
        return f"no right to make namespaces: {missing}"
    try:
        check_kernel(find_criu())
    except EnvironmentFailure as failure:
        return f"{failure.what}: {failure.cause}"
    return None


needs_criu = pytest.mark.skipif(gap() is not None, reason=f"{gap()}")


def soon() -> Deadline:
    """Return the deadline of one step: generous, since nothing is timed."""
    return Deadline.after(60)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Launch Python code, wait until it says ``up``, and close it afterwards."""
    with ExitStack() as stack:
        count = iter(range(100))

        def start(code: str, *, isolate: bool = True) -> EngineProcess:
            workdir = tmp_path / f"launch-{next(count)}"
            workdir.mkdir()
            argv = [sys.executable, "-I", "-S", "-c", code]
            process = stack.enter_context(
                EngineProcess.launch(argv, env=ENV, workdir=workdir, isolate=isolate)
            )
            wait_for("the program", lambda: "up" in process.log_tail(), soon(), detail=process.log_tail)
            return process

        yield start


def ask(process: EngineProcess, request: bytes = b"get") -> list[str]:
    """Return the words that the program answers on its port, in its own network namespace."""

    def talk() -> str:
        with socket.create_connection(("127.0.0.1", PORT), timeout=60) as connection:
            connection.sendall(request)
            return connection.makefile().read()

    return process.network_executor(1).submit(talk).result(60).split()


def inside(process: EngineProcess) -> list[int]:
    """Return the pids of the program's processes as it sees them, sorted."""
    return sorted(process.namespace_pid(member) for member in process.tree())
