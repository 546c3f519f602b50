"""FlashInfer workspaces without methods for a checkpoint: freed straight from what holds their memory.

FlashInfer 0.6.14, which vLLM 0.26 pins, keeps a workspace's memory in torch's symmetric memory, and torch
unmaps that with its last reference. The workspace's ``destroy()`` drops some of these only: for TRT-LLM the
object's ``_internal_workspace`` and its module's table (``trtllm_ar._symm_workspace_refs``) have them too.

Such a workspace comes back as another object, at other addresses. FlashInfer's own class makes it, as vLLM's
``_create_workspace`` has it done for the backend, and vLLM uses it over the tensor-parallel group only.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

from nvsnap_hooks import device, flashinfer
from nvsnap_hooks.holders import Holder, Tombstone, find_holders
from nvsnap_hooks.resources import Context, StillHeld, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_hooks.device import Device
    from nvsnap_hooks.rendezvous import Rendezvous

NEEDS = {
    "trtllm": ("destroy", "metadata", "ipc_handles", "world_size", "rank"),
    "mnnvl": ("destroy", "buffer_size_bytes", "world_size", "rank"),
}
"""What a workspace of each backend must have to be freed and made again (FlashInfer 0.6.14)."""

_FORGET = "trtllm_destroy_ipc_workspace_for_all_reduce_fusion"


def without_teardown(workspace: Any) -> bool:
    """Return whether a workspace cannot give its memory back by itself, as from FlashInfer 0.6.15 on."""
    return not hasattr(type(workspace), "checkpoint_prepare")


def why_not(workspace: Any) -> str | None:
    """Return why the memory of a workspace cannot be freed from here, ``None`` where it can."""
    told = f"{type(workspace).__name__} has no checkpoint_prepare, and"
    backend = getattr(workspace, "backend", None)
    if backend not in NEEDS:
        return f"{told} its backend {backend!r} is not known"
    if missing := [name for name in NEEDS[backend] if not hasattr(workspace, name)]:
        return f"{told} no {', '.join(missing)}"
    memories = flashinfer.memories(workspace)
    if not memories or not all(hasattr(memory, "buffer_ptrs") for memory in memories):
        return f"{told} its memory is not torch's symmetric memory"
    return None


def moving() -> list[str]:
    """Return the names of the workspaces that can be freed and come back at other addresses."""
    return [
        name
        for name, workspace, _ in flashinfer.held()
        if flashinfer.mapped(workspace) and without_teardown(workspace) and why_not(workspace) is None
    ]


def resource(name: str, workspace: Any, aliases: tuple[str, ...], on: Device) -> flashinfer.Workspace:
    """Return the resource for a workspace: by its own calls where it has them, by its memory elsewhere."""
    if without_teardown(workspace):
        return HeldWorkspace(name, workspace, aliases, on)
    return flashinfer.Workspace(name, workspace, aliases)


class HeldWorkspace(flashinfer.Workspace):
    """One workspace that has no teardown of its own; ``votes`` is needed for its release."""

    def __init__(self, name: str, workspace: Any, aliases: tuple[str, ...], on: Device) -> None:
        super().__init__(name, workspace, aliases)
        self.votes: Rendezvous | None = None
        self.seconds = 20.0
        self._device = on
        self._backend = str(workspace.backend)
        self._place = (getattr(workspace, "world_size", None), getattr(workspace, "rank", None))
        self._multicast = has_multicast(workspace)
        self._places: list[Holder] = []
        self._make: Callable[[Any, Any], Any] | None = None
        self._old = id(workspace)

    @property
    def backend(self) -> str:
        """What FlashInfer calls its kind, also while it is released."""
        return self._backend

    def held(self) -> bool:
        """Return whether it is there."""
        return self._workspace is not None and super().held()

    def addresses(self) -> list[int]:
        """Return where each memory is mapped, empty while it is released."""
        return super().addresses() if self._workspace is not None else []

    def release(self) -> str:
        """Drop everything that holds its memory, on all ranks together, and see that the memory is gone.

        Raises :class:`Unsupported` for a kind that is not known, and :class:`StillHeld` where something
        keeps the memory, or the driver knows of it still.
        """
        if (why := why_not(self._workspace)) is not None:
            raise Unsupported(why)
        problem: str | None = None
        try:
            self._make = recipe(self._workspace)
            self._device.synchronize()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        # Nobody may unmap it while another rank still writes there.
        if self.votes is None:
            raise RuntimeError(f"{self.name}: no way to meet the other ranks")
        self.votes.agree(f"{self.name} idle", problem)
        addresses = self.addresses()
        watches = [weakref.ref(memory) for memory in flashinfer.memories(self._workspace)]
        self._drop()
        self._require_gone(watches, addresses)
        return f"{self.backend}, {len(watches)} memories dropped, held by {self._where()}{self._known_as()}"

    def rebuild(self, context: Context) -> str:
        """Make it again by its own class over the group that is in force, and hand it to every holder."""
        if self._workspace is not None or self._make is None:
            raise Unsupported("was not released")
        group, problem = self._group()
        # The constructor waits for the other ranks, so it is begun only where all will.
        context.rendezvous.agree(f"{self.name} to be made", problem)
        make, backend = self._make, self._module.TorchDistBackend(group=group)
        made: list[Any] = []
        device.bounded(lambda: made.append(make(backend, group)), context.seconds, f"making {self.name}")
        workspace = made.pop()
        if has_multicast(workspace) != self._multicast:
            workspace.destroy()
            raise RuntimeError(f"{self.name} {'lost' if self._multicast else 'gained'} its multicast address")
        for place in self._places:
            place.put(workspace)
        if (table := self._groups()) is not None:
            table.pop(self._old, None)
            table[id(workspace)] = group
        self._workspace, self._old = workspace, id(workspace)
        return f"{self.backend} over {group.group_desc}, handed to {self._where()}{self._known_as()}"

    def _drop(self) -> None:
        workspace = self._workspace
        ((self._places, _stuck),) = find_holders([workspace])
        if self.backend == "trtllm":
            # By the identity of the list in the workspace; FlashInfer's destroy() leaves this entry.
            forget = getattr(sys.modules.get("flashinfer.comm.trtllm_ar"), _FORGET, None)
            if forget is not None:
                forget(workspace.ipc_handles)
        workspace.destroy()
        vars(workspace).pop("_internal_workspace", None)
        if (table := self._groups()) is not None:
            table.pop(id(workspace), None)
        for place in self._places:
            place.put(Tombstone(self.name))
        self._workspace = None

    def _require_gone(self, watches: list[weakref.ref[Any]], addresses: list[int]) -> None:
        if any(watch() is not None for watch in watches):
            gc.collect()
        if alive := [memory for watch in watches if (memory := watch()) is not None]:
            number = len(alive)
            places = [place.where for found, stuck in find_holders(alive) for place in found] or ["?"]
            raise StillHeld(f"{self.name}: {number} of its memories are still held by {', '.join(places)}")
        self._device.give_back()
        if left := device.still_mapped(addresses):
            raise StillHeld(f"{self.name} is still mapped at {', '.join(map(hex, left))}")

    def _group(self) -> tuple[Any, str | None]:
        from vllm.distributed import parallel_state

        group = parallel_state.get_tp_group().cpu_group
        if self._place != (group.size(), group.rank()):
            size, rank = self._place
            return group, (
                f"{self.name} is of rank {rank} of {size}, its group of {group.rank()} of {group.size()}"
            )
        return group, None

    def _groups(self) -> dict[int, Any] | None:
        """Return vLLM's table from workspaces to groups, which 0.27 and later have."""
        return getattr(self._module, "_fi_ar_workspace_groups", None)

    def _where(self) -> str:
        return ", ".join(place.where for place in self._places) or "nothing else"


def has_multicast(workspace: Any) -> bool:
    """Return whether a workspace uses a multicast address (MNNVL's only do)."""
    return bool(getattr(workspace, "mc_ptr", 0)) if workspace.backend == "mnnvl" else False


def recipe(workspace: Any) -> Callable[[Any, Any], Any]:
    """Return what makes a workspace of the same size, given a communication backend and its group."""
    kind = type(workspace)
    if workspace.backend == "trtllm":
        import torch

        size = workspace.metadata
        given = {name: size[name] for name in ("tp_size", "tp_rank", "max_token_num", "hidden_dim")}
        # All that the class makes of the type is whether its buffers are for float32.
        given["dtype"] = torch.float32 if size["use_fp32_lamport"] else torch.float16
        return lambda backend, group: kind(**given, comm_backend=backend, group=group)
    ranks = workspace.world_size
    mapping = sys.modules[kind.__module__].Mapping(
        world_size=ranks, rank=workspace.rank, gpus_per_node=ranks, tp_size=ranks
    )
    buffer = workspace.buffer_size_bytes
    return lambda backend, _group: kind(mapping=mapping, buffer_size_in_bytes=buffer, comm_backend=backend)
