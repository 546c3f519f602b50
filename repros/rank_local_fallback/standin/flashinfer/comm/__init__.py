"""The part of ``flashinfer.comm`` that vLLM's all-reduce workspace uses."""

from .allreduce import allreduce_fusion, create_allreduce_fusion_workspace
from .mnnvl import all_ranks_support_mnnvl

__all__ = ["all_ranks_support_mnnvl", "allreduce_fusion", "create_allreduce_fusion_workspace"]
