"""Hooks that wedge an engine on purpose. Injected: runs in the engine's workers."""

from __future__ import annotations

import os
from typing import Any


class Wedge:
    """Takes some ranks into a collective and others somewhere else."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self.rank = int(worker.rank)
        self.absent = options["absent"]

    def wedge(self) -> str:
        """Reduce over all ranks, except on those that are absent: they wait for a byte that never comes."""
        import torch
        import torch.distributed as dist

        if self.rank in self.absent:
            return never(os.pipe()[0])
        dist.all_reduce(torch.ones(4))
        return "reduced"


def never(descriptor: int) -> str:
    """Read from a pipe that nobody writes to."""
    return os.read(descriptor, 1).decode()
