"""The GPUs that this process may use, by UUID, and leases of them that concurrent runs respect.

Through NVML (nvidia-ml-py, the extra ``gpu``), which makes no CUDA context. NVML gives pids as the host's
first pid namespace has them, which need not be the suite's own; so nothing here goes by pid.
"""

from __future__ import annotations

import itertools
import json
import os
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SIZES = (1, 2, 4, 8)
"""The tensor-parallel sizes at which an engine is run where there are GPUs for them."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

IDLE_BYTES = 1 << 30
"""A GPU without a process that uses more memory than this (bytes) is not idle: somebody's leak is on it."""

TOLERANCE_BYTES = 64 << 20
"""How much more than at its start a GPU may use after a lease, in bytes: the driver's own bookkeeping."""

SETTLE_SECONDS = 20.0
"""Allowance for the memory of ended processes to come back, in seconds; it takes under two."""

REFUSED_DRIVERS = {
    "595.71.05": "killing a restored process hangs the host (NVIDIA/cuda-checkpoint issue 53)",
}
"""Driver versions on which no GPU is touched, and why."""

_P2P_READ = 0  # nvml.h: NVML_P2P_CAPS_INDEX_READ
_P2P_OK = 0  # nvml.h: NVML_P2P_STATUS_OK


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of it. ``index`` is NVML's, ``None`` for an instance."""

    uuid: str
    index: int | None
    name: str
    memory: int = 0

    @property
    def selector(self) -> str:
        """What to write into CUDA_VISIBLE_DEVICES, where CUDA_DEVICE_ORDER is PCI_BUS_ID.

        A number wherever there is one: vLLM reads the variable's entries as numbers.
        """
        return self.uuid if self.index is None else str(self.index)


@dataclass(frozen=True)
class Use:
    """What is on a GPU now: bytes of memory in use and the number of processes with a context."""

    used: int
    processes: int


@dataclass(frozen=True)
class Visible:
    """The GPUs within the caller's CUDA_VISIBLE_DEVICES, in its order; ``why_none`` where there are none."""

    gpus: tuple[Gpu, ...]
    driver: str | None = None
    why_none: str = ""


def sizes_for(count: int) -> tuple[int, ...]:
    """Return the sizes for ``count`` GPUs; 1 also where there is none, so that a target has a size."""
    return tuple(size for size in SIZES if size <= max(1, count))


def count_visible() -> int:
    """Return how many GPUs this process may use, 0 where NVML or a driver is missing."""
    return len(visible().gpus)


class Nvml:
    """NVML for as long as this context lasts. ``module`` is ``pynvml``, or what stands for it in tests."""

    def __init__(self, module: Any | None = None) -> None:
        self._given = module
        self._module: Any = None

    def __enter__(self) -> Nvml:
        """Initialise NVML; raise :class:`EnvironmentFailure` where it or a driver is missing."""
        module = self._given or load_pynvml()
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            raise EnvironmentFailure(
                f"GPUs cannot be looked at: NVML answers {error}",
                cause="there is no NVIDIA driver here, or the container has none of the host's GPUs",
                next_step="see whether `nvidia-smi` answers",
            ) from error
        self._module = module
        return self

    def __exit__(self, *_: object) -> None:
        self._module.nvmlShutdown()

    def driver(self) -> str:
        """Return the driver's version."""
        return _text(self._module.nvmlSystemGetDriverVersion())

    def all_gpus(self) -> list[Gpu]:
        """Return every GPU that the driver shows here."""
        nvml = self._module
        return [
            self._gpu(nvml.nvmlDeviceGetHandleByIndex(index), index)
            for index in range(nvml.nvmlDeviceGetCount())
        ]

    def instance(self, name: str) -> Gpu | None:
        """Return the MIG instance called ``name`` (``MIG-…``), ``None`` where there is none."""
        try:
            return self._gpu(self._module.nvmlDeviceGetHandleByUUID(name), None)
        except self._module.NVMLError:
            return None

    def use(self, gpu: Gpu) -> Use:
        """Return what is on a GPU now."""
        nvml = self._module
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        processes = 0
        with suppress(nvml.NVMLError):  # not offered for every kind of device
            processes = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return Use(int(nvml.nvmlDeviceGetMemoryInfo(handle).used), processes)

    def peers(self, one: Gpu, other: Gpu) -> bool:
        """Whether each of two GPUs reads the other's memory."""
        nvml = self._module
        handles = [nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in (one, other)]
        try:
            return all(
                nvml.nvmlDeviceGetP2PStatus(left, right, _P2P_READ) == _P2P_OK
                for left, right in (handles, reversed(handles))
            )
        except nvml.NVMLError:
            return False

    def _gpu(self, handle: Any, index: int | None) -> Gpu:
        nvml = self._module
        return Gpu(
            _text(nvml.nvmlDeviceGetUUID(handle)),
            index,
            _text(nvml.nvmlDeviceGetName(handle)),
            int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        )


