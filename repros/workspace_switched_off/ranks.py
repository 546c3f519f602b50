"""vLLM's own choice and pass that fuse all-reduces, with the switch for FlashInfer's on or off."""

from __future__ import annotations

import contextlib
import importlib
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

HIDDEN = 64
CAPABILITY = 90  # an H100 or H200


def main(context: Any) -> None:
    """Do what the engine does on two H200 for the pass, with ``VLLM_ALLREDUCE_USE_FLASHINFER`` as ``switch``.

    ``form`` is ``today`` (vLLM as it is), ``obeyed`` (a switch that is off keeps the pass from being made) or
    ``ignored`` (a workspace is made whatever the switch says, for versions that have learnt better).
    """
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = context.options["switch"]
    # Its workspace takes no multicast, so that what fails without it has no part in the answer.
    os.environ["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] = "trtllm"
    from vllm import envs  # noqa: PLC0415
    from vllm.config import vllm as choice  # noqa: PLC0415
    from vllm.distributed.device_communicators import flashinfer_all_reduce as module  # noqa: PLC0415

    context.join()
    form = context.options["form"]
    config = engine_config(context.world)
    with on_a_gpu(), over_the_world(the_pass(), context) as pass_module:
        wanted = form == "ignored" or choice.enable_allreduce_rms_fusion(config)
        if wanted and (form != "obeyed" or envs.VLLM_ALLREDUCE_USE_FLASHINFER):
            pass_module.AllReduceFusionPass(config)
    # By the table of groups, which a workspace is put into as soon as it is made.
    context.tell("done", {"wanted": bool(wanted), "workspaces": len(module._fi_ar_workspace_groups)})  # noqa: SLF001


def the_pass() -> Any:
    """Return the module of vLLM's pass, which the server has loaded."""
    return importlib.import_module("fusion_pass").load()


def engine_config(world: int) -> Any:
    """Return the part of an engine's configuration that the choice and the pass read."""
    from vllm.config.compilation import PassConfig  # noqa: PLC0415

    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=world),
        compilation_config=SimpleNamespace(
            splitting_ops=[],
            use_inductor_graph_partition=False,
            pass_config=PassConfig(fi_allreduce_fusion_max_size_mb=1),
        ),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: HIDDEN),
        device_config=SimpleNamespace(device="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        speculative_config=None,
        compile_debug_dump_path=lambda: None,
    )


@contextlib.contextmanager
def on_a_gpu() -> Any:
    """Let vLLM's choice see a GPU with FlashInfer, which is all that it asks the platform for."""
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.utils import flashinfer  # noqa: PLC0415

    platform = type(current_platform)
    with (
        mock.patch.object(platform, "is_cuda", return_value=True),
        mock.patch.object(platform, "is_device_capability", lambda _self, asked, *_: asked == CAPABILITY),
        mock.patch.object(platform, "is_device_capability_family", return_value=False),
        mock.patch.object(flashinfer, "has_flashinfer", return_value=True),
    ):
        yield


@contextlib.contextmanager
def over_the_world(module: Any, context: Any) -> Any:
    """Let the pass find the world in place of the engine's groups, and register no pattern of kernels."""
    with (
        mock.patch.object(module, "get_tensor_model_parallel_world_size", return_value=context.world),
        mock.patch.object(module, "get_tensor_model_parallel_rank", return_value=context.rank),
        mock.patch.object(module, "get_tp_group", return_value=SimpleNamespace(cpu_group=dist.group.WORLD)),
        mock.patch.object(module.AllReduceFusionPass, "register_patterns"),
    ):
        yield module
