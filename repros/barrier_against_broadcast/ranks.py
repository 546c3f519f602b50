"""Some ranks enter a barrier while the others of the same group enter a broadcast."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    """Meet in a barrier; with ``broadcasting`` in the options, these ranks broadcast instead.

    Rank 0 is the broadcast's source: it must not be among them, or it would send and pass.
    """
    context.join()
    context.tell("entered")
    if context.rank in context.options.get("broadcasting", ()):
        take_broadcast()
    else:
        meet()
    context.tell("done")


def meet() -> None:
    """Wait for every rank."""
    dist.barrier()


def take_broadcast() -> None:
    """Take a tensor from rank 0."""
    dist.broadcast(torch.zeros(4), src=0)
