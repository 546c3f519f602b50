"""Which right is missing to read the stacks of a process, and what to set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.hang import procfs

if TYPE_CHECKING:
    from collections.abc import Iterable

CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21

_CONTAINER = (
    "in a container: docker run --cap-add SYS_PTRACE, or securityContext.capabilities.add: [SYS_PTRACE] "
    "for the container that runs the suite"
)


def capable(capability: int) -> bool:
    """Whether this process has ``capability`` in its effective set."""
    for line in procfs.read_text(os.getpid(), "status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def ptrace_scope() -> int:
    """Return the Yama ptrace scope, 0 where the kernel has no Yama."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def problem(pid: int) -> tuple[str, str] | None:
    """Return what forbids to sample ``pid`` and what to set, ``None`` where nothing does.

    A process that is gone is no matter of rights.
    """
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    if not capable(CAP_SYS_PTRACE):
        if owner != os.geteuid():
            return (
                f"no right to trace pid {pid} of user {owner}: CAP_SYS_PTRACE is missing",
                f"run as root or as user {owner}; {_CONTAINER}",
            )
        if ptrace_scope() > 0:
            return (
                (
                    f"no right to trace pid {pid}: kernel.yama.ptrace_scope is {ptrace_scope()} and "
                    "CAP_SYS_PTRACE is missing"
                ),
                f"sysctl kernel.yama.ptrace_scope=0, or run as root; {_CONTAINER}",
            )
    elif ptrace_scope() >= 3:
        return (
            f"no right to trace pid {pid}: kernel.yama.ptrace_scope is 3, which forbids it to everybody",
            "boot the host with another kernel.yama.ptrace_scope: 3 cannot be undone at run time",
        )
    ours, theirs = procfs.namespaces(os.getpid()), procfs.namespaces(pid)
    if all(theirs) and ours[:2] != theirs[:2] and not capable(CAP_SYS_ADMIN):
        return (
            f"no right to enter the namespaces of pid {pid}: CAP_SYS_ADMIN is missing",
            "run the suite inside the target's container, or as root on the host",
        )
    return None


def problems(pids: Iterable[int]) -> tuple[str, ...]:
    """Return the distinct problems with ``pids``, each in one sentence with what to do."""
    found: dict[str, str] = {}
    for pid in pids:
        trouble = problem(pid)
        if trouble:
            found.setdefault(trouble[1], f"{trouble[0]} ({trouble[1]})")
    return tuple(found.values())


def require(pids: Iterable[int]) -> None:
    """Raise :class:`EnvironmentFailure` naming the missing right, unless every pid may be sampled."""
    for pid in pids:
        trouble = problem(pid)
        if trouble:
            raise EnvironmentFailure(trouble[0], next_step=trouble[1])
