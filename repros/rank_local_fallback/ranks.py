"""vLLM's own ``get_fi_ar_workspace`` in every rank, over gloo, with the stand-in for FlashInfer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# The seed's shape: hidden size 6144, 85 tokens per rank.
SIZES = {"max_token_num": 85, "hidden_dim": 6144, "dtype": torch.bfloat16}


def main(context: Any) -> None:
    """Create the workspace on every rank; on the ranks ``denied`` multicast fails.

    ``form`` is ``today`` (vLLM as it is), ``agreed`` (every rank votes before it chooses) or ``local`` (the
    choice as vLLM 0.26 to 0.33 makes it, for versions that have learnt better).
    """
    from flashinfer.comm import mnnvl  # noqa: PLC0415 - the engine's, or what stands in for it
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.distributed.device_communicators import flashinfer_all_reduce  # noqa: PLC0415

    mnnvl.denied.update(context.options["denied"])
    context.join()
    if getattr(parallel_state, "_NODE_COUNT", 1) is None:
        # vLLM up to 0.31 counts the nodes once, when it sets up its groups.
        parallel_state._NODE_COUNT = parallel_state._node_count(dist.group.WORLD)  # noqa: SLF001
    if context.options["form"] == "agreed":
        vote_first(flashinfer_all_reduce, mnnvl, context)
    elif context.options["form"] == "local":
        choose_alone(flashinfer_all_reduce)
    context.tell("entered")
    workspace = flashinfer_all_reduce.get_fi_ar_workspace(
        world_size=context.world, rank=context.rank, group=dist.group.WORLD, **SIZES
    )
    context.tell("done", workspace.backend if workspace is not None else None)


def vote_first(module: Any, mnnvl: Any, context: Any) -> None:
    """Put the missing step in front of vLLM's choice: all ranks agree whether multicast works."""
    resolve = module._resolve_fi_ar_backend  # noqa: SLF001 - the choice is private

    def resolve_together(*group: Any) -> tuple[str | None, bool]:  # vLLM up to 0.31: without the group
        backend, fallback = resolve(*group)
        local = mnnvl.is_multicast_supported(context.rank)
        if backend == "mnnvl" and not mnnvl.all_ranks_support_mnnvl(local, context.world):
            return "trtllm", False
        return backend, fallback

    module._resolve_fi_ar_backend = resolve_together  # noqa: SLF001


def choose_alone(module: Any) -> None:
    """Choose as vLLM 0.26 to 0.33 does: what fails here decides here."""

    def get_workspace_alone(*, group: Any, **sizes: Any) -> Any:
        create = module._create_workspace  # noqa: SLF001
        return create("mnnvl", group=group, **sizes) or create("trtllm", group=group, **sizes)

    module.get_fi_ar_workspace = get_workspace_alone
