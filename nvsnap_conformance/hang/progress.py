"""Cheap signs of progress: the engine's own counters, or what the kernel counts for its ranks.

CPU time is none of them: vLLM's all-reduce on CPU and every spinning wait burn a full core while they wait.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import httpx

from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.hang import procfs
from nvsnap_conformance.hang.model import Member, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNTERS = (
    # vLLM 0.24 to 0.33: v1/metrics/loggers.py; SGLang 0.5: srt/observability or srt/metrics.
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:prompt_tokens_total",
)
PENDING = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
_SAMPLE = re.compile(
    rb"^(" + b"|".join(re.escape(n).encode() for n in (*COUNTERS, *PENDING)) + rb")(?:\{[^\n]*\})? ([^ \n]+)",
    re.MULTILINE,
)
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Poll:
    """One look: a counter that grows with progress, and whether work is pending (``None``: not known)."""

    at: float
    counter: float
    pending: bool | None


class Progress(Protocol):
    """A source of progress."""

    name: str

    def poll(self) -> Poll | None:
        """Look once; ``None`` where the source does not answer."""


def parse_metrics(text: bytes, at: float) -> Poll | None:
    """Read the counters of a metrics page in Prometheus' text format; ``None`` where none is known."""
    counter, pending, known = 0.0, 0.0, False
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if name.decode() in PENDING:
            pending += number
        else:
            counter += number
            known = True
    return Poll(at, counter, pending > 0) if known else None


class Metrics:
    """The engine's metrics page, read from inside the network namespace of ``pid``.

    Raises :class:`EnvironmentFailure` where that namespace cannot be entered.
    """

    def __init__(self, url: str, pid: int | None = None, *, seconds: float = 2.0) -> None:
        self.name = url
        self._url = url
        # One thread of its own: it alone changes its network namespace.
        self._pool = ThreadPoolExecutor(1)
        try:
            self._pool.submit(_enter_network, pid).result()
        except EnvironmentFailure:
            self._pool.shutdown()
            raise
        self._client = httpx.Client(timeout=seconds)

    def poll(self) -> Poll | None:
        """Fetch and read the page; ``None`` while the front does not answer."""
        future: Future[Poll | None] = self._pool.submit(self._fetch)
        return future.result()

    def close(self) -> None:
        """End the reader's thread and its connection."""
        self._client.close()
        self._pool.shutdown()

    def _fetch(self) -> Poll | None:
        try:
            answer = self._client.get(self._url)
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
        return parse_metrics(answer.content, time.monotonic()) if answer.status_code == 200 else None


class KernelCounters:
    """What the kernel counts for the ranks: memory touched, bytes read, children at work.

    A rank that waits, sleeping or spinning, touches nothing new; loading, compiling and computing do. The
    counter is in units of what a standing process may have per second, so that it grows by less than one.
    """

    name = "kernel counters of the ranks"

    FAULTS = 20.0
    BYTES = 65536.0
    CHILD_SECONDS = 0.05

    def __init__(self, members: Sequence[Member]) -> None:
        self._pids = [m.pid for m in members if m.role is Role.RANK]

    def poll(self) -> Poll | None:
        """Read /proc of every rank; ``None`` once all are gone."""
        table = procfs.CpuTable()
        total, alive = 0.0, False
        for pid in self._pids:
            fields = procfs.stat_fields(procfs.read_text(pid, "stat"))
            if len(fields) < 15:
                continue
            alive = True
            faults = int(fields[7]) + int(fields[9])
            children = max(0.0, table.tree_seconds(pid) - table.own_seconds(pid))
            total += faults / self.FAULTS + children / self.CHILD_SECONDS
            total += procfs.bytes_read(pid) / self.BYTES
        return Poll(time.monotonic(), total, None) if alive else None


def find_metrics(pids: Sequence[int]) -> str | None:
    """Return the URL of the metrics page that one of ``pids`` serves on the loopback, ``None`` for none.

    Looks at the listening TCP sockets of these processes, in the network namespace of the first one.
    """
    for port in listening_ports(pids):
        url = f"http://127.0.0.1:{port}/metrics"
        source = Metrics(url, pids[0], seconds=1.0)
        try:
            if source.poll() is not None:
                return url
        finally:
            source.close()
    return None


def listening_ports(pids: Sequence[int]) -> list[int]:
    """Return the TCP ports on which ``pids`` listen, ascending."""
    inodes = set()
    for pid in pids:
        folder = Path(f"/proc/{pid}/fd")
        try:
            entries = list(folder.iterdir())
        except OSError:
            continue
        for entry in entries:
            try:
                target = os.readlink(entry)  # noqa: PTH115 - the target is a name, not a path
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = set()
    for name in ("net/tcp", "net/tcp6"):
        for line in procfs.read_text(pids[0], name).splitlines()[1:] if pids else ():
            fields = line.split()
            # State 0A is LISTEN; the tenth field is the socket's inode.
            if len(fields) > 9 and fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def _enter_network(pid: int | None) -> None:
    """Move this thread into the network namespace of ``pid``, unless it is there already."""
    if pid is None:
        return
    path = f"/proc/{pid}/ns/net"
    try:
        same = os.stat(path).st_ino == os.stat("/proc/thread-self/ns/net").st_ino  # noqa: PTH116
        if same:
            return
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot look into the network namespace of pid {pid}: {error.strerror}",
            next_step="run as root, or give --metrics none",
        ) from error
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise EnvironmentFailure(
                f"cannot enter the network namespace of pid {pid}: {os.strerror(code)}",
                cause="CAP_SYS_ADMIN is missing",
                next_step="run as root, or give --metrics none",
            )
    finally:
        os.close(descriptor)
