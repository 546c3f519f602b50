"""The workspace over memory that every rank maps from every other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comm_backend import TorchDistBackend

BUFFERS = 3


def trtllm_create_ipc_workspace_for_all_reduce_fusion(comm_backend: TorchDistBackend) -> list[object]:
    """Exchange the handles of three buffers, then wait for every rank."""
    handles: list[object] = [comm_backend.allgather(f"buffer {number}") for number in range(BUFFERS)]
    comm_backend.barrier()
    return handles
