"""Plays ``cuCheckpointProcess*`` of the CUDA driver over files, for machines without a GPU.

Loaded by a helper process in place of ``cuda.bindings.driver``; standard library only. The folder that the
environment variable ``NVSNAP_STAND_IN_DRIVER`` names holds one file for each process that has "initialised
CUDA" (``PID.state``, its content a state's name), what it has on the device (``PID.memory``, ``PID.extra``;
while checkpointed ``PID.memory.saved`` and ``PID.extra.saved``), ``PID.mapped`` while it has memory of a peer
mapped (its checkpoint is refused then), the UUIDs of its devices (``PID.devices``), the bus id of the first
(``PID.bus``), the UUIDs of all devices (``devices.json``), the faults (``faults.json``: ``{"PID:verb":
fault}``) and the log of all calls as the driver saw them (``calls.jsonl``), which is what order is judged by.

Faults are the name of an error (state unchanged); ``HANG``; ``LOST`` (CUDA_ERROR_NOT_SUPPORTED, and no way
back, as measured on driver 580.159.04 for a live communicator at restore); ``IDLE`` (success, and nothing
done).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = "NVSNAP_STAND_IN_DRIVER"

_SAVED = ".saved"


class CUresult(IntEnum):
    """cuda.h: the errors that the calls can answer with."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801


class CUprocessState(IntEnum):
    """cuda.h: the states of a process."""

    CU_PROCESS_STATE_RUNNING = 0
    CU_PROCESS_STATE_LOCKED = 1
    CU_PROCESS_STATE_CHECKPOINTED = 2
    CU_PROCESS_STATE_FAILED = 3


RUNNING = CUprocessState.CU_PROCESS_STATE_RUNNING
LOCKED = CUprocessState.CU_PROCESS_STATE_LOCKED
CHECKPOINTED = CUprocessState.CU_PROCESS_STATE_CHECKPOINTED
FAILED = CUprocessState.CU_PROCESS_STATE_FAILED

_STEPS = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, CHECKPOINTED),
    "restore": (CHECKPOINTED, LOCKED),
    "unlock": (LOCKED, RUNNING),
}


class CUcheckpointLockArgs:
    """The arguments of a lock; ``timeoutMs`` in milliseconds."""

    timeoutMs = 0  # noqa: N815 - the driver's name


class CUcheckpointCheckpointArgs:
    """No arguments."""


class CUuuid:
    """The UUID of a device, 16 bytes."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(16)

    def getPtr(self) -> int:  # noqa: N802 - the name in cuda-bindings
        """Return the address of the bytes."""
        return ctypes.addressof(self._buffer)

    @property
    def bytes(self) -> bytes:
        """The bytes."""
        return self._buffer.raw


class CUcheckpointGpuPair:
    """The device that a process was checkpointed on, and the one that it is restored onto."""

    oldUuid: CUuuid  # noqa: N815 - the driver's names
    newUuid: CUuuid  # noqa: N815


class CUcheckpointRestoreArgs:
    """The arguments of a restore; without pairs a process is restored onto the devices that it was on."""

    gpuPairs: Sequence[CUcheckpointGpuPair] = ()  # noqa: N815 - the driver's names
    gpuPairsCount = 0  # noqa: N815


class CUcheckpointUnlockArgs:
    """No arguments."""


def cuInit(_flags: int) -> tuple[CUresult]:  # noqa: N802 - the driver's name, as all below
    """Succeed."""
    return (CUresult.CUDA_SUCCESS,)


def cuDriverGetVersion() -> tuple[CUresult, int]:  # noqa: N802
    """Return version 0: no driver."""
    return CUresult.CUDA_SUCCESS, 0


def cuCheckpointProcessGetState(pid: int) -> tuple[CUresult, CUprocessState | None]:  # noqa: N802
    """Return the state of a process, CUDA_ERROR_NOT_INITIALIZED for one without a file."""
    fault = _fault(pid, "state")
    if fault == "HANG":
        signal.pause()
    state = _state(pid)
    if state is None:
        return CUresult.CUDA_ERROR_NOT_INITIALIZED, None
    return CUresult.CUDA_SUCCESS, state


def cuCheckpointProcessGetRestoreThreadId(pid: int) -> tuple[CUresult, int]:  # noqa: N802
    """Return the process's first thread."""
    return CUresult.CUDA_SUCCESS, pid


def cuCheckpointProcessLock(pid: int, _arguments: CUcheckpointLockArgs) -> tuple[CUresult]:  # noqa: N802
    """Take a process from RUNNING to LOCKED."""
    return _step(pid, "lock")


