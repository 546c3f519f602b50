"""Small processes in every state that a sampler can meet; each ends with the test process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.hang import procfs
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PR_SET_PDEATHSIG = 1

SLEEPER = "import signal, sys; print('up', flush=True); signal.pause()"
SPINNER = "print('up', flush=True)\nwhile True:\n    pass"
NATIVE = "import ctypes; print('up', flush=True); ctypes.PyDLL(None).pause()"  # sleeps with the GIL held
UNINTERRUPTIBLE = """
import ctypes, signal
print('up', flush=True)
ctypes.CDLL(None).vfork()  # the parent stays in state D for as long as the child lives
signal.pause()
"""
PARENT_OF_ZOMBIE = """
import os, signal
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(pid, flush=True)
signal.pause()
"""


def die_with_parent() -> None:
    """For a child, between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def python(
    code: str,
    *arguments: str,
    title: str | None = None,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[tuple[ProcessId, str]]:
    """A Python process that has printed a line by now: its identity and that line.

    With ``title`` its command line begins with it, as setproctitle makes it.
    """
    argv = [*prefix, title or sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(
        argv,
        executable=None if prefix else sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(env or {})},
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - one thread does this, and nothing else survives a SIGKILL
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode().strip()
        assert line, f"{code!r} did not come up"
        identity = ProcessId.of(process.pid)
        assert identity is not None
        yield identity, line
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def in_state(pid: int, letters: str) -> None:
    """Wait until the kernel shows ``pid`` in one of these states."""
    wait_for(f"pid {pid} in state {letters}", lambda: procfs.state_of(pid) in letters, Deadline.after(20.0))


def say(process: ProcessId, text: str) -> None:
    """Write a line to the standard input of a process."""
    with Path(f"/proc/{process.pid}/fd/0").open("w") as stream:
        stream.write(f"{text}\n")


def wait_gone(process: ProcessId) -> None:
    """Wait until a process has ended."""
    wait_for(f"{process} to end", lambda: not process.alive, Deadline.after(20.0))


def children(pid: int) -> list[int]:
    """The direct children of ``pid``."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
