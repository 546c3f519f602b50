"""One launched program and everything that descends from it, owned until it is closed.

With root an engine has pid, mount, network and IPC namespaces of its own; without, a session and a
subreaper. Either way nothing of it outlives the process that launched it (see ``supervisor.py``).
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Self

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import linux
from nvsnap_conformance.engines.home import LOG_NAME, Home, make_home
from nvsnap_conformance.engines.namespaces import (
    NetworkThreads,
    in_thread,
    isolation_gap,
    run_in,
)
from nvsnap_conformance.engines.supervision import CLOSE_SECONDS, Supervision, innermost_pid
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.lifecycle.residue import (
    ResidualProcess,
    Residue,
    added,
    files_below,
    listening,
    mount_points,
    shm_entries,
    sysv_objects,
)
from nvsnap_conformance.processes import ProcessId, tree

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor
    from types import TracebackType


_OWN_NETWORK = Path("/proc/self/net")

FOLLOW_SECONDS = 10.0
"""Allowance for an engine's processes to end once their root has, in seconds; vLLM's take under one."""


@dataclass(frozen=True)
class Termination:
    """How an engine ended: ``graceful`` when nothing had to be killed after SIGTERM.

    ``exit_status`` is the root's (negative: the signal), ``residue`` what was there when the grace had
    passed, before anything was killed.
    """

    graceful: bool
    exit_status: int | None
    seconds: float
    killed: tuple[ProcessId, ...]
    residue: Residue


class EngineProcess:
    """A launched program with all its descendants. Make one with :meth:`launch`; use it as a context.

    ``isolation`` says which namespaces are its own: ``pid``, ``mount``, ``network`` and ``ipc``, or none.
    ``root`` is the program's first process. Paths that the engine uses for its temporary files and its log
    lie in ``home_inside`` as it sees them, which is ``home_outside`` on the host.
    """

    def __init__(self, home: Home, workdir: Path, *, isolated: bool) -> None:
        self.isolation = frozenset(linux.NAMESPACES) if isolated else frozenset()
        self.home = home
        self.home_inside = home.inside
        self.home_outside = home.outside
        self.workdir = workdir
        self.log_path = workdir / LOG_NAME
        self.termination: Termination | None = None
        self._owner = os.getpid()
        self._closed = False
        self._supervision = Supervision(home, workdir, isolated=isolated)
        self._clients = NetworkThreads(None)
        self._mounts: tuple[str, ...] = ()
        self._ports: frozenset[str] = frozenset()
        self._at_close: list[Callable[[], None]] = []

    # Launching ------------------------------------------------------------------------------------

    @classmethod
    def launch(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        workdir: Path,
        isolate: bool = True,
        cwd: Path | None = None,
    ) -> Self:
        """Start ``argv`` and return once it has been exec'ed.

        ``env`` is the complete environment, to which TMPDIR and the marks of run and launch are added.
        ``workdir`` is an existing folder that serves this launch alone; output goes to ``engine.log`` in
        it. ``isolate`` asks for namespaces, which are made where the rights are there; ``isolation`` says
        what came of it. ``cwd`` defaults to ``home_inside``, which every restored copy has as well.

        Raises :class:`UsageError` for a bad argument, and :class:`EnvironmentFailure` where a set-up step
        is refused or the program cannot be executed. Nothing is left in either case.
        """
        if not argv or any("\0" in word for word in argv):
            raise UsageError(f"not a command: {list(argv)!r}", next_step="give a program and its arguments")
        isolated = isolate and isolation_gap() is None
        home = make_home(Path(workdir), isolated=isolated)
        self = cls(home, Path(workdir).resolve(), isolated=isolated)
        _live.add(self)
        try:
            if not isolated:
                self._ports = frozenset(listening(_OWN_NETWORK))
            self._supervision.start(argv, env, cwd or self.home_inside)
            if isolated:
                self._entered()
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def vacant(cls, *, workdir: Path, root_pid: int) -> Self:
        """Make the namespaces and the home of an engine, for a restore, and start nothing in them.

        ``root_pid`` is the pid that the restored engine's first process has as it sees it. Until
        :meth:`adopt`, ``root`` raises and ``poll`` answers ``None``. Raises as :meth:`launch` does, and
        where this process may make no namespaces.
        """
        gap = isolation_gap()
        if gap is not None:
            raise EnvironmentFailure(
                "an engine can only be restored into namespaces of its own",
                cause=f"this process lacks {gap}",
                next_step="run as root, with these capabilities",
            )
        self = cls(make_home(Path(workdir), isolated=True), Path(workdir).resolve(), isolated=True)
        _live.add(self)
        try:
            self._supervision.start((), {}, self.home_inside, vacancy=root_pid)
            self._entered()
        except BaseException:
            self.close()
            raise
        return self

    def _entered(self) -> None:
        """Note what belongs to the namespaces that have just been made."""
        self._clients = NetworkThreads(self._supervision.network_fd)
        self._mounts = self._supervision.mounts

    def vacate(self, deadline: Deadline) -> None:
        """Make room for a restore in the same namespaces: kill what is left, and forget its end.

        Raises :class:`DeadlineExceeded` where a process does not go, :class:`EnvironmentFailure` where the
        namespaces are gone.
        """
        self._entry()

        def empty() -> bool:
            left = tree(self._supervision.top)[1:]
            for member in left:
                member.send(SIGKILL)
            # Nor a zombie, whose pid is still taken. And twice: a look takes time, and misses a child whose
            # parent has ended meanwhile (seen with four runs side by side).
            return not left and not tree(self._supervision.top)[1:]

        wait_for("the end of the engine's processes", empty, deadline, interval=0.02)
        self._supervision.vacate(deadline)

    def adopt(self, last_pid: int) -> None:
        """Take over an engine that was restored into these namespaces, with its first process's pid.

        New processes get pids above ``last_pid``. Raises :class:`EnvironmentFailure` where there is none.
        """
        self._entry()
        if not self._supervision.adopt(last_pid):
            raise EnvironmentFailure(
                "no process was restored with the pid of the engine's first process",
                cause="it ended at once, or was restored somewhere else",
                next_step=f"see {self.log_path} and the restorer's log",
            )

    @property
    def root(self) -> ProcessId:
        """The engine's first process; after a restore, the restored one."""
        try:
            return self._supervision.root
        except AttributeError:
            raise EnvironmentFailure("nothing has been restored into these namespaces yet") from None

    @property
    def clock_offset(self) -> float:
        """What the engine's monotonic clock is ahead of the suite's, in seconds (below zero: behind).

        CRIU restores an engine into a time namespace in which that clock goes on from the dump
        (time_namespaces(7)), so that no timer of the engine's sees a jump.
        """
        try:
            lines = Path(f"/proc/{self.root.pid}/timens_offsets").read_text().splitlines()
        except FileNotFoundError:  # a kernel without time namespaces, or an engine that is gone
            return 0.0
        for name, seconds, nanoseconds in (line.split() for line in lines):
            if name == "monotonic":
                return int(seconds) + int(nanoseconds) / 1e9
        return 0.0

    @property
    def io_uring(self) -> str:
        """Say what becomes of a call of io_uring_setup in the engine; CRIU can dump no ring."""
        if not linux.io_uring_offered():
            return "not offered by the kernel"
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/{self.root.pid}/status").read_text(errors="replace").splitlines():
                if line.split() == ["Seccomp:", "2"]:
                    return "refused by a seccomp filter"
        return "allowed"

    # Looking --------------------------------------------------------------------------------------

    def poll(self) -> int | None:
        """Return the root's exit status (negative: the signal), ``None`` while it runs."""
        return self._supervision.poll()

    @property
    def exit_status(self) -> int | None:
        """The same as :meth:`poll`."""
        return self.poll()

    def tree(self) -> list[ProcessId]:
        """Return the engine's living processes, the root first and parents before children.

        Supervisor and init are not among them; orphans are.
        """
        if self._closed:
            return []
        top = self._supervision.top
        members = tree(top)[1:] if top.alive else tree(self.root)
        return [member for member in members if member.alive]

    def namespace_pid(self, process: ProcessId) -> int:
        """Return the pid by which the engine itself knows ``process``.

        Raises :class:`EnvironmentFailure` once the process is gone.
        """
        pid = innermost_pid(process.pid)
        if pid is None or process.process() is None:
            raise EnvironmentFailure(f"process {process.pid} of the engine is gone")
        return pid

    def host_pid(self, pid: int) -> int | None:
        """Return the suite's pid of the engine's process that calls itself ``pid``; ``None`` without one."""
        return next((member.pid for member in self.tree() if innermost_pid(member.pid) == pid), None)

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the engine's output (at most 256 KiB are read)."""
        with self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 256 * 1024))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def log_position(self) -> int:
        """Return how much the engine has logged, in bytes."""
        return self.log_path.stat().st_size

    def log_since(self, position: int) -> str:
        """Return what was logged after ``position`` (bytes; at most the last 4 MiB of it are read)."""
        with self.log_path.open("rb") as file:
            file.seek(max(position, file.seek(0, os.SEEK_END) - (4 << 20)))
            return file.read().decode(errors="replace")

    def inside(self, path: Path) -> Path:
        """Return a path below ``home_outside`` as the engine sees it; other paths are the same for both."""
        return _moved(path, self.home_outside, self.home_inside)

    def outside(self, path: Path) -> Path:
        """Return a path below ``home_inside`` as the host sees it; other paths are the same for both."""
        return _moved(path, self.home_inside, self.home_outside)

    def inside_mounts(self, path: Path) -> Path:
        """Return how the host reaches an absolute ``path`` of the engine's mounts, for whatever lies there.

        The same path where the engine has no mounts of its own.
        """
        self._entry()
        if not self.isolation:
            return path
        return Path(f"/proc/{self._supervision.top.pid}/root") / path.relative_to("/")

    # Entering -------------------------------------------------------------------------------------

    def free_port(self) -> int:
        """Return a TCP port that is free on the engine's loopback now."""

        def bind() -> int:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                port: int = sock.getsockname()[1]
                return port

        self._entry()
        return self._clients.run(bind)

    def network_executor(self, workers: int) -> ThreadPoolExecutor:
        """Return a pool of threads in the engine's network namespace; it ends with the engine.

        A client used in these threads (and its connections opened there) talks to the engine's loopback.
        """
        self._entry()
        return self._clients.pool(workers)

    def run_inside(
        self,
        argv: Sequence[str],
        *,
        namespaces: Collection[str] | None = None,
        timeout: float,
        input: str | None = None,  # noqa: A002 - the name that subprocess uses
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside the engine's namespaces and return its status and output.

        ``namespaces`` are those to enter out of ``isolation`` (all of them by default; none are where the
        engine has none of its own); ``timeout`` is in seconds. ``env`` defaults to the suite's own.
        Raises :class:`DeadlineExceeded` at the timeout, after the program was killed, and
        :class:`EnvironmentFailure` where it cannot be started. Whatever the program started itself is
        killed when it ends, unless it gave up its environment.
        """
        wanted = self.isolation if namespaces is None else namespaces
        return run_in(
            self._entry(),
            argv,
            namespaces=wanted if self.isolation else (),
            timeout=timeout,
            input=input,
            env=env,
            cwd=cwd,
        )

    def _entry(self) -> int:
        if self._closed:
            raise EnvironmentFailure("the engine has been closed", next_step="launch it again")
        return self._supervision.top_fd

    # Ending ---------------------------------------------------------------------------------------

    def audit(self) -> Residue:
        """Return what the engine has now: after its end, what it left behind by itself.

        Not isolated, /dev/shm and the ports are the host's: only listening ports that came since the launch
        are listed, and /dev/shm, System V objects and mounts are left to :class:`HostSnapshot`.
        """
        processes = tuple(ResidualProcess.of(member) for member in self.tree())
        tmp_files = files_below(self.home.tmp_outside)
        if not self.isolation:
            new = set(listening(_OWN_NETWORK)) - self._ports if processes else set()
            return Residue(processes=processes, ports=tuple(sorted(new)), tmp_files=tmp_files)
        top = self._supervision.top
        if self._closed or not top.alive:  # the namespaces are gone, and all with them
            return Residue(tmp_files=tmp_files)
        place = Path(f"/proc/{top.pid}")
        shm, semaphores = shm_entries(place / "root/dev/shm")
        try:
            sysv_shm, sysv_semaphores = in_thread(self._entry(), linux.CLONE_NEWIPC, sysv_objects)
        except ProcessLookupError:  # they went just now
            return Residue(tmp_files=tmp_files)
        return Residue(
            processes=processes,
            shm=shm + sysv_shm,
            semaphores=semaphores + sysv_semaphores,
            ports=tuple(sorted(listening(place / "net"))),
            mounts=added(self._mounts, mount_points(str(top.pid))),
            tmp_files=tmp_files,
        )

    def terminate(self, deadline: Deadline) -> Termination:
        """End the engine as a user would, see what it leaves, kill what is left, and close.

        The root gets SIGTERM (a stopped tree is continued first) and has three quarters of the time left to
        go by itself, the others :data:`FOLLOW_SECONDS` after it; what was killed may take
        :data:`CLOSE_SECONDS` beyond the deadline. Never raises for an engine that is already gone.
        """
        if self.termination is not None:
            return self.termination
        if self._closed:
            return Termination(False, self.poll(), 0.0, (), Residue())
        start = time.monotonic()
        self.root.send(SIGTERM)
        for member in self.tree():
            member.send(SIGCONT)
        with suppress(DeadlineExceeded):
            own = deadline.reserve(0.25)
            wait_for("the root's end", lambda: self.poll() is not None, own, interval=0.02)
            wait_for("the engine's end", self._ended, own.sooner(FOLLOW_SECONDS), interval=0.02)
        residue = self.audit()
        left = tuple(self.tree())
        for member in left:
            member.send(SIGKILL)
        with suppress(DeadlineExceeded):  # what cannot be killed is met again by close
            wait_for("the killed engine's end", self._ended, Deadline.after(CLOSE_SECONDS))
        self.termination = Termination(not left, self.poll(), time.monotonic() - start, left, residue)
        self.close()
        return self.termination

    def _ended(self) -> bool:
        return self.poll() is not None and not self.tree()

    def close(self) -> None:
        """Kill whatever is left and take the namespaces down. May be called again, and by any thread.

        Raises :class:`EnvironmentFailure` where the kernel does not let a killed process go.
        """
        if os.getpid() != self._owner:  # a forked copy of the suite owns nothing
            return
        self._clients.close()
        self._closed = True
        gone = self._supervision.close()
        _live.discard(self)
        while self._at_close:
            self._at_close.pop()()
        if not gone:
            raise EnvironmentFailure(
                f"the engine of {self.workdir} was killed and did not go within {CLOSE_SECONDS:.0f} s",
                cause="a process waits in the kernel (state D) for a device or a file system",
                next_step="see `ps axo pid,stat,wchan:30,comm`",
            )

    def keep_until_closed(self, release: Callable[[], None]) -> None:
        """Call ``release`` once when the engine is closed: for what must stay as long as it lives."""
        self._at_close.append(release)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


_live: set[EngineProcess] = set()


def close_all() -> None:
    """Close every engine of this process, also one that is still starting; tell of what does not go."""
    for process in list(_live):
        try:
            process.close()
        except EnvironmentFailure as failure:  # the others must be closed too
            print(failure, file=sys.stderr)  # noqa: T201 - there is nobody else to tell


atexit.register(close_all)
