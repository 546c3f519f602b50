"""vLLM's all-reduce over shared memory on CPU spins while it waits: a full core, and no progress."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    """Reduce through shared memory; those named ``absent`` never get there."""
    from vllm.distributed.device_communicators.cpu_communicator import (  # noqa: PLC0415 - the engine's
        _CPUSHMDistributed,
    )

    context.join()
    os.environ["VLLM_DIST_IDENT"] = f"nvsnap-{os.getppid()}-{Path(context.folder).name}"
    communicator: Any = SimpleNamespace(
        unique_name="spin",
        ranks=list(range(context.world)),
        world_size=context.world,
        rank=context.rank,
        device_group=dist.group.WORLD,
    )
    shared = _CPUSHMDistributed(communicator)
    context.tell("entered")
    if context.rank in context.options.get("absent", ()):
        look_elsewhere(context)
    else:
        shared.all_reduce(torch.ones(64))
    context.tell("done")


def look_elsewhere(context: Any) -> None:
    """Wait for something that only this rank waits for."""
    context.gate("never opened")
