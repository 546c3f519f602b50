"""The part of ``flashinfer.comm`` that vLLM's all-reduce workspace uses."""

from .allreduce import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace
from .mnnvl import all_ranks_support_mnnvl

__all__ = [
    "AllReduceFusionPattern",
    "all_ranks_support_mnnvl",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
]
