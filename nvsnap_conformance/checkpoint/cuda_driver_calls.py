"""The suite's side of the driver's helper processes: starting one, asking it, asking several at once."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.device import Reply
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.lifecycle.residue import RUN_ID, run_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LOCK_MARGIN_SECONDS = 1.0
"""The driver's own lock timeout ends so much before ours: an answer tells more than a killed helper."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from nvsnap_conformance.checkpoint.cuda_driver_helper import main; main()"
)
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG")
_PASSED_ON_PREFIXES = ("CUDA_", "NVIDIA_", "NVSNAP_STAND_IN_")


class Helper:
    """The helper process of one target process. Started at once; :meth:`ready` waits for its driver."""

    def __init__(self, pid: int, driver: Path | None) -> None:
        self.pid = pid
        self._number = 0
        self._buffer = b""
        self._ready = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
        }
        arguments = [json.dumps(sys.path), str(pid), str(driver or ""), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd="/",
            env={**environment, RUN_ID: run_id()},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)

    @property
    def usable(self) -> bool:
        """Whether the helper still runs."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with an answer, or with the helper's end."""
        return self._stdout.fileno()

    def ready(self, deadline: Deadline) -> None:
        """Wait until the helper has initialised the driver.

        Raises :class:`EnvironmentFailure` where cuda-bindings or the driver is not there, and
        :class:`DeadlineExceeded`; the helper is killed then.
        """
        if self._ready:
            return
        message = self._wait(deadline)
        if message is None:
            self.kill()
            raise DeadlineExceeded(
                f"the helper for process {self.pid} was not ready within {deadline.budget:.1f} s",
                cause=f"cuInit did not return. {self.last_words()}",
                next_step="see whether `nvidia-smi` answers on this host",
            )
        if message.get("event") != "ready" or message["code"] != 0:
            told = message.get("error") or message.get("result") or self.last_words()
            self.kill()
            raise EnvironmentFailure(
                f"the driver's checkpoint calls cannot be made: {told}",
                cause="cuda-bindings is not installed beside the suite, or there is no driver or GPU here",
                next_step="pip install 'nvsnap-conformance[gpu]'; see `nvsnap-conformance doctor`",
            )
        self._ready = True

    def send(self, verb: str, milliseconds: int = 0, moves: Mapping[str, str] | None = None) -> None:
        """Ask for one call. A helper that is gone is noticed when its answer is read."""
        self._number += 1
        request = {
            "number": self._number,
            "verb": verb,
            "milliseconds": milliseconds,
            "moves": dict(moves or {}),
        }
        with suppress(OSError):
            self._stdin.write((json.dumps(request) + "\n").encode())
            self._stdin.flush()

    def ask(self, verb: str, seconds: float) -> Reply:
        """Make one call and wait for its reply, at most ``seconds``."""
        return call_all({self.pid: self}, verb, Deadline.after(seconds))[self.pid]

    def receive(self) -> dict[str, Any] | None:
        """Return the next message if it is there; ``{"event": "gone"}`` once the helper has ended.

        ``{"event": "garbled"}`` is a line that is no message.
        """
        while b"\n" not in self._buffer:
            try:
                block = os.read(self._stdout.fileno(), 65536)
            except BlockingIOError:
                return None
            if not block:
                return {"event": "gone"}
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            # A library that is loaded into it (CUDA_INJECTION64_PATH) may print: then no answer can be told.
            return {"event": "garbled", "error": f"it prints what is no answer: {line[:80]!r}"}
        return message

    def last_words(self) -> str:
        """Return the end of what the helper wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()[-500:].decode(errors="replace").strip()

    def kill(self) -> None:
        """End the helper, in whatever call it is."""
        self._process.kill()
        # One that waits in the kernel goes when the kernel lets it; it must not hold the suite up.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)

    def close(self) -> None:
        """End the helper and free what belongs to it."""
        with suppress(OSError):
            self._stdin.close()
        self.kill()
        self._stdout.close()
        self._errors.close()

    def _wait(self, deadline: Deadline) -> dict[str, Any] | None:
        while (message := self.receive()) is None:
            if deadline.expired:
                return None
            select.select([self], [], [], deadline.remaining())
        return message


def call_all(
    helpers: Mapping[int, Helper], verb: str, deadline: Deadline, moves: Mapping[str, str] | None = None
) -> dict[int, Reply]:
    """Make one call on every process at the same time; return once each has answered, died or hung.

    ``moves`` are the devices of a restore. A helper without an answer at the deadline is killed, and its
    reply says so.
    """
    began = time.monotonic()
    milliseconds = max(1, int((deadline.remaining() - LOCK_MARGIN_SECONDS) * 1000)) if verb == "lock" else 0
    for helper in helpers.values():
        helper.send(verb, milliseconds, moves)
    replies: dict[int, Reply] = {}
    while len(replies) < len(helpers):
        waiting = [helper for pid, helper in helpers.items() if pid not in replies]
        readable, _, _ = select.select(waiting, [], [], deadline.remaining())
        for helper in readable:
            message = helper.receive()
            if message is not None:
                replies[helper.pid] = _reply(helper, verb, began, message)
        if not readable and deadline.expired:
            for helper in waiting:
                helper.kill()
                replies[helper.pid] = Reply(helper.pid, verb, began, time.monotonic(), hung=True)
    return {pid: replies[pid] for pid in helpers}


def _reply(helper: Helper, verb: str, began: float, message: dict[str, Any]) -> Reply:
    if message["event"] != "reply" or "error" in message:
        helper.kill()
        told = message.get("error") or helper.last_words() or "without a word"
        return Reply(helper.pid, verb, began, time.monotonic(), died=told)
    known = {
        name: message[name]
        for name in ("result", "code", "state", "state_result", "thread")
        if name in message
    }
    return Reply(helper.pid, verb, message["began"], message["ended"], **known)
