"""A rank is stopped (SIGSTOP) on its way to a collective; the others wait in it."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    """Reduce over all ranks; those named ``stopped`` stop themselves first."""
    context.join()
    context.tell("entered")
    if context.rank in context.options.get("stopped", ()):
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))
    context.tell("done")