def load_pynvml() -> Any:
    """Return nvidia-ml-py's module; raise :class:`EnvironmentFailure` where it is not installed."""
    try:
        import pynvml  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise EnvironmentFailure(
            "GPUs cannot be looked at: nvidia-ml-py is not installed",
            next_step="pip install 'nvsnap-conformance[gpu]'",
        ) from None
    return pynvml


def visible(module: Any | None = None, *, setting: str | None = None) -> Visible:
    """Return the GPUs within CUDA_VISIBLE_DEVICES (``setting`` in its place); never raises.

    Entries are numbers, UUIDs (also their first characters) or MIG names. As in CUDA, an entry that names
    nothing ends the list, and an empty variable leaves nothing.
    """
    if setting is None:
        setting = os.environ.get(VISIBLE)
    try:
        with Nvml(module) as nvml:
            chosen, why = _chosen(nvml, setting)
            return Visible(tuple(chosen), nvml.driver(), "" if chosen else why)
    except EnvironmentFailure as failure:
        return Visible((), None, failure.what)


def _chosen(nvml: Nvml, setting: str | None) -> tuple[list[Gpu], str]:
    """Return the GPUs that a setting leaves, and why there are none."""
    every = nvml.all_gpus()
    if setting is None:
        return every, "the driver shows no GPU here"
    found: list[Gpu] = []
    for entry in (word.strip() for word in setting.split(",")):
        one = _named(nvml, every, entry)
        if one is None or one in found:
            return found, f"{VISIBLE}={setting!r} leaves none of the {len(every)} GPUs"
        found.append(one)
    return found, ""


