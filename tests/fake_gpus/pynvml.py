"""Stands for NVML over the stand-in driver's folder: two GPUs, on which each process holds 64 MiB."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

UUIDS = ("GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002")


class NVMLError(Exception):
    pass


def nvmlInit() -> None:  # noqa: N802 - NVML's names, as all below
    pass


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return "580.159.04"


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(UUIDS)


def nvmlDeviceGetHandleByIndex(index: int) -> str:  # noqa: N802
    return UUIDS[index]


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:  # noqa: N802
    return uuid


def nvmlDeviceGetUUID(device: str) -> str:  # noqa: N802
    return device


def nvmlDeviceGetName(_device: str) -> str:  # noqa: N802
    return "fake"


def nvmlDeviceGetComputeRunningProcesses(_device: str) -> list[int]:  # noqa: N802
    return []


def nvmlDeviceGetP2PStatus(_one: str, _other: str, _what: int) -> int:  # noqa: N802
    return 0


def nvmlDeviceGetMemoryInfo(device: str) -> Any:  # noqa: N802
    folder = Path(os.environ["NVSNAP_STAND_IN_DRIVER"])
    held = 0
    for memory in folder.glob("*.memory"):
        pid = memory.name.partition(".")[0]
        running = Path(f"/proc/{pid}").exists()
        on = json.loads((folder / f"{pid}.devices").read_text())[0]
        held += (64 << 20) * (running and device.removeprefix("GPU-").replace("-", "") == on)
    return SimpleNamespace(used=held, total=140 << 30)
