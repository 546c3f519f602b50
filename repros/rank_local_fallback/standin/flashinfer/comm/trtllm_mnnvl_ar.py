"""The workspace over multicast."""

from __future__ import annotations

from .mnnvl import SymmDeviceMemory, TorchDistBackend

made: list[MNNVLAllReduceFusionWorkspace] = []
"""Every workspace of this rank, in the order in which they were made."""


class MNNVLAllReduceFusionWorkspace:
    """Symmetric memory with multicast, and a barrier once every rank has it."""

    backend = "mnnvl"

    def __init__(self, comm_backend: TorchDistBackend) -> None:
        self.handle = SymmDeviceMemory(comm_backend)
        comm_backend.barrier()
        self.mc_ptr = self.handle.mc_ptr
        self.destroyed = False
        made.append(self)

    def destroy(self) -> None:
        """Release the memory."""
        self.mc_ptr = 0
        self.destroyed = True
