"""The process that stands between the suite and an engine, so that the engine never outlives the suite.

Standard library only: it runs as ``python -I -S`` in a session of its own.

Isolated (with root)::

    suite ── supervisor (host namespaces) ── init (pid 1 of the engine's namespaces) ── engine
                                                                                    └─ reaped orphans

Each of supervisor and init watches, with file descriptors that it holds from its very first instruction,
everything above itself: a pidfd of the suite's process and a stream that ends with the suite. Init also
holds a pidfd of the supervisor and has a parent death signal. Init's end is the end of every process,
mount, socket and shared-memory file of the engine (pid_namespaces(7)), so nothing has to be found to be
killed. The engine's first process waits before its exec until the suite has noted who it is.

Not isolated: the supervisor is a child subreaper, and kills whatever descends from it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nvsnap_conformance.engines import linux
from nvsnap_conformance.engines.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINE_PID = 9000
"""The engine's first pid in its namespace: above the few that a restorer entering it will use, since a
restore needs the engine's own pids to be free."""

_LAST_PID = "/proc/sys/kernel/ns_last_pid"


class _SetupFailure(Exception):  # noqa: N818 - reported to the suite as data
    def __init__(self, stage: str, error: OSError) -> None:
        super().__init__(f"{stage}: {error}")
        self.stage = stage
        self.error = error


class _Watch:
    """The descriptors whose end means: everything must go now."""

    def __init__(self, channel: Channel, suite: int) -> None:
        self.channel = channel
        self.pidfds = [suite]
        self.pipes: list[int] = []

    def over(self) -> bool:
        return bool(self.wait(timeout=0.0) & {*self.pidfds, *self.pipes})

    def wait(self, *others: int, timeout: float | None = None) -> set[int]:
        """Return which descriptors, these or ``others``, are readable or ended."""
        poller = select.poll()
        for fd in (*self.pidfds, *self.pipes, *others):
            poller.register(fd, select.POLLIN)
        return {fd for fd, _ in poller.poll(None if timeout is None else timeout * 1000)}


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _SetupFailure(name, error) from error


def try_namespaces() -> None:
    """Make what an engine needs in namespaces that end with the calling process; raises ``OSError``.

    The caller is the first process of a new pid namespace.
    """
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("/proc", "/proc", "", linux.MS_BIND)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")  # noqa: S108
    linux.bring_loopback_up()
    Path(_LAST_PID).write_text(str(ENGINE_PID - 1))


def _enter_namespaces(spec: dict[str, Any]) -> None:
    """Make the mount, network and IPC namespaces of the calling init (its pid namespace exists)."""
    with _stage("namespaces"):
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
    with _stage("mounts"):
        # Private first, so that nothing below is ever seen by the host.
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        # Before /dev/shm is covered, for the folder may lie there.
        linux.mount(spec["home_outside"], spec["home_inside"], "", linux.MS_BIND)
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")  # noqa: S108
    with _stage("loopback"):
        linux.bring_loopback_up()
    if not spec["vacancy"]:  # a restorer must find the engine's pids free, and starts with low ones
        with _stage("pids"):
            Path(_LAST_PID).write_text(str(ENGINE_PID - 1))


