"""What the hooks need of a CUDA device: its free memory, and the calls that neither torch nor vLLM offers."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


_DEVICE_ORDINAL = 9
"""``CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`` of ``cuPointerGetAttribute``, an int."""


class DeviceCallError(RuntimeError):
    """A call of the CUDA runtime failed."""


class Device:
    """A worker's device. On CPU no method has an effect and :meth:`free` is ``None``."""

    def __init__(self, device: Any) -> None:
        self._device = device

    @property
    def on_gpu(self) -> bool:
        """Whether the worker computes on a CUDA device."""
        return getattr(self._device, "type", None) == "cuda"

    def make_current(self) -> None:
        """Make it the calling thread's device, with its context, by the engine's own call.

        A new thread has device 0, and no context, whatever the process's other threads have. torch's
        ``set_device`` alone leaves device 0 without one, for it does nothing where the number is the same
        (pytorch/pytorch issue 155668); vLLM's ``set_device`` sees to that too. On CPU it does nothing.
        """
        if self._device is not None:
            from vllm.platforms import current_platform

            current_platform.set_device(self._device)

    def free(self) -> int | None:
        """Return the device's free memory in bytes, as the driver gives it."""
        if not self.on_gpu:
            return None
        import torch

        return int(torch.cuda.mem_get_info(self._device)[0])

    def synchronize(self) -> None:
        """Wait until all work of this process on the device is done."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize(self._device)

    def give_back(self) -> None:
        """Give the memory that torch keeps for later back to the driver."""
        if self.on_gpu:
            import torch

            gc.collect()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


def close_ipc_handles(addresses: list[int]) -> None:
    """Unmap memory of other processes, by the addresses at which ``cudaIpcOpenMemHandle`` mapped it.

    vLLM opens such handles (``ops.open_mem_handle``) and has no call that closes one (0.26 to 0.33). A
    mapping that is left makes ``cuCheckpointProcessRestore`` fail with ``INVALID_VALUE``, measured on
    driver 580. Raises :class:`DeviceCallError`, after the others have been tried.
    """
    if not addresses:
        return
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    library = CudaRTLibrary().lib
    close = library.cudaIpcCloseMemHandle
    close.argtypes, close.restype = [ctypes.c_void_p], ctypes.c_int
    failed = {hex(address): code for address in addresses if (code := close(address))}
    if failed:
        raise DeviceCallError(f"cudaIpcCloseMemHandle failed (address: cudaError_t): {failed}")


def still_mapped(addresses: list[int]) -> list[int]:
    """Return those of the addresses at which the driver knows of memory; none where there is no GPU."""
    import torch

    if not addresses or not torch.cuda.is_available():
        return []
    ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    ask.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    ordinal = ctypes.c_int(-1)
    return [at for at in addresses if ask(ctypes.byref(ordinal), _DEVICE_ORDINAL, at) == 0]


def bounded(call: Callable[[], Any], seconds: float, what: str) -> None:
    """Run a call that may never return, for at most ``seconds``; raise ``TimeoutError`` where it does not.

    It runs in a thread of its own with this thread's device current, and stays there for good where it hangs.
    """
    import torch

    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    raised: list[BaseException] = []

    def run() -> None:
        try:
            if index is not None:
                torch.cuda.set_device(index)
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=f"nvsnap {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"{what} did not end within {seconds:.0f} s")
    if raised:
        raise raised[0]
