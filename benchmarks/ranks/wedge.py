"""Ranks that take healthy steps until they are told to wedge, then run the script of a repro."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
import torch.distributed as dist


class Joined:
    """The context of a rank that has joined its group already."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def join(self) -> None:
        """Do nothing: the group is there."""


def main(context: Any) -> None:
    """Step, with a collective in each step, until rank 0 has passed the word; then wedge."""
    specification = importlib.util.spec_from_file_location("nvsnap_wedge", context.options["script"])
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["nvsnap_wedge"] = module
    specification.loader.exec_module(module)
    if context.options["steps"]:
        context.join()
        context.tell("stepping")
        while True:
            wedge = torch.tensor([int(context.rank == 0 and context.is_open("wedge"))])
            dist.broadcast(wedge, src=0)
            if wedge.item():
                break
            dist.all_reduce(torch.ones(64))
            context.step()
        module.main(Joined(context))
    else:
        context.tell("stepping")
        context.gate("wedge")
        module.main(context)
