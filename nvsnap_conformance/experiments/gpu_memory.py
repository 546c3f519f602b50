"""GPU memory as NVML has it, of an engine's ranks and of whole devices. All in bytes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.gpus import SETTLE_SECONDS, TOLERANCE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BY_PROCESS = "NVML, by process"
BY_DEVICE = "NVML, by device, less what was used before"


class GpuMemory(Protocol):
    """Reads GPU memory. ``source`` says how, or why it cannot be told."""

    source: str

    def of_ranks(self, pids: Sequence[int]) -> list[int | None]:
        """Return what each rank holds, by the pids of all ranks; ``None`` where it cannot be told."""

    def of_devices(self) -> dict[str, int] | None:
        """Return what is used on each device by its UUID, ``None`` where that cannot be told."""


class NvmlMemory:
    """Reads through ``nvml`` (the module pynvml, initialised) on the devices ``uuids``, rank 0's first.

    NVML may give pids as another pid namespace has them. So it is believed about processes only once it has
    listed every rank; where it never does, a rank's memory is that of its device, if ``exclusive`` says that
    no other engine is on it.
    """

    def __init__(self, nvml: Any, uuids: Sequence[str], *, exclusive: bool) -> None:
        self._nvml = nvml
        self._devices = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
        self._baseline = self.of_devices() if exclusive else None
        self._known: set[int] = set()
        self.source = "not told: NVML lists no process of these engines"

    def of_ranks(self, pids: Sequence[int]) -> list[int | None]:
        """Return what each rank holds."""
        held = self._listed()
        if all(held.get(pid) is not None for pid in pids):
            self._known |= set(pids)
        if set(pids) <= self._known:
            self.source = BY_PROCESS
            # What was listed once, and is not any more, has no context and holds nothing.
            return [held.get(pid, 0) for pid in pids]
        now = self.of_devices() if self._baseline is not None else None
        if self._baseline is None or now is None or len(now) != len(pids):
            return [None] * len(pids)
        self.source = BY_DEVICE
        return [now[uuid] - self._baseline[uuid] for uuid in self._devices]

    def of_devices(self) -> dict[str, int] | None:
        """Return what is used on each device; ``None`` where NVML does not say, as of a GPU that is lost."""
        try:
            return {
                uuid: int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
                for uuid, handle in self._devices.items()
            }
        except self._nvml.NVMLError:
            return None

    def _listed(self) -> dict[int, int | None]:
        """Return what NVML says of each process on all devices, ``None`` where it gives no number."""
        held: dict[int, int | None] = {}
        for handle in self._devices.values():
            with suppress(self._nvml.NVMLError):  # not offered for every kind of device
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    sofar, used = held.get(process.pid, 0), process.usedGpuMemory
                    held[process.pid] = None if used is None or sofar is None else sofar + int(used)
        return held


def settled(memory: GpuMemory, baseline: Mapping[str, int] | None) -> tuple[bool | None, str]:
    """Wait until every device is back at ``baseline``; return whether it is, and what is to be said.

    ``None`` where that cannot be told. A device is back within :data:`gpus.TOLERANCE_BYTES`.
    """
    if baseline is None:
        return None, memory.source

    if memory.of_devices() is None:
        return None, "NVML does not say any more what is used"

    def over() -> dict[str, int]:
        now = memory.of_devices() or {}
        return {
            uuid: used - baseline[uuid]
            for uuid, used in now.items()
            if uuid in baseline and used > baseline[uuid] + TOLERANCE_BYTES
        }

    with suppress(DeadlineExceeded):
        wait_for("the GPU memory to come back", lambda: not over(), Deadline.after(SETTLE_SECONDS))
        return True, "back at the baseline"
    left = ", ".join(f"{uuid} has {extra >> 20} MiB more" for uuid, extra in over().items())
    return False, f"not back at the baseline after {SETTLE_SECONDS:.0f} s: {left or 'only just now'}"
