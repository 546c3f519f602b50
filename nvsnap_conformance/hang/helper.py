"""Runs samplers next to their targets: enters namespaces, runs one program per target, keeps deadlines.

Started as ``python -I -S helper.py`` with one JSON request on standard input; writes one JSON line per
target. Standard library only, and everything is imported before a mount namespace is entered: what lies
at the interpreter's path over there is somebody else's. It ends, with everything it started, when its
standard input closes: so nothing of it outlives the process that asked.

Request: ``{"program": FD, "namespaces": [FD...], "jobs": N, "targets": [{"pid", "seconds", "rungs":
[[name, arguments]...]}]}``, pids being those of the target's namespace. Reply lines: ``{"pid", "rung",
"stdout", "problems", "killed", "seconds"}``, ``rung`` null where none answered.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_LIMIT = 64 << 20  # bytes of output taken from one sampler


def enter(descriptors: list[int]) -> None:
    """Join the namespaces behind ``descriptors`` (a pid namespace: for children only); raises ``OSError``."""
    for descriptor in descriptors:
        if _LIBC.setns(descriptor, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


class Run:
    """One sampler at work on one target."""

    def __init__(self, target: dict[str, Any], program: int) -> None:
        self.target = target
        self.started = time.monotonic()
        self.deadline = self.started + float(target["seconds"])
        self.rungs = list(target["rungs"])
        self.problems: list[str] = []
        self.program = program
        self.output = bytearray()
        self.errors = bytearray()
        self.pid = 0
        self.killed = False
        self.pipes: dict[int, bytearray] = {}

    def start(self) -> bool:
        """Start the next rung; return whether there was one."""
        if not self.rungs:
            return False
        self.name, arguments = self.rungs.pop(0)
        self.output, self.errors = bytearray(), bytearray()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() not in (parent, 0):  # 0: the parent is in an outer pid namespace
                    os._exit(125)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out_write, 1)
                os.dup2(err_write, 2)
                os.execve(self.program, ["py-spy", *arguments], {"PATH": "/usr/bin:/bin"})  # noqa: S606
            except OSError as error:
                os.write(2, f"cannot start the sampler: {error}".encode())
            finally:
                os._exit(126)
        os.close(out_write)
        os.close(err_write)
        self.pipes = {out_read: self.output, err_read: self.errors}
        return True

    def read(self, descriptor: int) -> None:
        """Take what a pipe holds; closes it at its end."""
        block = os.read(descriptor, 1 << 16)
        buffer = self.pipes[descriptor]
        if block and len(buffer) < _LIMIT:
            buffer.extend(block)
        if not block:
            del self.pipes[descriptor]
            os.close(descriptor)

    def finish(self) -> bool:
        """Reap the sampler whose pipes are closed; return whether its answer is good."""
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.pid = 0
        if code == 0 and self.output:
            return True
        reason = self.errors.decode("utf-8", "replace").partition("Stack backtrace")[0]
        self.problems.append(f"{self.name}: exit {code}: {' '.join(reason.split())[:300]}")
        return False

    def kill(self, why: str) -> None:
        """Kill the sampler and try no other rung: the reply says so, for the target may be left stopped."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.problems.append(f"{self.name}: {why}")
            for descriptor in list(self.pipes):
                os.close(descriptor)
            self.pipes = {}
            # One that is itself in an uninterruptible sleep is left to be reaped by init.
            until = time.monotonic() + 0.5
            while time.monotonic() < until and not os.waitpid(self.pid, os.WNOHANG)[0]:
                time.sleep(0.01)
            self.pid = 0
            self.killed = True
        self.rungs = []

    def answer(self, rung: str | None) -> None:
        """Write the reply line."""
        line = json.dumps(
            {
                "pid": self.target["pid"],
                "rung": rung,
                "stdout": self.output.decode("utf-8", "replace") if rung else "",
                "problems": self.problems,
                "killed": self.killed,
                "seconds": round(time.monotonic() - self.started, 4),
            }
        )
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def serve(request: dict[str, Any]) -> None:
    """Run all targets, at most ``jobs`` at a time."""
    program = int(request["program"])
    waiting = list(request["targets"])
    running: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < int(request["jobs"]):
                run = Run(waiting.pop(0), program)
                if run.start():
                    running.append(run)
                else:
                    run.answer(None)
            owners = {descriptor: run for run in running for descriptor in run.pipes}
            left = min((r.deadline - time.monotonic() for r in running), default=0.0)
            poller = select.poll()
            poller.register(0, select.POLLIN | select.POLLHUP)
            for descriptor in owners:
                poller.register(descriptor, select.POLLIN | select.POLLHUP)
            for descriptor, _ in poller.poll(max(0.0, left) * 1000):
                if descriptor in owners:
                    owners[descriptor].read(descriptor)
                elif descriptor == 0 and not os.read(0, 1):
                    return  # whoever asked is gone
            for run in list(running):
                if time.monotonic() >= run.deadline:
                    run.kill(f"killed after {run.target['seconds']:.1f} s")
                    run.answer(None)
                    running.remove(run)
                elif not run.pipes:
                    good = run.finish()
                    if good or not run.start():
                        run.answer(run.name if good else None)
                        running.remove(run)
    finally:
        for run in running:
            with contextlib.suppress(OSError):
                run.kill("given up")


def main() -> int:
    """Read the request line, enter, serve."""
    # A helper that is stopped reads no end of input: the kernel continues it when whoever asked dies.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    data = bytearray()
    while not data.endswith(b"\n"):
        block = os.read(0, 1 << 16)
        if not block:
            return 1
        data.extend(block)
    request = json.loads(data)
    try:
        enter(request["namespaces"])
    except OSError as error:
        sys.stdout.write(json.dumps({"enter": f"cannot enter the target's namespaces: {error}"}) + "\n")
        return 3
    serve(request)
    return 0


if __name__ == "__main__":
    sys.exit(main())
