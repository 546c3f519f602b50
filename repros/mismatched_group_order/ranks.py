"""Two groups over the same ranks, used in one order by some ranks and in the other by the rest."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    """Reduce over both groups; with ``swapped`` in the options, these ranks take the second one first."""
    context.join()
    first, second = dist.new_group(), dist.new_group()
    context.tell("entered")
    if context.rank in context.options.get("swapped", ()):
        reduce_swapped(first, second)
    else:
        reduce_in_order(first, second)
    context.tell("done")


def reduce_in_order(first: Any, second: Any) -> None:
    """Reduce over the first group, then over the second."""
    dist.all_reduce(torch.ones(4), group=first)
    dist.all_reduce(torch.ones(4), group=second)


def reduce_swapped(first: Any, second: Any) -> None:
    """Reduce over the second group, then over the first."""
    dist.all_reduce(torch.ones(4), group=second)
    dist.all_reduce(torch.ones(4), group=first)
