"""A process of the device cases, seen from the suite: it is told one line, and answers one."""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import suppress

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.processes import ProcessId

START_SECONDS = 60.0
ANSWER_SECONDS = 10.0
END_SECONDS = 10.0


class DeviceProcess(subprocess.Popen[bytes]):
    """One such process; see :mod:`nvsnap_conformance.checkpoint.device_rank` for what it can be told."""

    _unread = b""

    def ready(self) -> ProcessId:
        """Wait until it holds what it is to hold; raise :class:`EnvironmentFailure` where it does not."""
        if self._line(Deadline.after(START_SECONDS)) != "ready":
            self.kill()
            raise EnvironmentFailure(
                "a process with GPU memory did not come up",
                cause=self._last_words(),
                next_step="see `nvidia-smi`, and whether cuda-bindings is installed beside the suite",
            )
        identity = ProcessId.of(self.pid)
        assert identity is not None  # a child of ours that has not been waited for
        return identity

    def ask(self, command: str) -> str:
        """Return its answer; ``died: `` with its last words, or ``silent``, where there is none."""
        assert self.stdin is not None  # asked for at the start
        try:
            self.stdin.write(f"{command}\n".encode())
            self.stdin.flush()
            return self._line(Deadline.after(ANSWER_SECONDS)) or f"died: {self._last_words()}"
        except BrokenPipeError:
            return f"died: {self._last_words()}"
        except DeadlineExceeded:
            return "silent"

    def end(self) -> None:
        """Kill it, and wait for it as long as that is reasonable: one that is stuck in a driver stays."""
        self.kill()
        self._last_words()

    def _line(self, deadline: Deadline) -> str:
        """Return its next line, empty at its end; raise :class:`DeadlineExceeded`, half a line or not."""
        assert self.stdout is not None  # asked for at the start
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self.stdout], [], [], deadline.remaining())
            if not readable:
                raise DeadlineExceeded(f"process {self.pid} says nothing within {deadline.budget:.0f} s")
            block = os.read(self.stdout.fileno(), 65536)
            if not block:
                return ""
            self._unread += block
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace").strip()

    def _last_words(self) -> str:
        """Return the end of what it wrote to stderr, once it has ended."""
        with suppress(subprocess.TimeoutExpired, ValueError):  # it does not end; its pipes were read before
            return self.communicate(timeout=END_SECONDS)[1].decode(errors="replace").strip()[-500:]
        return "it still runs" if self.poll() is None else "nothing more"
