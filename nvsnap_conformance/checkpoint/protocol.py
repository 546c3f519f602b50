"""What a checkpointer offers. Two layers compose: *device* (GPU state) and *host* (the processes)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.checkpoint.device_failure import Fate
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.process import EngineProcess
    from nvsnap_conformance.processes import ProcessId


@dataclass(frozen=True)
class ProcessState:
    """One process as read back from the kernel. ``state`` is the letter of /proc/PID/stat.

    ``threads`` maps each thread id to its own state letter; a process counts as stopped only when every
    thread is.
    """

    process: ProcessId
    state: str
    threads: dict[int, str] = field(default_factory=dict)

    @property
    def stopped(self) -> bool:
        """Whether every thread of the process is stopped (``T``) or traced (``t``)."""
        return bool(self.threads) and all(letter in "Tt" for letter in self.threads.values())


@dataclass(frozen=True)
class CheckpointResult:
    """What one verb of a checkpointer did: the states read back after it, and details for the record."""

    verb: str
    seconds: float
    states: tuple[ProcessState, ...]
    details: dict[str, Any] = field(default_factory=dict)


class HostCheckpointer(Protocol):
    """The host layer: takes the engine's process tree away and brings it back."""

    name: str
    replaces_processes: bool
    """Whether ``load`` makes new processes (criu) or continues the old ones (freeze)."""

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Checkpoint the whole tree into ``folder``; a failed dump leaves the engine running."""

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Bring the tree back."""


class DeviceCheckpointer(Protocol):
    """The device layer: all pids are locked before any is checkpointed, all restored before any unlock.

    ``pids`` are all processes of the engine, in the suite's own pid namespace; the checkpointer says which of
    them take part. ``details["calls"]`` of each result lists one entry for each of these: ``pid`` and the
    span ``began`` to ``ended`` on the monotonic clock. A verb that fails raises
    :class:`nvsnap_conformance.checkpoint.device_failure.DeviceFailure`, after a roll-back.
    """

    name: str

    def lock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Lock the device state of every pid."""

    def checkpoint(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Move the device state of every pid to host memory."""

    def restore(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Move it back."""

    def unlock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Let every pid run on."""

    def abandon(self) -> Fate | None:
        """Roll back what was begun, where another layer failed in between; ``None`` where nothing was."""
