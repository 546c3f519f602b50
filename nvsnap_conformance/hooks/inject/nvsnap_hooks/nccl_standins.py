"""Stand-ins for vLLM's NCCL communicators, in a real worker on CPU, over an old library or a new one.

The communicator and its library are of vLLM's own classes, made without their constructors, which need a GPU.
What the library can do is read from its table of functions, as the engine reads it (0.30 and later).
"""

from __future__ import annotations

from typing import Any

OLD, NEW = 22809, 22907
"""Versions of NCCL, as ``ncclGetVersion`` gives them: without ``ncclCommSuspend``, and the first with it."""

_FUNCTIONS = ("ncclCommSuspend", "ncclCommResume")


def plant(owner: Any, *, old: bool) -> Any:
    """Put a communicator where ``owner`` has its own; return what was there, ``None`` for nothing."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    library = object.__new__(NCCLLibrary)
    library._funcs = {} if old else dict.fromkeys(_FUNCTIONS, _call)
    made = object.__new__(PyNcclCommunicator)
    made.__dict__.update(
        available=True,
        disabled=False,
        nccl=library,
        comm=None,
        nccl_version=OLD if old else NEW,
        rank=owner.rank,
        world_size=owner.world_size,
        _suspended=False,
    )
    had = getattr(owner, "pynccl_comm", None)
    owner.pynccl_comm = made
    return had


def remove(owner: Any, had: Any) -> None:
    """Give ``owner`` back what it had."""
    if had is None:
        owner.__dict__.pop("pynccl_comm", None)
    else:
        owner.pynccl_comm = had


def _call(*_arguments: Any) -> int:
    """Succeed, as a function of NCCL does."""
    return 0