def cuCheckpointProcessCheckpoint(pid: int, _arguments: Any) -> tuple[CUresult]:  # noqa: N802
    """Take it from LOCKED to CHECKPOINTED."""
    return _step(pid, "checkpoint")


def cuCheckpointProcessRestore(pid: int, arguments: Any) -> tuple[CUresult]:  # noqa: N802
    """Take it from CHECKPOINTED to LOCKED, onto the devices that the pairs name."""
    return _step(pid, "restore", list(arguments.gpuPairs) if arguments.gpuPairsCount else None)


def cuCheckpointProcessUnlock(pid: int, _arguments: Any) -> tuple[CUresult]:  # noqa: N802
    """Take it from LOCKED to RUNNING."""
    return _step(pid, "unlock")


def _step(pid: int, verb: str, pairs: list[CUcheckpointGpuPair] | None = None) -> tuple[CUresult]:
    began = time.monotonic()
    _log(pid, verb, began, None, None)
    result = _answer(pid, verb, pairs)
    _log(pid, verb, began, time.monotonic(), result.name)
    return (result,)


def _answer(pid: int, verb: str, pairs: list[CUcheckpointGpuPair] | None) -> CUresult:
    fault = _fault(pid, verb)
    if fault == "HANG":
        signal.pause()
    before, after = _STEPS[verb]
    state = _state(pid)
    if state is None:
        return CUresult.CUDA_ERROR_NOT_INITIALIZED
    if state is not before:
        return CUresult.CUDA_ERROR_ILLEGAL_STATE
    if fault == "LOST":
        _become(pid, FAILED)
        return CUresult.CUDA_ERROR_NOT_SUPPORTED
    if fault == "IDLE":
        return CUresult.CUDA_SUCCESS
    if fault:
        return CUresult[fault]
    if verb == "checkpoint":
        if (_folder() / f"{pid}.mapped").exists():
            return CUresult.CUDA_ERROR_NOT_SUPPORTED
        for file in _held(pid):
            file.rename(f"{file}{_SAVED}")
    elif verb == "restore":
        if pairs is not None and not _move(pid, pairs):
            return CUresult.CUDA_ERROR_INVALID_VALUE
        for file in _held(pid, _SAVED):
            file.rename(str(file).removesuffix(_SAVED))
    _become(pid, after)
    return CUresult.CUDA_SUCCESS


def _held(pid: int, suffix: str = "") -> list[Path]:
    """Return what a process has on the device, or what of it was saved: it need not have both."""
    files = [_folder() / f"{pid}.{name}{suffix}" for name in ("memory", "extra")]
    return [file for file in files if file.exists()]


def _move(pid: int, pairs: list[CUcheckpointGpuPair]) -> bool:
    """Put a process onto other devices; false where the pairs do not map each of its own to one of all.

    NVIDIA/cuda-checkpoint issue 35: a map has to name every device that the process sees, one to one.
    """
    file = _folder() / f"{pid}.devices"
    old: list[str] = json.loads(file.read_text())
    there: list[str] = json.loads((_folder() / "devices.json").read_text())
    moves = {pair.oldUuid.bytes.hex(): pair.newUuid.bytes.hex() for pair in pairs}
    new = list(moves.values())
    if len(pairs) != len(old) or set(moves) != set(old) or len({*new}) != len(new) or not {*new} <= {*there}:
        return False
    file.write_text(json.dumps([moves[uuid] for uuid in old]))
    (_folder() / f"{pid}.bus").write_text(bus_id(moves[old[0]]))
    return True


def bus_id(uuid: str) -> str:
    """Return the PCI bus id of a stand-in's device."""
    return f"0000:{uuid[-2:]}:00.0"


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _state(pid: int) -> CUprocessState | None:
    try:
        return CUprocessState[(_folder() / f"{pid}.state").read_text()]
    except FileNotFoundError:
        return None


def _become(pid: int, state: CUprocessState) -> None:
    partial = _folder() / f"{pid}.partial"
    partial.write_text(state.name)
    partial.rename(_folder() / f"{pid}.state")


def _fault(pid: int, verb: str) -> str | None:
    try:
        faults: dict[str, str] = json.loads((_folder() / "faults.json").read_text())
    except FileNotFoundError:
        return None
    return faults.get(f"{pid}:{verb}")


def _log(pid: int, verb: str, began: float, ended: float | None, result: str | None) -> None:
    line = json.dumps({"pid": pid, "verb": verb, "began": began, "ended": ended, "result": result})
    with (_folder() / "calls.jsonl").open("a") as file:
        file.write(line + "\n")