def _exec_engine(spec: dict[str, Any], go: int, failure: int) -> NoReturn:
    """Become the engine, once the suite says so. Runs in the forked child."""
    if not os.read(go, 1):
        os._exit(1)
    try:
        if spec["isolate"] and linux.io_uring_offered():
            linux.refuse_io_uring()
        # Opened here, by the path inside: a checkpoint can only name files of the engine's own mounts.
        null = os.open("/dev/null", os.O_RDONLY)
        log = os.open(spec["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(null)
        os.close(log)
        os.chdir(spec["cwd"])
        for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606 - no shell is wanted
    except (OSError, ValueError) as error:  # ValueError: a NUL in the environment
        os.write(failure, str(error).encode())
    os._exit(127)


class _Reaper:
    """Starts the engine as a child of the calling process, then reaps and watches until the end.

    With a ``vacancy`` it starts none, and waits for one that is restored with that pid.
    """

    def __init__(self, spec: dict[str, Any], watch: _Watch) -> None:
        self._spec = spec
        self._watch = watch
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        # A handler that does nothing: it only makes the kernel's signal write a byte to the pipe.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        if spec["vacancy"]:
            self.engine = spec["vacancy"]
            watch.channel.send(event="vacant")
            return
        go_read, self._go = os.pipe()
        self._failure, failure_write = os.pipe()
        supervisor = os.getpid()
        self.engine = os.fork()
        if self.engine == 0:
            try:
                signal.set_wakeup_fd(-1)
                os.close(self._go)
                os.setsid()
                if not spec["isolate"]:
                    linux.set_parent_death_signal(signal.SIGKILL)
                    if os.getppid() != supervisor:
                        os._exit(1)
                _exec_engine(spec, go_read, failure_write)
            finally:
                os._exit(127)
        os.close(go_read)
        os.close(failure_write)
        watch.channel.send(event="forked", pid=self.engine)

    def _let_go(self) -> None:
        os.write(self._go, b"g")
        os.close(self._go)
        text = b""
        while data := os.read(self._failure, 4096):  # ends when exec closes the other end
            text += data
        os.close(self._failure)
        if text:
            self._watch.channel.send(event="error", stage="exec", message=text.decode(errors="replace"))
        else:
            self._watch.channel.send(event="started")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.engine:
                self._watch.channel.send(event="exit", status=os.waitstatus_to_exitcode(status))

    def serve(self) -> None:
        """Return when the suite, or anything else above, is gone."""
        watch = self._watch
        while True:
            ready = watch.wait(watch.channel.fileno(), self._woken)
            if ready & {*watch.pidfds, *watch.pipes}:
                return
            if watch.channel.fileno() in ready:
                message = watch.channel.receive(0)
                if watch.channel.closed or (message is not None and message["op"] == "end"):
                    return
                if message is not None and message["op"] == "go":
                    self._let_go()
                elif message is not None and message["op"] == "vacate":
                    self._reap()  # so that no end of the old root is told after this
                    watch.channel.send(event="vacated")
                elif message is not None and message["op"] == "last-pid":
                    Path(_LAST_PID).write_text(str(message["pid"]))
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()


def _init(spec: dict[str, Any], watch: _Watch, supervisor: int) -> NoReturn:
    """Be pid 1 of the engine's namespaces; its end takes everything with it."""
    try:
        linux.set_parent_death_signal(signal.SIGKILL)
        watch.pidfds.append(supervisor)
        if not watch.over():  # a supervisor that died before the line above sends no signal
            _enter_namespaces(spec)
            watch.channel.send(event="namespaces")
            _Reaper(spec, watch).serve()
    except _SetupFailure as failure:
        _report(watch.channel, failure)
    finally:
        os._exit(0)


def _supervise_init(watch: _Watch, init: int) -> None:
    """Wait for init's end, or for the suite's, and then end init."""
    fd = os.pidfd_open(init)
    watch.wait(fd)
    linux.kill_pidfd(fd)
    os.waitpid(init, 0)


def _report(channel: Channel, failure: _SetupFailure) -> None:
    channel.send(event="error", stage=failure.stage, message=str(failure.error))


def _run_isolated(spec: dict[str, Any], watch: _Watch) -> None:
    with _stage("pid namespace"):
        linux.unshare(linux.CLONE_NEWPID)
    own = os.pidfd_open(os.getpid())
    init = os.fork()
    if init == 0:
        _init(spec, watch, own)
    watch.channel.send(event="init", pid=init)
    # Only init speaks and listens from here on, so that the stream's end is init's end.
    watch.channel.close()
    _supervise_init(watch, init)


def _run_plain(spec: dict[str, Any], watch: _Watch) -> None:
    with _stage("subreaper"):
        linux.become_subreaper()
    try:
        if spec["extra_tmp"]:
            with _stage("temporary folder"):
                Path(spec["extra_tmp"]).mkdir(mode=0o700)
        _Reaper(spec, watch).serve()
    finally:
        linux.kill_descendants()
        if spec["extra_tmp"]:
            shutil.rmtree(spec["extra_tmp"], ignore_errors=True)


def main() -> None:
    """Run with the descriptors of channel, the suite's pidfd and the death pipe as arguments."""
    control, suite, death = (int(word) for word in sys.argv[-3:])
    for fd in (control, suite, death):
        os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=control))
    watch = _Watch(channel, suite)
    watch.pipes.append(death)
    watch.wait(control)
    spec = None if watch.over() else channel.receive(None)
    if spec is None:
        return
    try:
        if spec["isolate"]:
            _run_isolated(spec, watch)
        else:
            _run_plain(spec, watch)
    except _SetupFailure as failure:
        _report(channel, failure)
