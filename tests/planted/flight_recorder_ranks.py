"""Ranks that write torch's own flight recorder dumps before they are stuck."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def main(context: Any) -> None:
    import threading

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    def dump() -> None:
        context.gate("dump")
        path = Path(context.options["folder"]) / f"nccl_trace_rank_{context.rank}"
        path.write_bytes(_dump_fr_trace())
        context.tell("dumped")

    context.join()
    dist.barrier()
    recorder = threading.Thread(target=dump)
    recorder.start()
    context.tell("entered")
    if context.rank == context.options["absent"]:
        recorder.join()  # its gate is read by one thread at a time
        context.gate("never opened")
    dist.all_reduce(torch.ones(4))
