"""FlashInfer's all-reduce workspaces and captured CUDA graphs, as vLLM holds them.

A workspace keeps its addresses while its memory is given back: ``checkpoint_prepare()`` and
``checkpoint_restore(comm_backend)`` of flashinfer 0.6.15 and later (PR 3745). vLLM keeps up to two of them in
``device_communicators.flashinfer_all_reduce`` (0.26 to 0.33), which may be one object.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from nvsnap_hooks.holders import Holder
from nvsnap_hooks.resources import Context, Deferred, StillHeld, Unsupported

MODULE = "vllm.distributed.device_communicators.flashinfer_all_reduce"
SLOTS = {"flashinfer/normal": "_fi_ar_workspace", "flashinfer/quant": "_fi_ar_quant_workspace"}

GRAPH_WRAPPERS = (
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper"),
    ("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphWrapper"),
)


def memories(workspace: Any) -> list[Any]:
    """Return the shared memories behind a workspace: TRT-LLM's list, or MNNVL's one."""
    many = getattr(workspace, "mem_handles", None)
    if many is not None:
        return list(many)
    one = getattr(getattr(workspace, "handle", None), "mcast_device_memory", None)
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
        if workspace is None:
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

    def release(self) -> str:
        """Give the memory back, keeping the addresses; a barrier of all ranks is part of it."""
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
        self._workspace.checkpoint_restore(self._module.TorchDistBackend(group=group))
        if not all(memory.mapped for memory in memories(self._workspace)):
            raise RuntimeError(f"{self.name} is not mapped as a whole")
        return f"{self.backend} over {group.group_desc}{self._known_as()}"

    def _known_as(self) -> str:
        return f"; also known as {', '.join(self.aliases)}" if self.aliases else ""


class Graphs:
    """All captured CUDA graphs of this rank. They hold collectives, so they go before any group does."""

    name = "cuda-graphs"
    kind = "cuda-graphs"

    def held(self) -> bool:
        """Return whether any wrapper holds a captured graph."""
        return any(graphs_of(wrapper) for _, wrapper in _wrappers())

    def release(self) -> str:
        """Drop them by the wrappers' own call."""
        number = sum(graphs_of(wrapper) for _, wrapper in _wrappers())
        for family in {family for family, _ in _wrappers()}:
            family.clear_all_graphs()
        if self.held():
            raise StillHeld("a wrapper still holds captured graphs")
        return f"{number} graphs"

    def rebuild(self, _context: Context) -> str:
        """Leave it to the engine: a wrapper captures again at its next call, while the engine serves."""
        raise Deferred("captured again by the engine at their next use")


def graphs_of(wrapper: Any) -> int:
    """Return how many graphs a wrapper has captured."""
    own = vars(wrapper)
    # The two kinds of wrapper name their entries, and the graph in one, differently.
    entries = own.get("concrete_cudagraph_entries") or own.get("entries") or {}
    return sum(
        getattr(entry, "cudagraph", None) is not None or getattr(entry, "capture", None) is not None
        for entry in entries.values()
    )


def _wrappers() -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for module, name in GRAPH_WRAPPERS:
        family = getattr(sys.modules.get(module), name, None)
        found += [(family, wrapper) for wrapper in list(getattr(family, "_all_instances", ()))]
    return found
