"""What /proc says of a process: always available, never stops it, and never fails with an exception."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from nvsnap_conformance.hang.model import Reading

_TICK = os.sysconf("SC_CLK_TCK")
_NAMESPACES = ("pid", "mnt", "user")


def read_text(pid: int, name: str) -> str:
    """Return ``/proc/PID/NAME``, an empty text where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def stat_fields(text: str) -> list[str]:
    """Return the fields of a stat line from the state on (field 3), whatever the command's name holds."""
    return text.rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """Return the state letter of ``pid``, an empty text where there is no such process."""
    fields = stat_fields(read_text(pid, "stat"))
    return fields[0] if fields else ""


def namespace_pid(pid: int) -> int:
    """Return the pid that ``pid`` has in its innermost pid namespace."""
    for line in read_text(pid, "status").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def leader(pid: int) -> int:
    """Return the process that ``pid`` is a thread of: ``pid`` itself for a process, or where none is told."""
    for line in read_text(pid, "status").splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return pid


def namespaces(pid: int) -> tuple[str, ...]:
    """Return the identities of the pid, mount and user namespace of ``pid`` (empty texts: not readable)."""
    found = []
    for name in _NAMESPACES:
        try:
            found.append(os.readlink(f"/proc/{pid}/ns/{name}"))  # noqa: PTH115 - no file of that name exists
        except OSError:
            found.append("")
    return tuple(found)


class CpuTable:
    """CPU seconds and states of all processes of the machine, read once, so that a tree's sum costs no more.

    Compilation and loading run in children of a rank: a rank that only waits for them is at work.
    """

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._runnable: set[int] = set()
        self._children: dict[int, list[int]] = defaultdict(list)
        for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of names, no more
            if not entry.isdigit():
                continue
            pid = int(entry)
            fields = stat_fields(read_text(pid, "stat"))
            if len(fields) < 15:
                continue
            # utime, stime and those of the children that were waited for
            self._own[pid] = (int(fields[11]) + int(fields[12])) / _TICK
            self._seconds[pid] = sum(int(f) for f in fields[11:15]) / _TICK
            self._children[int(fields[1])].append(pid)
            if fields[0] == "R":
                self._runnable.add(pid)

    def own_seconds(self, pid: int) -> float:
        """Return the CPU seconds of ``pid`` alone, 0 where it is gone."""
        return self._own.get(pid, 0.0)

    def tree_seconds(self, pid: int) -> float:
        """Return the CPU seconds of ``pid`` and all its living descendants."""
        return sum(self._seconds.get(one, 0.0) for one in self._tree(pid))

    def tree_runnable(self, pid: int) -> int:
        """Return how many living descendants of ``pid`` have a core or wait for one (state R)."""
        return len(self._runnable & (self._tree(pid) - {pid}))

    def _tree(self, pid: int) -> set[int]:
        todo, seen = [pid], set()
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo.extend(self._children.get(one, ()))
        return seen


def read(pid: int, cpu: CpuTable | None = None) -> Reading | None:
    """Return what the kernel says of ``pid``, ``None`` once it is gone. What cannot be read is left out."""
    fields = stat_fields(read_text(pid, "stat"))
    if len(fields) < 15:
        return None
    status = dict(
        line.split(":", 1) for line in read_text(pid, "status").splitlines() if line.count(":") >= 1
    )

    def number(name: str) -> int:
        words = status.get(name, "").split()
        return int(words[0]) if words and words[0].isdigit() else 0

    stack = read_text(pid, f"task/{pid}/stack").splitlines()
    wchan = read_text(pid, "wchan").strip()
    own = (int(fields[11]) + int(fields[12])) / _TICK
    return Reading(
        state=fields[0],
        tracer=number("TracerPid"),
        wchan="" if wchan == "0" else wchan,
        cpu_seconds=own,
        tree_cpu_seconds=max(own, cpu.tree_seconds(pid)) if cpu else own,
        switches=number("voluntary_ctxt_switches"),
        faults=int(fields[7]) + int(fields[9]),
        read_bytes=bytes_read(pid),
        thread_states=_thread_states(pid),
        kernel_stack=tuple(line.partition("] ")[2] or line for line in stack),
        queued_seconds=queued_seconds(pid),
        tree_runnable=cpu.tree_runnable(pid) if cpu else 0,
    )


def bytes_read(pid: int) -> int:
    """Return the bytes that ``pid`` has read through system calls, -1 where that cannot be read."""
    for line in read_text(pid, "io").splitlines():
        name, _, value = line.partition(": ")
        if name == "rchar" and value.isdigit():
            return int(value)
    return -1


def queued_seconds(pid: int) -> float:
    """Return how long the living threads of ``pid`` waited on run queues, in seconds; -1: not readable.

    The second field of /proc/PID/task/TID/schedstat, in nanoseconds (Linux, Documentation/scheduler/
    sched-stats.rst); a kernel without CONFIG_SCHED_INFO has none.
    """
    total, readable = 0, False
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - as above
    except OSError:
        return -1.0
    for tid in threads:
        fields = read_text(pid, f"task/{tid}/schedstat").split()
        if len(fields) >= 2 and fields[1].isdigit():
            total += int(fields[1])
            readable = True
    return total / 1e9 if readable else -1.0


def _thread_states(pid: int) -> str:
    letters = []
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)  # noqa: PTH208 - as above
    except OSError:
        return ""
    for tid in threads:
        fields = stat_fields(read_text(pid, f"task/{tid}/stat"))
        if fields:
            letters.append(fields[0])
    return "".join(letters)
