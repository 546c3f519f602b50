"""The data of a hang observation: who was sampled, when, and what was seen.

Everything here is plain data: a bundle on disk is exactly this, and a verdict is a function of it alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """What a process is to its engine."""

    RANK = "rank"
    CORE = "engine-core"
    FRONT = "front"
    HELPER = "helper"


class Rung(StrEnum):
    """How a sample was taken: the rung of the ladder that answered."""

    NATIVE = "py-spy native"
    BLOCKING = "py-spy"
    NONBLOCKING = "py-spy nonblocking"
    PROC = "proc"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. ``file`` is relative to its package; ``line`` is 0 for a native frame."""

    name: str
    file: str
    line: int = 0
    native: bool = False
    locals: dict[str, str] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})" if self.line else f"{self.name} ({self.file})"


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread's stack, outermost frame first. ``tid`` is in the target's own pid namespace."""

    tid: int
    name: str
    frames: tuple[Frame, ...]
    main: bool = False
    active: bool = False
    owns_gil: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """What the kernel says of a process at one moment.

    ``state`` is the letter of /proc/PID/stat, ``tracer`` the pid that traces it (0: none), ``wchan`` where
    its main thread sleeps. ``cpu_seconds`` counts the process, ``tree_cpu_seconds`` its descendants too.
    ``switches`` are the voluntary context switches of the main thread, ``faults`` its process' page faults,
    ``read_bytes`` what it read through system calls (-1: not readable). ``queued_seconds`` is how long its
    threads, all together, were runnable and had no core (-1: not readable), ``tree_runnable`` how many of its
    descendants had a core or waited for one.
    """

    state: str
    tracer: int = 0
    wchan: str = ""
    cpu_seconds: float = 0.0
    tree_cpu_seconds: float = 0.0
    switches: int = 0
    faults: int = 0
    read_bytes: int = -1
    thread_states: str = ""
    kernel_stack: tuple[str, ...] = ()
    queued_seconds: float = -1.0
    tree_runnable: int = 0

    @property
    def runnable(self) -> bool:
        """Whether one of its threads has a core or waits for one."""
        return "R" in (self.thread_states or self.state)


@dataclass(frozen=True, slots=True)
class Sample:
    """One process in one round. ``at`` is seconds since the bundle began; problems are in words."""

    pid: int
    at: float
    rung: Rung
    reading: Reading | None = None
    threads: tuple[Thread, ...] = ()
    problems: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def torn(self) -> bool:
        """Whether the stack was read while the process ran, so that it may mix two moments."""
        return self.rung is Rung.NONBLOCKING and not (self.reading and self.reading.state in "Tt")


@dataclass(frozen=True, slots=True)
class Round:
    """All processes at (about) one moment.

    ``recording`` is the ``taken_at`` of the bundle that it belongs to; empty where it was not kept.
    """

    index: int
    native: bool
    samples: tuple[Sample, ...]
    recording: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the engine: identity, role and rank, and from which source the rank is known.

    ``groups`` holds the rank's coordinates, e.g. ``{"tp": 3, "pp": 0}``, where the source tells them.
    ``namespace_pid`` is the pid in the innermost pid namespace.
    """

    pid: int
    create_time: float
    role: Role
    rank: int | None = None
    source: str = ""
    title: str = ""
    namespace_pid: int = 0
    gpu: str | None = None
    groups: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Everything that a verdict is made of. ``world_size`` is ``None`` where nothing tells it.

    ``evidence`` holds what corroborates, by source: ``flight_recorder``, ``nccl_ras``, ``nvml``,
    ``progress``. ``problems`` says in words what could not be collected.
    """

    suite: str
    taken_at: str
    reason: str
    world_size: int | None
    members: tuple[Member, ...]
    rounds: tuple[Round, ...]
    problems: tuple[str, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[Member, ...]:
        """The members that are ranks, rank 0 first."""
        ranks = [m for m in self.members if m.role is Role.RANK and m.rank is not None]
        return tuple(sorted(ranks, key=lambda m: (m.rank or 0, m.pid)))
