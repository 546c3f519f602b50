"""Symmetric memory with multicast, without the memory."""

from __future__ import annotations

from typing import Any

from .comm_backend import TorchDistBackend

__all__ = ["SymmDeviceMemory", "TorchDistBackend", "all_ranks_support_mnnvl", "is_multicast_supported"]

denied: set[int] = set()
"""Ranks on which the import of the multicast handle fails, as it does behind a creator that is held up."""

null: set[int] = set()
"""Ranks on which multicast is set up without an error and without a pointer, as it is without NVSwitch."""


def is_multicast_supported(rank: int) -> bool:
    """Tell whether multicast can work on ``rank``, without any other rank."""
    return rank not in denied


def all_ranks_agree(comm: TorchDistBackend, local: bool) -> bool:
    """Return whether ``local`` is true on every rank of ``comm``."""
    return all(comm.allgather(local))


def all_ranks_support_mnnvl(
    local_supported: bool, world_size: int, comm_backend: TorchDistBackend | None = None, group: Any = None
) -> bool:
    """Return whether every rank can use multicast; every rank must call it."""
    comm = comm_backend or TorchDistBackend(group)
    return comm.Get_size() == world_size and all_ranks_agree(comm, local_supported)


class SymmDeviceMemory:
    """Exchanges unicast handles, then sets up the multicast team."""

    def __init__(self, comm_backend: TorchDistBackend) -> None:
        self.comm_backend = comm_backend
        self.mc_ptr = 0
        self._allocate_unicast_buffers()
        self._setup_multicast()

    def _allocate_unicast_buffers(self) -> None:
        self.handles = self.comm_backend.allgather(f"unicast {self.comm_backend.Get_rank()}")

    def _setup_multicast(self) -> None:
        self.comm_backend.allgather("address for the multicast handle")
        if self.comm_backend.Get_rank() in denied:
            raise RuntimeError("CUDA error CUDA_ERROR_INVALID_HANDLE: import of the multicast handle")
        # Binding waits for the whole team; the driver's wait is a barrier here.
        self.comm_backend.barrier()
        self.mc_ptr = 0 if self.comm_backend.Get_rank() in null else 0x7000_0000_0000
