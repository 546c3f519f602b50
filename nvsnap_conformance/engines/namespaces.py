"""Enter an engine's namespaces from the suite: threads for clients, programs for samplers.

Also starts the suite's own stdlib-only helper processes, which know the suite by a pidfd.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGKILL
from typing import IO, TYPE_CHECKING, TypeVar

import nvsnap_conformance
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import linux
from nvsnap_conformance.engines.channel import Channel
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.lifecycle.residue import RUN_ID, marked_processes, run_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

T = TypeVar("T")

_HELPER_ID = "NVSNAP_HELPER_ID"

ISOLATION = "NVS_ISOLATION"

# linux/capability.h: what a set of namespaces with its own mounts and loopback needs.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}


_TRY_SECONDS = 20.0

# What init does for an engine (supervisor.py), up to the program's start, in a child that ends at once.
_TRY = """
import ctypes, os, sys
sys.path.append(sys.argv[1])
ctypes.CDLL(None).prctl(1, 9)
from nvsnap_conformance.engines import linux, supervisor
try:
    linux.unshare(linux.CLONE_NEWPID)
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    supervisor.try_namespaces()
    os._exit(0)
except OSError as error:
    print(error, flush=True)
    os._exit(1)
"""


def isolation_gap() -> str | None:
    """Return what keeps this process from isolating an engine, ``None`` where nothing does.

    Tried once per process: a container's root may have every capability, and still be refused by a filter of
    system calls or a security module. ``NVS_ISOLATION=none`` forbids namespaces.
    """
    if os.environ.get(ISOLATION) == "none":
        return f"{ISOLATION}=none"
    return _missing_rights() or _refusal()


@functools.cache
def _refusal() -> str | None:
    """Make the namespaces of an engine in a child, and return why that failed."""
    root = Path(nvsnap_conformance.__file__).parents[1]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRY, str(root)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TRY_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"namespaces are not made within {_TRY_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    said = (done.stdout.strip() or done.stderr.strip())[-300:]
    return f"the kernel or the container refuses namespaces ({said or f'status {done.returncode}'})"


def _missing_rights() -> str | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
            return ", ".join(missing) or None
    return "CapEff is not in /proc/self/status"


def spawn_helper(
    module: str,
    extra: Sequence[int],
    *,
    marks: Mapping[str, str],
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start ``nvsnap_conformance.engines.MODULE`` in a session of its own, with a channel to it.

    ``marks`` is added to its environment. It gets the channel's other end, ``extra`` and a pidfd of this
    process as arguments, in the order that its ``main`` documents. All descriptors exist before the fork,
    so there is no moment at which this process's end would go unnoticed.
    """
    root = Path(nvsnap_conformance.__file__).parents[1]
    # The package's folder goes last on the path: its neighbours must not stand in for standard modules.
    code = (
        f"import sys; sys.path.append(sys.argv[1]); "
        f"from nvsnap_conformance.engines.{module} import main; main()"
    )
    ours, theirs = socket.socketpair()
    suite = os.pidfd_open(os.getpid())
    passed = (theirs.fileno(), suite, *extra)
    try:
        helper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, str(root), f"nvsnap-{module}", *map(str, passed)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd="/",
            env={RUN_ID: run_id(), **marks},
            start_new_session=True,
            pass_fds=passed,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(suite)
    return helper, Channel(ours)


def in_thread(namespace: int, flags: int, function: Callable[[], T]) -> T:
    """Call ``function`` in a thread that entered a namespace, and return its result.

    ``namespace`` is a descriptor of the namespace (its type being ``flags``) or a pidfd. Only network and
    IPC namespaces can be entered by one thread of many (setns(2)).
    """

    def entered() -> T:
        linux.setns(namespace, flags)
        return function()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(entered).result()


class NetworkThreads:
    """The thread pools of an engine's clients, which end with the engine.

    ``namespace`` is the network namespace's descriptor, ``None`` where the engine shares the suite's.
    """

    def __init__(self, namespace: int | None) -> None:
        self._namespace = namespace
        self._pools: list[ThreadPoolExecutor] = []
        self._lock = threading.Lock()

    def pool(self, workers: int) -> ThreadPoolExecutor:
        """Return a new pool whose threads are in the engine's network namespace."""
        pool = ThreadPoolExecutor(workers, "nvsnap-client", self._enter)
        with self._lock:
            self._pools.append(pool)
        return pool

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` once in the engine's network namespace."""
        if self._namespace is None:
            return function()
        return in_thread(self._namespace, linux.CLONE_NEWNET, function)

    def _enter(self) -> None:
        if self._namespace is not None:
            linux.setns(self._namespace, linux.CLONE_NEWNET)

    def close(self) -> None:
        """Let idle threads go and cancel what waits; a request under way ends with its connection."""
        with self._lock:
            pools, self._pools = self._pools, []
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def kill_marked(name: str, value: str, deadline: Deadline) -> None:
    """SIGKILL every process whose environment has ``name=value`` until there is none."""

    def none_left() -> bool:
        left = marked_processes(name, value)
        for process in left:
            process.send(SIGKILL)
        return not left

    wait_for(f"end of the processes with {name}={value}", none_left, deadline, interval=0.01)


def run_in(
    pidfd: int,
    argv: Sequence[str],
    *,
    namespaces: Collection[str],
    timeout: float,
    input: str | None = None,  # noqa: A002 - the name that subprocess uses
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
) -> subprocess.CompletedProcess[str]:
    """Run a program in the named namespaces of the process behind ``pidfd``; see ``run_inside``."""
    unknown = set(namespaces) - set(linux.NAMESPACES)
    if unknown or not argv:
        raise UsageError(
            f"cannot run {list(argv)} in namespaces {sorted(namespaces)}",
            next_step=f"give a program, and only namespaces out of {sorted(linux.NAMESPACES)}",
        )
    mark = uuid.uuid4().hex
    environment = {**(os.environ if env is None else env), RUN_ID: run_id(), _HELPER_ID: mark}
    deadline = Deadline.after(timeout)
    with ExitStack() as stack:
        # Files, not pipes: a pipe that a daemon inherited would never end.
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write((input or "").encode())
        given.seek(0)
        helper, channel = spawn_helper("enter", (pidfd,), marks={}, stdin=given, stdout=out, stderr=err)
        try:
            channel.send(
                argv=list(argv),
                env=environment,
                cwd=cwd,
                namespaces=sum(linux.NAMESPACES[name] for name in set(namespaces)),
            )
            message = channel.receive(timeout)
            timed_out = message is None and not channel.closed
        finally:
            channel.close()
            _end(helper)
            kill_marked(_HELPER_ID, mark, Deadline.after(10.0))
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if timed_out:
        raise DeadlineExceeded(
            f"{argv[0]} inside the engine's namespaces: killed after {deadline.budget:.1f} s",
            cause=texts[1][-2000:] or texts[0][-2000:],
        )
    if message is None or message["event"] != "exit":
        raise EnvironmentFailure(
            f"cannot run {argv[0]} inside the engine's namespaces",
            cause=message["message"] if message else f"the helper ended early: {texts[1][-2000:]}",
            next_step="check that the engine still runs, that the program exists, and that this is root",
        )
    return subprocess.CompletedProcess(list(argv), message["status"], *texts)


def _end(helper: subprocess.Popen[bytes]) -> None:
    """Wait for a helper whose channel is closed; it only has its program's session left to kill."""
    try:
        helper.wait(10.0)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            helper.kill()
        helper.wait()
