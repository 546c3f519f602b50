"""Ranks that take steps with a collective in each, until the gate ``wedge`` sends some another way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    context.join()
    context.tell("entered")
    while True:
        # Rank 0 decides for all, so that nobody leaves in the middle of a step.
        wedge = torch.tensor([int(context.rank == 0 and context.is_open("wedge"))])
        dist.broadcast(wedge, src=0)
        if wedge.item() and context.rank in context.options["absent"]:
            context.tell("wedged")
            context.gate("never opened")
        dist.all_reduce(torch.ones(4))
        context.step()