def _named(nvml: Nvml, every: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.startswith("MIG-"):
        return nvml.instance(entry)
    if entry.startswith("GPU-"):
        matching = [gpu for gpu in every if gpu.uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    return every[int(entry)] if entry.isdecimal() and int(entry) < len(every) else None


def memory_in_use(gpus: Sequence[Gpu], module: Any | None = None) -> int:
    """Return the bytes in use on all of ``gpus``; raise :class:`EnvironmentFailure` where NVML is missing."""
    with Nvml(module) as nvml:
        return sum(nvml.use(gpu).used for gpu in gpus)


def require_driver(version: str | None) -> None:
    """Raise :class:`EnvironmentFailure` for a driver on which no GPU must be touched."""
    reason = REFUSED_DRIVERS.get(version or "")
    if reason is not None:
        raise EnvironmentFailure(
            f"driver {version} is refused: {reason}", next_step="install another driver version"
        )


# Leases -------------------------------------------------------------------------------------------


@dataclass
class Lease:
    """GPUs that are this run's until :meth:`release`, or until the process that holds them ends.

    ``baseline`` is the memory in use on each when it was taken, in bytes by UUID; ``blind`` the pairs of
    UUIDs of which one does not read the other's memory.
    """

    gpus: tuple[Gpu, ...]
    baseline: dict[str, int]
    _locks: list[FileLock] = field(repr=False)
    _folder: Path = field(repr=False)
    _module: Any | None = field(repr=False, default=None)
    blind: tuple[tuple[str, str], ...] = ()

    @property
    def setting(self) -> str:
        """What the engine's CUDA_VISIBLE_DEVICES has to be."""
        return ",".join(gpu.selector for gpu in self.gpus)

    def release(self, deadline: Deadline | None = None) -> list[str]:
        """Give the GPUs back; return a text for each whose memory did not come back in time.

        That is noted, and the next lease refuses the GPU for as long as it is so.
        """
        left: list[str] = []
        try:
            with Nvml(self._module) as nvml:
                left = self._left_over(nvml, deadline or Deadline.after(SETTLE_SECONDS))
        except EnvironmentFailure as failure:  # a driver that has gone meanwhile
            left.append(failure.what)
        finally:
            for lock in self._locks:
                lock.release()
        return left

    def _left_over(self, nvml: Nvml, deadline: Deadline) -> list[str]:
        def over() -> list[tuple[Gpu, int]]:
            used = [(gpu, nvml.use(gpu).used) for gpu in self.gpus]
            return [(gpu, now) for gpu, now in used if now > self.baseline[gpu.uuid] + TOLERANCE_BYTES]

        with suppress(DeadlineExceeded):
            wait_for("the GPUs' memory to come back", lambda: not over(), deadline, interval=0.1)
        dirty = {gpu.uuid: now for gpu, now in over()}
        texts: list[str] = []
        for gpu in self.gpus:
            note = self._folder / f"{gpu.uuid}.json"
            if gpu.uuid in dirty:
                note.write_text(json.dumps({"baseline": self.baseline[gpu.uuid], "used": dirty[gpu.uuid]}))
                texts.append(
                    f"{gpu.uuid} uses {dirty[gpu.uuid] >> 20} MiB after a lease, "
                    f"{self.baseline[gpu.uuid] >> 20} MiB before it"
                )
            else:
                note.unlink(missing_ok=True)
        return texts


def lease(count: int, deadline: Deadline, *, module: Any | None = None, folder: Path | None = None) -> Lease:
    """Take ``count`` idle GPUs out of those that are visible: all of them, or none.

    Waits while other workers and runs of this user hold them. Raises :class:`EnvironmentFailure` where there
    are too few that are idle, naming what is on the others, and :class:`DeadlineExceeded`.
    """
    seen = visible(module)
    require_driver(seen.driver)
    if len(seen.gpus) < count:
        raise EnvironmentFailure(
            f"{count} GPUs are needed, {len(seen.gpus)} can be used here",
            cause=seen.why_none or f"{VISIBLE} is {os.environ.get(VISIBLE)!r}",
            next_step=f"choose a smaller tensor-parallel size, or make more GPUs visible with {VISIBLE}",
        )
    place = folder or cache_dir("gpus")
    refused: dict[str, str] = {}

    def attempt() -> Lease | None:
        with ExitStack() as undo, Nvml(module) as nvml:
            taken: list[tuple[Gpu, FileLock, int]] = []
            held = 0
            refused.clear()
            for gpu in seen.gpus:
                if len(taken) == count:
                    break
                lock = FileLock(place / f"{gpu.uuid}.lock")
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    held += 1
                    continue
                undo.callback(lock.release)
                why, used = why_unfit(nvml, gpu, place)
                if why:
                    refused[gpu.uuid] = why
                    lock.release()
                    continue
                taken.append((gpu, lock, used))
            if len(taken) == count:
                pairs = itertools.combinations([gpu for gpu, _, _ in taken], 2)
                blind = tuple((one.uuid, other.uuid) for one, other in pairs if not nvml.peers(one, other))
                undo.pop_all()
                return Lease(
                    tuple(gpu for gpu, _, _ in taken),
                    {gpu.uuid: used for gpu, _, used in taken},
                    [lock for _, lock, _ in taken],
                    place,
                    module,
                    blind,
                )
            if len(taken) + held < count:
                raise EnvironmentFailure(
                    f"{count} idle GPUs are needed, and {len(refused)} of {len(seen.gpus)} are not idle",
                    cause="; ".join(refused.values()),
                    next_step="end what is on them (see `nvidia-smi`), or choose others with " + VISIBLE,
                )
        return None

    return wait_for(
        f"{count} GPUs that other runs give back", attempt, deadline, interval=0.2, detail=lambda: str(place)
    )


def why_unfit(nvml: Nvml, gpu: Gpu, place: Path) -> tuple[str, int]:
    """Return why a GPU cannot be leased (empty: it can), and the bytes in use on it.

    ``place`` is the folder with the notes that leases leave of memory which has not come back.
    """
    now = nvml.use(gpu)
    with suppress(OSError, ValueError, KeyError):
        note = json.loads((place / f"{gpu.uuid}.json").read_text())
        if now.used > note["baseline"] + TOLERANCE_BYTES:
            return (
                f"{gpu.uuid}: the memory of an earlier run has not come back ({now.used >> 20} MiB in use, "
                f"{note['baseline'] >> 20} MiB before that run)"
            ), now.used
    if now.processes:
        return f"{gpu.uuid}: {now.processes} processes use it", now.used
    if now.used > IDLE_BYTES:
        return f"{gpu.uuid}: {now.used >> 20} MiB are in use, by no process that NVML knows", now.used
    return "", now.used


@contextmanager
def leased(count: int, deadline: Deadline) -> Iterator[Lease]:
    """Hold ``count`` GPUs for a block; see :func:`lease`."""
    held = lease(count, deadline)
    try:
        yield held
    finally:
        held.release()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
