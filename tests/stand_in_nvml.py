"""Stands for ``pynvml``: GPUs as plain data, with the errors of the real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


@dataclass
class Device:
    uuid: str
    used: int = 4 << 20
    total: int = 140 << 30
    processes: int = 0
    blind_to: set[str] = field(default_factory=set)


class StandInNvml:
    NVMLError = NVMLError

    def __init__(self, *uuids: str, driver: str = "580.159.04", broken: bool = False) -> None:
        self.devices = [Device(uuid) for uuid in uuids]
        self.instances = {"MIG-one": Device("MIG-one")}
        self.driver = driver
        self.broken = broken
        self.open = 0

    def device(self, uuid: str) -> Device:
        return next(device for device in self.devices if device.uuid == uuid)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names, as all below
        if self.broken:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:  # noqa: N802
        for device in [*self.devices, *self.instances.values()]:
            if device.uuid == uuid:
                return device
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, device: Device) -> str:  # noqa: N802
        return device.uuid

    def nvmlDeviceGetName(self, _device: Device) -> bytes:  # noqa: N802
        return b"Stand-in"

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Any:  # noqa: N802
        return SimpleNamespace(used=device.used, total=device.total)

    def nvmlDeviceGetComputeRunningProcesses(self, device: Device) -> list[int]:  # noqa: N802
        return list(range(device.processes))

    def nvmlDeviceGetP2PStatus(self, one: Device, other: Device, _what: int) -> int:  # noqa: N802
        return 1 if other.uuid in one.blind_to else 0
