"""Kill -9 a conformance run at many points, and see each time that nothing of it is left on the host.

    python -m tests.killpoints --points 20 --seed 1 [--limit SECONDS] [-- COMMAND ...]

``{out}`` in the command stands for a folder that does not exist yet, another one for each run.

The command runs once undisturbed, which gives its length and its lines of output. Half of the points are
moments, one in each of as many equal slices of that length; the others are lines, at whose appearance the
run dies. Every second point kills the run's whole process group instead of the process alone. The same
seed gives the same points for the same output.

Exit status: 0 if nothing was ever left, 1 for any residue or a point that was not reached, 2 if the
undisturbed run itself is of no use.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.lifecycle.residue import RUN_ID, HostSnapshot, Residue, check_residue, run_processes
from nvsnap_conformance.outcomes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

GONE_SECONDS = 30.0
"""Allowance between the kill and the last of the run's processes, in seconds."""

RETRIES = 3
ENDED = "ended by itself"

USABLE = {ExitCode.CONFORMANT, ExitCode.NOT_CONFORMANT, ExitCode.INCOMPLETE}


@dataclass(frozen=True)
class Point:
    """Where a run dies: ``seconds`` after its start, or at the first line like ``line``."""

    seconds: float | None
    line: str | None
    group: bool

    def __str__(self) -> str:
        where = f"at {self.seconds:.2f} s" if self.line is None else f"at line {self.line[:60]!r}"
        return f"{where}, {'process group' if self.group else 'process'}"


class Run:
    """One run of the command in a process group of its own, with a run id of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        self.id = uuid.uuid4().hex
        self.folder = tempfile.TemporaryDirectory(prefix="nvsnap-killpoint-")
        out = str(Path(self.folder.name) / "out")
        self.before = HostSnapshot.take(self.id)
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [word.replace("{out}", out) for word in command],
            env={**os.environ, RUN_ID: self.id, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self.lines: list[str] = []
        self._partial = b""

    def follow(self, *, until: Deadline, line: str | None = None) -> bool:
        """Read output until ``line`` shows (then true), the deadline passes or the run ends."""
        assert self.process.stdout is not None
        output = self.process.stdout.fileno()
        pidfd = os.pidfd_open(self.process.pid)
        try:
            while not until.expired:
                ready, _, _ = select.select([output, pidfd], [], [], until.remaining())
                if output in ready:
                    data = os.read(output, 65536)
                    *whole, self._partial = (self._partial + data).split(b"\n")
                    self.lines += [shape(text.decode(errors="replace")) for text in whole]
                    if line is not None and line in self.lines:
                        return True
                    if data:
                        continue
                if pidfd in ready:
                    break
        finally:
            os.close(pidfd)
        return False

    def kill(self, *, group: bool) -> bool:
        """Kill the run; return whether it was still there."""
        if self.process.poll() is not None:
            return False
        if group:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        return self.process.wait() == -signal.SIGKILL

    def left(self) -> Residue:
        """Return what is left on the host, after waiting for it to go; and throw the output away."""
        if self.process.stdout is not None:
            self.process.stdout.close()
        try:
            wait_for(
                "the host to be as it was",
                lambda: self.before.diff(HostSnapshot.take(self.id)).empty,
                Deadline.after(GONE_SECONDS),
            )
        except DeadlineExceeded:
            residue = self.before.diff(HostSnapshot.take(self.id))
            for process in run_processes(self.id):
                process.send(signal.SIGKILL)
            return residue
        finally:
            self.folder.cleanup()
        return Residue()


def shape(line: str) -> str:
    """Return a line without what differs from run to run: numbers, and letters that number things."""
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f.]*", "#", line.strip())


def choose(points: int, seed: int, seconds: float, lines: Sequence[str]) -> list[Point]:
    """Return the points of a run that took ``seconds`` and wrote ``lines``."""
    rng = random.Random(seed)
    shapes = [line for line in dict.fromkeys(lines) if line]
    chosen = sorted(rng.sample(range(len(shapes)), min(points // 2, len(shapes))))
    moments = points - len(chosen)
    found = [Point(seconds * (i + rng.random()) / moments, None, group=False) for i in range(moments)]
    found += [Point(None, shapes[i], group=False) for i in chosen]
    rng.shuffle(found)
    return [Point(point.seconds, point.line, group=i % 2 == 1) for i, point in enumerate(found)]


def report(residue: Residue) -> str:
    """Return one line on what is left."""
    return "; ".join(f"[{f.signature}] {f.message}" for f in check_residue(residue, of="run")) or "clean"


def strike(command: Sequence[str], point: Point, limit: float) -> tuple[bool, str]:
    """Run the command, kill it at the point, and return whether that went well, with a line on it."""
    run = Run(command)
    if point.line is None:
        assert point.seconds is not None
        run.follow(until=Deadline.after(point.seconds))
        reached = True
    else:
        reached = run.follow(until=Deadline.after(limit), line=point.line)
    killed = run.kill(group=point.group)
    died = time.monotonic() - run.started
    residue = run.left()
    words = f"killed after {died:.2f} s" if killed else f"{ENDED} (status {run.process.returncode})"
    if killed and not reached:
        words += ", the line did not show"
    good = killed and reached and residue.empty
    return good, f"{words}; {report(residue)}, {time.monotonic() - run.started - died:.2f} s later"


def say(*lines: str) -> None:
    """Print lines at once."""
    print(*lines, sep="\n", flush=True)  # noqa: T201 - this is a program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the points and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.killpoints", description=__doc__)
    parser.add_argument("--points", type=int, default=20, help="how many kills")
    parser.add_argument("--seed", type=int, default=1, help="decides where")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that one run may take")
    parser.add_argument("command", nargs="*", help="default: nvsnap-conformance run -v --out {out}")
    options = parser.parse_args(arguments)
    program = str(Path(sys.executable).with_name("nvsnap-conformance"))
    command = options.command or [program, "run", "-v", "--out", "{out}"]
    run = Run(command)
    run.follow(until=Deadline.after(options.limit))
    if run.process.poll() not in USABLE:
        run.kill(group=True)
        say(f"undisturbed run of no use: status {run.process.returncode}", *run.lines[-20:])
        run.left()
        return 2
    seconds = time.monotonic() - run.started
    residue = run.left()
    say(f"undisturbed: {seconds:.2f} s, {len(run.lines)} lines; {report(residue)}")
    failed = 0 if residue.empty else 1
    points = choose(options.points, options.seed, seconds, run.lines)
    for number, chosen in enumerate(points, start=1):
        point = chosen
        good, words = strike(command, point, options.limit)
        for _ in range(RETRIES):
            if good or ENDED not in words:
                break
            # No two runs are alike, so one may be over before a late moment, or lack a line.
            say(f"{number}/{len(points)} {point}: {words}; again, earlier")
            point = replace(point, seconds=(point.seconds or seconds) * 0.6, line=None)
            good, words = strike(command, point, options.limit)
        failed += not good
        say(f"{number}/{len(points)} {point}: {words}")
    say(f"{len(points)} points, seed {options.seed}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
