"""The suite's end of a launch: starts the supervisor, learns who is who, hears of the end, takes down.

See ``supervisor.py`` for the other end.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines import linux
from nvsnap_conformance.engines.home import LOG_NAME, Home
from nvsnap_conformance.engines.namespaces import kill_marked, spawn_helper
from nvsnap_conformance.engines.remark import remark
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.lifecycle.residue import RUN_ID, mount_points, run_id
from nvsnap_conformance.processes import ProcessId, tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nvsnap_conformance.engines.channel import Channel

LAUNCH_ID = "NVSNAP_LAUNCH_ID"
"""The environment variable by which every process of one launch is known."""

LAUNCH_SECONDS = 30.0
"""Allowance for making namespaces and the exec, in seconds; it takes about 0.05."""

CLOSE_SECONDS = 20.0
"""Allowance for the kernel to take down a killed tree, in seconds (an engine may have gigabytes to free)."""


class Supervision:
    """One supervisor and what it started.

    ``top`` is what every process of the engine descends from: init, or the supervisor where there is
    none; ``top_fd`` its pidfd. ``root`` is the engine's first process, ``root_pid`` its pid as it sees it
    itself, by which a restored one is known again; ``network_fd`` the descriptor of an
    own network namespace, held so that clients of a dead engine meet a refused connection and no broken
    set-up.
    """

    top: ProcessId
    root: ProcessId
    root_pid: int

    def __init__(self, home: Home, workdir: Path, *, isolated: bool) -> None:
        self.top_fd = -1
        self.network_fd: int | None = None
        self.mounts: tuple[str, ...] = ()
        self._home = home
        self._errors = workdir / "supervisor.log"
        self._isolated = isolated
        self._launch_id = uuid.uuid4().hex
        self._lock = threading.RLock()
        self._exit: int | None = None
        self._identified = False
        self._closed = False
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._death: int | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, *, vacancy: int = 0) -> None:
        """Start the engine; return once it has been exec'ed.

        ``vacancy`` is the pid, as the engine will see it, of a root process that is to be restored instead:
        then only namespaces are made. Raises :class:`EnvironmentFailure`; whatever this raises,
        :meth:`close` has to follow.
        """
        ended, self._death = os.pipe()
        try:
            with self._errors.open("wb") as stderr:
                self._supervisor, channel = spawn_helper(
                    "supervisor",
                    (ended,),
                    marks={LAUNCH_ID: self._launch_id},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                )
        finally:
            os.close(ended)
        self._channel = channel
        home = self._home
        channel.send(
            isolate=self._isolated,
            argv=[os.fsdecode(word) for word in argv],
            env={**env, "TMPDIR": str(home.tmp_inside), RUN_ID: run_id(), LAUNCH_ID: self._launch_id},
            cwd=str(cwd),
            home_outside=str(home.outside),
            home_inside=str(home.inside),
            log=str(home.inside / LOG_NAME),
            extra_tmp=str(home.extra_tmp or ""),
            vacancy=vacancy,
        )
        top = None if self._isolated else self._supervisor.pid
        forked = None
        vacant = False  # told by init, which may be faster than the supervisor that tells of init
        deadline = Deadline.after(LAUNCH_SECONDS)
        while True:
            message = channel.receive(deadline.remaining())
            if message is None:
                raise self._silence()
            event = message["event"]
            if event == "error":
                raise _setup_failure(argv, message)
            if event == "init":
                top = message["pid"]
            elif event == "forked":
                forked = message["pid"]
            elif event == "started":
                return
            elif event == "vacant":
                vacant = True
            if vacant and top is not None:
                self.root_pid = vacancy
                self._identify_top(top)
                return
            if top is not None and forked is not None and not self._identified:
                self._identify(top, forked)
                channel.send(op="go")

    def _identify(self, top: int, forked: int) -> None:
        """Note who is who while the engine's first process waits for its exec.

        ``forked`` is that process's pid in its own namespace.
        """
        self.root_pid = forked
        self._identify_top(top)
        root = self._find_root()
        if root is None:
            raise self._silence()
        self.root, self._identified = root, True

    def _identify_top(self, top: int) -> None:
        try:
            self.top_fd = os.pidfd_open(top)
        except ProcessLookupError:
            raise self._silence() from None
        identity = ProcessId.of(top)
        if self._isolated:
            with suppress(FileNotFoundError, ProcessLookupError):
                self.network_fd = os.open(f"/proc/{top}/ns/net", os.O_RDONLY)
        if identity is None or (self._isolated and self.network_fd is None):
            raise self._silence()
        self.top = identity
        # Before the engine's first instruction, so that a mount of its own is never taken for ours.
        self.mounts = mount_points(str(top))

    def _find_root(self) -> ProcessId | None:
        children = [pid for pid, (parent, _) in linux.parents().items() if parent == self.top.pid]
        return next((ProcessId.of(pid) for pid in children if innermost_pid(pid) == self.root_pid), None)

    def vacate(self, deadline: Deadline) -> None:
        """Forget the root's end, so that the end of a restored root is news.

        Raises :class:`EnvironmentFailure` where the engine's namespaces have gone.
        """
        with self._lock:
            if self._channel is None:
                raise self._silence()
            self._channel.send(op="vacate")
            while True:
                message = self._channel.receive(deadline.remaining())
                if message is None:
                    raise self._silence()
                if message["event"] == "vacated":
                    self._exit = None
                    return

    def adopt(self, last_pid: int) -> bool:
        """Take the process with the old root's pid as the root; return whether there is one.

        New processes of the engine get pids above ``last_pid``: an image taken from it later can then be
        restored where a restorer uses the low ones.
        """
        with self._lock:
            root = self._find_root()
            if root is None or self._channel is None:
                return False
            self._channel.send(op="last-pid", pid=last_pid)
            self.root, self._identified = root, True
            remark(tree(self.top)[1:], {RUN_ID: run_id(), LAUNCH_ID: self._launch_id})
            return True

    def _silence(self) -> EnvironmentFailure:
        return EnvironmentFailure(
            "the engine's supervisor ended or fell silent while it set up the engine",
            cause=self._errors.read_text(errors="replace")[-2000:].strip()
            or "it was killed from outside, or the machine is out of memory or processes",
            next_step="try again; `dmesg` tells of a kill for memory",
        )

    def poll(self) -> int | None:
        """Return the root's exit status (negative: the signal), ``None`` while it runs."""
        with self._lock:
            if self._channel is None or not self._identified:
                return self._exit
            while self._exit is None:
                message = self._channel.receive(0.0)
                if message is None:
                    break
                if message["event"] == "exit":
                    self._exit = message["status"]
            if self._exit is None and self._channel.closed and not self.root.alive:
                # Whoever would have told is dead, and has taken the engine along.
                self._exit = -SIGKILL
            return self._exit

    def close(self) -> bool:
        """Take everything down; return whether all of it is gone. May be called again."""
        with self._lock:
            if self._closed:
                return True
            if self._isolated and self.top_fd >= 0:
                linux.kill_pidfd(self.top_fd)
            if self._channel is not None:
                # Said, because a forked copy of the suite may hold the descriptors open.
                self._channel.send(op="end")
            if self._death is not None:
                os.close(self._death)
            gone = self._await_supervisor(Deadline.after(CLOSE_SECONDS))
            self.poll()
            self._closed = True
            if self._channel is not None:
                self._channel.close()
            if self.top_fd >= 0:
                os.close(self.top_fd)
            if self.network_fd is not None:
                os.close(self.network_fd)
            return gone

    def _await_supervisor(self, deadline: Deadline) -> bool:
        """Wait for the supervisor, which ends after everything below it; return whether all is gone."""
        if self._supervisor is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(deadline.remaining())
        if self._supervisor.poll() == 0:
            return True
        # It cleans up by itself, unless somebody killed it or something below cannot be killed.
        self._supervisor.kill()
        self._supervisor.wait()
        deadline = Deadline.after(CLOSE_SECONDS / 2)
        gone = not self._isolated or self.top_fd < 0 or _ended(self.top_fd, deadline)
        try:
            kill_marked(LAUNCH_ID, self._launch_id, deadline)
        except DeadlineExceeded:
            gone = False
        if self._home.extra_tmp is not None:
            shutil.rmtree(self._home.extra_tmp, ignore_errors=True)
        return gone


def innermost_pid(pid: int) -> int | None:
    """Return the pid of a process in its own pid namespace (NSpid of proc_pid_status(5))."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None


def _ended(pidfd: int, deadline: Deadline) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(deadline.remaining() * 1000))


def _setup_failure(argv: Sequence[str], message: Mapping[str, str]) -> EnvironmentFailure:
    if message["stage"] == "exec":
        return EnvironmentFailure(
            f"cannot execute {argv[0]}",
            cause=message["message"],
            next_step="check that program and working directory exist, and that the program is executable",
        )
    return EnvironmentFailure(
        f"cannot set up the engine's processes: step '{message['stage']}' was refused",
        cause=f"{message['message']}; a container's seccomp or AppArmor profile may forbid it even to root",
        next_step="run with CAP_SYS_ADMIN and CAP_NET_ADMIN and an unconfined profile, or ask for an engine "
        "without namespaces (isolate=False) and its reduced claims",
    )
