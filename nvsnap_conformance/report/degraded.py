"""Which fast paths between GPUs a run was made without.

A run with multicast, peer-to-peer or custom all-reduce switched off hides the very bugs that the suite is
for (both of the first two known ones), so the switches in force are part of the verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_OFF = {"0", "false", "off", "no"}
_ON = {"1", "true", "on", "yes"}

SWITCHES: tuple[tuple[str, frozenset[str], str], ...] = (
    # variable or fact, values that mean "off", name of what is off
    ("NCCL_NVLS_ENABLE", frozenset(_OFF), "NVLS off"),
    ("NCCL_P2P_DISABLE", frozenset(_ON), "P2P off"),
    ("NCCL_SHM_DISABLE", frozenset(_ON), "SHM off"),
    ("NCCL_CUMEM_ENABLE", frozenset(_OFF), "cuMem off"),
    ("NCCL_CUMEM_HOST_ENABLE", frozenset(_OFF), "cuMem host off"),
    ("NCCL_IB_DISABLE", frozenset(_ON), "InfiniBand off"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", frozenset(_ON), "multicast off"),
    ("NVSHMEM_DISABLE_NVLS", frozenset(_ON), "NVSHMEM NVLS off"),
    ("VLLM_ALLREDUCE_USE_FLASHINFER", frozenset(_OFF), "FlashInfer all-reduce off"),
    ("custom_all_reduce", frozenset(_OFF), "custom all-reduce off"),
)


def degradations(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is off in an engine's effective communication environment, in a fixed order.

    ``environment`` is :meth:`EngineHandle.communication_environment`: variable names with their values,
    and the adapter's own facts in lower case (``backend``, ``custom_all_reduce``). An engine whose ranks
    talk by gloo has no GPU at all, and that is named instead of every switch.
    """
    if environment.get("backend", "").lower() == "gloo":
        return ("no GPU",)
    return tuple(name for key, off, name in SWITCHES if environment.get(key, "").strip().lower() in off)
