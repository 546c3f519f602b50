"""In which threads the worker's device is current: the driver's word on CUDA, a stand-in's on CPU.

On CPU there is no current device, but the engine has one call for every platform,
``current_platform.set_device(worker.device)``, by which its own threads begin (``multiproc_executor.py``,
vLLM 0.32) and which ends in ``torch.cpu.set_device``. The stand-in takes note of the threads that make it,
and of the device that it was made with: another one is not the worker's.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any


class ThreadDevice:
    """A worker's device, as threads see it. The thread that makes this object has it."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._here = threading.local()
        self._here.current = True
        self._set_device: Any = None

    def watch(self) -> None:
        """Take note of the threads that make the device current. On CUDA the driver knows."""
        import torch

        if self._device.type == "cpu":
            self._set_device = torch.cpu.set_device
            torch.cpu.set_device = self._note

    def unwatch(self) -> None:
        """Give torch its own function back."""
        import torch

        if self._set_device is not None:
            torch.cpu.set_device, self._set_device = self._set_device, None

    def is_current(self) -> bool:
        """Return whether the device is current in the calling thread."""
        if self._device.type == "cpu":
            return bool(getattr(self._here, "current", False))
        return bool(_context_device() == self._device.index)

    def _note(self, device: Any) -> None:
        self._set_device(device)
        self._here.current = self._is_own(device)

    def _is_own(self, device: Any) -> bool:
        """Return whether what was made current is this device: of its type, and not another one by number."""
        kind, _, number = str(device).partition(":")
        index = self._device.index
        return kind == self._device.type and (not number or index is None or number == str(index))


def _context_device() -> int | None:
    """Return the number of the device whose context is current in this thread, ``None`` where none is."""
    ask = ctypes.CDLL("libcuda.so.1").cuCtxGetDevice
    number = ctypes.c_int(-1)
    return number.value if ask(ctypes.byref(number)) == 0 else None
