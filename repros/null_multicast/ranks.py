"""vLLM's own ``get_fi_ar_workspace`` where multicast comes without an error and without a pointer."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"max_token_num": 64, "hidden_dim": 64, "dtype": torch.bfloat16}


def main(context: Any) -> None:
    """Ask for a workspace on every rank; multicast gives a null pointer on all of them.

    ``backend`` is what the engine is set to (``auto`` or ``mnnvl``). ``form`` is ``today`` (vLLM as it is),
    ``used`` (whatever comes is taken, as vLLM up to 0.26 does) or ``kept`` (it is refused and not destroyed).
    """
    os.environ["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] = context.options["backend"]
    from flashinfer.comm import mnnvl, trtllm_mnnvl_ar  # noqa: PLC0415 - what stands in for the engine's
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.distributed.device_communicators import flashinfer_all_reduce as module  # noqa: PLC0415

    mnnvl.null.update(range(context.world))
    context.join()
    if getattr(parallel_state, "_NODE_COUNT", 1) is None:
        # vLLM up to 0.31 counts the nodes once, when it sets up its groups.
        parallel_state._NODE_COUNT = parallel_state._node_count(dist.group.WORLD)  # noqa: SLF001
    if context.options["form"] == "used":
        take_anything(module)
    elif context.options["form"] == "kept":
        trtllm_mnnvl_ar.MNNVLAllReduceFusionWorkspace.destroy = lambda _workspace: None
    workspace = module.get_fi_ar_workspace(
        world_size=context.world, rank=context.rank, group=dist.group.WORLD, **SIZES
    )
    null = [made for made in trtllm_mnnvl_ar.made if not made.handle.mc_ptr]
    context.tell(
        "done",
        {
            "backend": None if workspace is None else workspace.backend,
            "null": len(null),
            "used": any(made is workspace for made in null),
            "left": sum(not made.destroyed for made in null),
            "registered": any(id(made) in module._fi_ar_workspace_groups for made in null),  # noqa: SLF001
        },
    )


def take_anything(module: Any) -> None:
    """Create a workspace without a look at what it is, as vLLM up to 0.26 does."""

    def create(backend: str, world_size: int, rank: int, *sizes: Any) -> Any:
        group = sizes[-1]
        workspace = module.flashinfer_comm.create_allreduce_fusion_workspace(
            backend=backend,
            world_size=world_size,
            rank=rank,
            comm_backend=module.TorchDistBackend(group=group),
            group=group,
        )
        module._fi_ar_workspace_groups[id(workspace)] = group  # noqa: SLF001
        return workspace

    module._create_workspace = create  # noqa: SLF001
