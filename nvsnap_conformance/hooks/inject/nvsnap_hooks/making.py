"""The settings in force while a call runs: at its begin, wherever a communicator is made, at its end.

A variable that is set for the making alone is gone again before anybody else could look, and the
communicator that was made under it stays. So what makes communicators is wrapped for as long as a call of the
hooks runs, and notes :func:`nvsnap_hooks.transports.fingerprint` before and after each. Arguments, results
and exceptions pass through unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from nvsnap_hooks import transports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_VLLM = "vllm.distributed.device_communicators"

MAKERS: tuple[tuple[str, str], ...] = (
    # What torch's init_process_group and new_group both end in, by whatever name a caller has imported them.
    ("torch.distributed.distributed_c10d", "_new_process_group_helper"),
    ("torch.distributed.distributed_c10d", "split_group"),
    ("torch.distributed", "split_group"),
    # NCCL by itself, through vLLM's binding, whatever wraps it.
    (f"{_VLLM}.pynccl_wrapper", "NCCLLibrary.ncclCommInitRank"),
    (f"{_VLLM}.custom_all_reduce", "CustomAllreduce.__init__"),
    (f"{_VLLM}.quick_all_reduce", "QuickAllReduce.__init__"),
    (f"{_VLLM}.symm_mem", "SymmMemCommunicator.__init__"),
)
"""Modules and what in them makes a communicator. One that is not loaded makes none."""

Note = dict[str, Any]


@contextlib.contextmanager
def noted() -> Iterator[list[Note]]:
    """Yield the list into which each ``{"at", "variables"}`` goes; equal neighbours are one.

    ``at`` is ``begin``, ``end`` or the name of what makes a communicator. Everything is as it was afterwards.
    """
    notes: list[Note] = []

    def note(at: str) -> None:
        variables = transports.fingerprint()
        if not notes or notes[-1]["variables"] != variables:
            notes.append({"at": at, "variables": variables})

    note("begin")
    with contextlib.ExitStack() as wrapped:
        for module, path in MAKERS:
            _wrap(module, path, note, wrapped)
        try:
            yield notes
        finally:
            note("end")


def _wrap(module: str, path: str, note: Callable[[str], None], wrapped: contextlib.ExitStack) -> None:
    *owners, name = path.split(".")
    owner: Any = sys.modules.get(module)
    for part in owners:
        owner = getattr(owner, part, None)
    # Of the owner itself: what it inherits, or lacks in this version, is not put into it.
    make = vars(owner).get(name) if owner is not None else None
    if make is None:
        return

    @functools.wraps(make)
    def making(*args: Any, **kwargs: Any) -> Any:
        note(path)
        try:
            return make(*args, **kwargs)
        finally:
            note(path)

    setattr(owner, name, making)
    wrapped.callback(_put_back, owner, name, making, make)


def _put_back(owner: Any, name: str, making: Any, make: Any) -> None:
    """Put the original back, unless somebody has put something of their own over it meanwhile."""
    if vars(owner).get(name) is making:
        setattr(owner, name, make)
