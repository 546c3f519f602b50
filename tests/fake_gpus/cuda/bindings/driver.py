"""Stands for cuda-bindings: the stand-in's checkpoint calls, and plain memory that they take away."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nvsnap_conformance.checkpoint.device_ranks import STAND_IN_DEVICES
from nvsnap_conformance.checkpoint.stand_in_driver import *  # noqa: F403 - it plays that module
from nvsnap_conformance.checkpoint.stand_in_driver import CUresult, CUuuid, bus_id

SUCCESS = CUresult.CUDA_SUCCESS
_memory: dict[int, bytes] = {}


def _file(name: str) -> Path:
    return Path(os.environ["NVSNAP_STAND_IN_DRIVER"]) / f"{os.getpid()}.{name}"


def cuDeviceGet(number: int) -> tuple[CUresult, int]:  # noqa: N802 - the driver's names, as all below
    # What is visible: one GPU, or both; the chosen one first.
    visible = [int(word) for word in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    uuids = [STAND_IN_DEVICES[index] for index in sorted(visible, key=lambda one: one != visible[number])]
    _file("devices").write_text(json.dumps(uuids))
    _file("bus").write_text(bus_id(uuids[0]))
    _file("devices").with_name("devices.json").write_text(json.dumps(STAND_IN_DEVICES))
    return SUCCESS, number


def cuDevicePrimaryCtxRetain(_device: int) -> tuple[CUresult, int]:  # noqa: N802
    _file("state").write_text("CU_PROCESS_STATE_RUNNING")
    return SUCCESS, 1


def cuCtxSetCurrent(_context: int) -> tuple[CUresult]:  # noqa: N802
    return (SUCCESS,)


def cuCtxSynchronize() -> tuple[CUresult]:  # noqa: N802
    return (SUCCESS,)


def cuMemAlloc(count: int) -> tuple[CUresult, int]:  # noqa: N802
    address = 4096 * (len(_memory) + 1)
    _memory[address] = bytes(count)
    _file("memory").touch()
    return SUCCESS, address


def cuMemsetD32(address: int, word: int, count: int) -> tuple[CUresult]:  # noqa: N802
    _memory[address] = word.to_bytes(4, "little") * count
    return (SUCCESS,)


def cuMemcpyDtoH(back: bytearray, address: int, count: int) -> tuple[CUresult]:  # noqa: N802
    if not _file("memory").exists():
        return (CUresult.CUDA_ERROR_ILLEGAL_STATE,)
    back[:] = _memory[address][:count]
    return (SUCCESS,)


def cuDeviceGetUuid(_device: int) -> tuple[CUresult, Any]:  # noqa: N802
    uuid = CUuuid()
    uuid._buffer.raw = bytes.fromhex(json.loads(_file("devices").read_text())[0])
    return SUCCESS, uuid


def cuDeviceGetPCIBusId(_length: int, _device: int) -> tuple[CUresult, bytes]:  # noqa: N802
    return SUCCESS, _file("bus").read_text().encode() + bytes(3)
