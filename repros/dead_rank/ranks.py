"""A rank dies while the engine starts; the others wait for it in the rendezvous."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    """Set up the group and reduce; those named ``dying`` are killed before they get there."""
    context.tell("entered")
    if context.rank in context.options.get("dying", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    context.join()
    dist.all_reduce(torch.ones(4))
    context.tell("done")
