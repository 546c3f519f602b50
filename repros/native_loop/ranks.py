"""One rank is in a loop in C that never lets go of the GIL; the others wait in a collective."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    """Reduce over all ranks; those named ``looping`` never leave a native loop."""
    context.join()
    context.tell("entered")
    if context.rank in context.options.get("looping", ()):
        loop()
    dist.all_reduce(torch.ones(4))
    context.tell("done")


def loop() -> bool:
    """Go through an endless iterator in C: no signal handler runs, no other thread gets the GIL."""
    return all(itertools.repeat(True))
