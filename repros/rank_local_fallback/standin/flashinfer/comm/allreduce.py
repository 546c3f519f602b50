"""Creates a workspace of the backend that is asked for."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from .comm_backend import TorchDistBackend
from .trtllm_ar import trtllm_create_ipc_workspace_for_all_reduce_fusion
from .trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace


class AllReduceFusionPattern(IntEnum):
    """What is computed together with the all-reduce."""

    kAllReduce = 0  # noqa: N815 - FlashInfer's names
    kARResidualRMSNorm = 1  # noqa: N815


class TRTLLMAllReduceFusionWorkspace:
    """Memory that every rank maps from every other."""

    backend = "trtllm"

    def __init__(self, comm_backend: TorchDistBackend) -> None:
        self.handles = trtllm_create_ipc_workspace_for_all_reduce_fusion(comm_backend)

    def destroy(self) -> None:
        """Release the memory."""
        self.handles = []


def create_allreduce_fusion_workspace(
    backend: str, *, comm_backend: TorchDistBackend | None = None, group: Any = None, **_sizes: Any
) -> MNNVLAllReduceFusionWorkspace | TRTLLMAllReduceFusionWorkspace:
    """Create the workspace; collective over ``comm_backend`` (or ``group``)."""
    comm = comm_backend or TorchDistBackend(group)
    if backend == "trtllm":
        return TRTLLMAllReduceFusionWorkspace(comm)
    if backend == "mnnvl":
        return MNNVLAllReduceFusionWorkspace(comm)
    raise RuntimeError(f"no such backend: {backend}")


def allreduce_fusion(**_arguments: Any) -> None:
    """Fail: there is no device."""
    raise RuntimeError("there is no device in the stand-in")
