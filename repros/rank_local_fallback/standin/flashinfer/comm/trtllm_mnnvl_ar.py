"""The workspace over multicast."""

from __future__ import annotations

from .mnnvl import SymmDeviceMemory, TorchDistBackend


class MNNVLAllReduceFusionWorkspace:
    """Symmetric memory with multicast, and a barrier once every rank has it."""

    backend = "mnnvl"

    def __init__(self, comm_backend: TorchDistBackend) -> None:
        self.handle = SymmDeviceMemory(comm_backend)
        comm_backend.barrier()
        self.mc_ptr = self.handle.mc_ptr

    def destroy(self) -> None:
        """Release the memory."""
        self.mc_ptr = 0
