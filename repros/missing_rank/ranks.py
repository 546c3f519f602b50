"""One rank leaves the path that leads to a collective; the others wait in it for ever."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    """Reduce over all ranks; with ``absent`` in the options, these ranks never get there."""
    context.join()
    context.tell("entered")
    if context.rank in context.options.get("absent", ()):
        look_elsewhere(context)
    else:
        reduce_all()
    context.tell("done")


def reduce_all() -> None:
    """Add a tensor over all ranks."""
    dist.all_reduce(torch.ones(4))


def look_elsewhere(context: Any) -> None:
    """Wait for something that only this rank waits for."""
    context.gate("never opened")
