"""FlashInfer's all-reduce workspaces, as vLLM holds them.

A workspace keeps its addresses while its memory is given back: ``checkpoint_prepare()`` and
``checkpoint_restore(comm_backend)`` of flashinfer 0.6.15 and later (PR 3745); for those without,
:mod:`nvsnap_hooks.held_workspace`. vLLM keeps up to two of them in
``device_communicators.flashinfer_all_reduce`` (0.26 to 0.33), which may be one object.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from nvsnap_hooks.holders import Holder, Tombstone
from nvsnap_hooks.resources import Context, StillHeld, Unsupported

MODULE = "vllm.distributed.device_communicators.flashinfer_all_reduce"
SLOTS = {"flashinfer/normal": "_fi_ar_workspace", "flashinfer/quant": "_fi_ar_quant_workspace"}


def memories(workspace: Any) -> list[Any]:
    """Return the shared memories behind a workspace: TRT-LLM's list, or MNNVL's one."""
    many = getattr(workspace, "mem_handles", None)
    if many is not None:
        return list(many)
    handle = getattr(workspace, "handle", None)
    # FlashInfer 0.6.14 has torch's symmetric memory there, later ones an object around their own.
    one = handle if hasattr(handle, "buffer_ptrs") else getattr(handle, "mcast_device_memory", None)
    return [] if one is None else [one]


def mapped(workspace: Any) -> bool:
    """Return whether any of its memories is mapped; one that does not tell counts as mapped."""
    if getattr(workspace, "_destroyed", False):
        return False
    return any(getattr(memory, "mapped", True) for memory in memories(workspace) or [workspace])


def held() -> list[tuple[str, Any, tuple[str, ...]]]:
    """Return name, workspace and further names of every workspace; one in two slots comes once."""
    module = sys.modules.get(MODULE)
    found: dict[int, tuple[str, Any, tuple[str, ...]]] = {}
    for name, slot in SLOTS.items():
        workspace = getattr(module, slot, None)
        if workspace is None or isinstance(workspace, Tombstone):
            continue
        first, _, others = found.get(id(workspace), (name, workspace, ()))
        found[id(workspace)] = (first, workspace, others if first == name else (*others, name))
    return list(found.values())


def holders_of(group: Any) -> list[Holder]:
    """Return the places in vLLM's table from workspaces to groups that hold ``group``."""
    table = getattr(sys.modules.get(MODULE), "_fi_ar_workspace_groups", {})
    return [
        Holder(f"_fi_ar_workspace_groups[{key}]", functools.partial(table.__setitem__, key))
        for key, value in table.items()
        if value is group
    ]


class Workspace:
    """One workspace. Its communication backend is made anew over the rebuilt group."""

    kind = "flashinfer-workspace"

    def __init__(self, name: str, workspace: Any, aliases: tuple[str, ...]) -> None:
        self.name = name
        self.aliases = aliases
        self._workspace = workspace
        self._module = sys.modules[MODULE]

    @property
    def backend(self) -> str:
        """What FlashInfer calls its kind: ``trtllm`` or ``mnnvl``. Ranks that differ must not go on."""
        return str(self._workspace.backend)

    def held(self) -> bool:
        """Return whether its memory is mapped."""
        return mapped(self._workspace)

    def addresses(self) -> list[int]:
        """Return where each memory is mapped, this rank's and its peers', and its multicast address."""
        found: list[int] = []
        for memory in memories(self._workspace):
            # Torch's symmetric memory names them differently.
            for each, multicast in (("uc_ptrs", "mc_ptr"), ("buffer_ptrs", "multicast_ptr")):
                found += [int(address) for address in getattr(memory, each, ())]
                found += [int(getattr(memory, multicast))] if getattr(memory, multicast, 0) else []
        return found

    def release(self) -> str:
        """Give the memory back, keeping the addresses; a barrier of all ranks is part of it."""
        if not hasattr(type(self._workspace), "checkpoint_prepare"):
            raise Unsupported(f"{type(self._workspace).__name__} has no checkpoint_prepare")
        try:
            self._workspace.checkpoint_prepare()
        except NotImplementedError as error:
            raise Unsupported(f"{self.backend}: {error}") from error
        if mapped(self._workspace):
            raise StillHeld(f"{self.name} is still mapped")
        return f"{self.backend}{self._known_as()}"

    def rebuild(self, _context: Context) -> str:
        """Map fresh memory at the same addresses, exchanged over the group that is in its place now."""
        group = self._module._fi_ar_workspace_groups[id(self._workspace)]
        self._require_same_size(group)
        try:
            self._workspace.checkpoint_restore(self._module.TorchDistBackend(group=group))
        except NotImplementedError as error:
            raise Unsupported(f"{self.backend}: {error}") from error
        if not all(memory.mapped for memory in memories(self._workspace)):
            raise RuntimeError(f"{self.name} is not mapped as a whole")
        return f"{self.backend} over {group.group_desc}{self._known_as()}"

    def _require_same_size(self, group: Any) -> None:
        """Refuse a group of another size or rank: FlashInfer's own call does not look (0.6.15 to 0.7.2)."""
        size = getattr(self._workspace, "world_size", None)
        rank = getattr(self._workspace, "rank", None)
        if size is not None and (size, rank) != (group.size(), group.rank()):
            raise RuntimeError(
                f"{self.name} is of rank {rank} of {size}, its group of {group.rank()} of {group.size()}"
            )

    def _known_as(self) -> str:
        return f"; also known as {', '.join(self.aliases)}" if self.aliases else ""
