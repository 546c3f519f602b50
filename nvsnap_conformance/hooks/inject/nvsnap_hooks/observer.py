"""What a rank really holds, whatever the hooks claim.

Shares no code with the reference hooks but the names: it searches the heap and asks the kernel, where the
hooks walk the engine's own registries, so that one blind spot is not common to both.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
import types
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

from nvsnap_hooks.footprint import footprint

_SHM = "/dev/shm/"  # noqa: S108 - the kernel's shared memory, not a temporary file of ours
_LISTEN = "0A"
_FLASHINFER = "vllm.distributed.device_communicators.flashinfer_all_reduce"
_BATCH = 10_000
_INERT = frozenset(
    {
        types.BuiltinFunctionType,
        types.ClassMethodDescriptorType,
        types.CodeType,
        types.FunctionType,
        types.GenericAlias,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        types.MethodDescriptorType,
        types.ModuleType,
        types.UnionType,
        types.WrapperDescriptorType,
        classmethod,
        property,
        staticmethod,
        type,
        weakref.ref,
    }
)
"""Half of a worker's heap. None of it refers to an engine's object by itself: the cells, tuples and
dictionaries of these do, and are objects of their own."""
_DEVICE_ORDINAL = 9
"""``CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL``, an int."""


class Observer:
    """Takes snapshots of this rank. Changes nothing; holds only weak references to what it saw."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self._worker = worker
        self._options = options
        self._serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count(1)
        self._peers: dict[str, set[int]] = {}

    def snapshot(self) -> dict[str, Any]:
        """Return ``{"rank", "pid", "resources", "counts", "shm", "sockets", "fds"}``.

        ``resources`` maps a stable name to ``{"kind", "live", "identity", ...}``: ``identity`` is a serial
        number that a new object gets anew, so that a rebuilt resource is told from one that was never
        released; ``ranks`` are global ranks. ``shm`` lists mapped files with their sizes in bytes. On CUDA
        ``memory`` is the device's free and total memory in bytes, with
        :func:`nvsnap_hooks.footprint.footprint`.
        """
        heap = _Heap()
        segments = mapped_segments()
        resources: dict[str, dict[str, Any]] = {}
        named: set[int] = set()
        for name, coordinator in sorted(heap.coordinators.items()):
            resources |= self._of_coordinator(name, coordinator, segments, named)
        default = _default_group()
        if default is not None:
            named.add(id(default))
            resources["world/default"] = self._group(default)
        # Torch's own names are reused, so groups of no coordinator go by description and ranks.
        for group in sorted((g for g in heap.groups if id(g) not in named), key=self._serial):
            entry = self._group(group)
            name = f"loose/{group.group_desc}{entry['ranks']}".replace(" ", "")
            twins = sum(other.startswith(name) for other in resources)
            resources[f"{name}#{twins}" if twins else name] = entry
        resources |= self._control(heap)
        resources |= self._device_wide(heap)
        return {
            "rank": self._worker.rank,
            "pid": os.getpid(),
            "resources": resources,
            "counts": {
                "process_groups": len(heap.groups),
                "coordinators": len(heap.coordinators),
                "device_communicators": heap.count("DeviceCommunicatorBase"),
                "shared_memory_communicators": heap.count("_CPUSHMDistributed"),
                "message_queues": heap.count("MessageQueue"),
                "all2all_managers": heap.count("All2AllManagerBase"),
                "nccl_communicators": heap.count("PyNcclCommunicator"),
                "custom_all_reduces": heap.count("CustomAllreduce"),
                "cuda_graphs": heap.count("CUDAGraph"),
                "flashinfer_workspaces": len(_flashinfer_workspaces()),
            },
            "shm": [{"path": path, "bytes": size} for path, size in sorted(segments.items())],
            "sockets": _sockets(),
            "fds": len(list(Path("/proc/self/fd").iterdir())),
        } | _device_memory(self._worker)

    def _of_coordinator(
        self, name: str, coordinator: Any, segments: dict[str, int], named: set[int]
    ) -> dict[str, dict[str, Any]]:
        from torch.distributed import ProcessGroup

        found: dict[str, dict[str, Any]] = {}
        for label in ("device", "cpu"):
            group = getattr(coordinator, f"{label}_group", None)
            if isinstance(group, ProcessGroup):
                named.add(id(group))
                found[f"{name}/{label}"] = self._group(group)
        communicator = getattr(coordinator, "device_communicator", None)
        module = getattr(communicator, "dist_module", None)
        # By the kernel's account, whether or not an object still stands for the segments.
        own = sorted(path for path in segments if f"-{name}-[" in path and "-cpushm_" in path)
        held = type(module).__name__ == "_CPUSHMDistributed"
        if held or own:
            found[f"{name}/shm"] = {
                "kind": "shared-memory-communicator",
                "live": True,
                "identity": self._serial(module) if held else None,
                "segments": own,
            }
        queue = getattr(coordinator, "mq_broadcaster", None)
        if type(queue).__name__ == "MessageQueue":
            found[f"{name}/broadcaster"] = self._object("message-queue", queue)
        manager = getattr(communicator, "all2all_manager", None)
        if _derives(type(manager), "All2AllManagerBase") and _exchange_is_live(manager):
            found[f"{name}/all2all"] = self._object("all2all-manager", manager)
        return found | self._peer_memory(name, communicator)

    def _peer_memory(self, name: str, communicator: Any) -> dict[str, dict[str, Any]]:
        """Find what maps memory of peers on CUDA: communicators by what they hold, mappings by the driver."""
        found: dict[str, dict[str, Any]] = {}
        for kind, attribute, holds in (
            ("nccl-communicator", "pynccl_comm", _has_nccl),
            ("custom-allreduce", "ca_comm", _has_native),
            ("quick-allreduce", "qr_comm", _has_native),
            ("symmetric-memory", "symm_mem_comm", _has_buffer),
        ):
            thing = getattr(communicator, attribute, None)
            # A class of vLLM's own: what stands in its place while it is released holds nothing.
            if thing is not None and type(thing).__module__.startswith("vllm.") and holds(thing):
                found[f"{name}/{kind}"] = self._object(kind, thing)
                if attribute == "pynccl_comm":
                    found[f"{name}/{kind}"]["suspended"] = bool(getattr(thing, "_suspended", False))
                if attribute == "ca_comm":
                    self._peers[name] = _peers(thing)
        held = f"{name}/custom-allreduce" in found
        # Remembered from when it was there: closing it may leave what it mapped of its peers.
        left = set() if held else {at for at in self._peers.get(name, ()) if _on_another_device(at)}
        if left:
            found[f"{name}/custom-allreduce"] = {
                "kind": "custom-allreduce",
                "live": True,
                "identity": None,
                "peers_mapped": sorted(hex(at) for at in left),
            }
        return found

    def _control(self, heap: _Heap) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for process in heap.worker_processes:
            for name, attribute in (
                ("executor/requests", "rpc_broadcast_mq"),
                ("executor/replies", "worker_response_mq"),
            ):
                queue = getattr(process, attribute, None)
                if queue is not None:
                    found[name] = self._object("control-queue", queue)
        return found

    def _device_wide(self, heap: _Heap) -> dict[str, dict[str, Any]]:
        """Find workspaces with mapped memory by vLLM's slots, captured graphs by their wrappers' entries."""
        found: dict[str, dict[str, Any]] = {}
        for slot, workspace in _flashinfer_workspaces().items():
            memories = _memories(workspace)
            live = sum(bool(getattr(memory, "mapped", True)) for memory in memories)
            if live:
                self._peers[slot] = {at for memory in memories for at in _peers_in(memory)}
                found[slot] = self._object("flashinfer-workspace", workspace) | {
                    # One object before and after: what is given back and mapped anew is its memory.
                    "identity": None,
                    "partial": live < len(memories),
                    "stale_group": _stale_group(workspace),
                }
        # Symmetric memory of torch is unmapped with its last reference, whoever has that.
        for slot in ("flashinfer/normal", "flashinfer/quant"):
            left = (
                set() if slot in found else {at for at in self._peers.get(slot, ()) if _on_another_device(at)}
            )
            if left:
                found[slot] = {
                    "kind": "flashinfer-workspace",
                    "live": True,
                    "identity": None,
                    "peers_mapped": sorted(hex(at) for at in left),
                }
        graphs = sum(
            any(getattr(entry, name, None) is not None for name in ("cudagraph", "capture"))
            for wrapper in heap.graph_wrappers
            for attribute in ("concrete_cudagraph_entries", "entries")
            for entry in vars(wrapper).get(attribute, {}).values()
        )
        # Whoever holds one: wrappers, managers, or something that nobody here knows of.
        graphs = max(graphs, heap.count("CUDAGraph"))
        if graphs:
            found["cuda-graphs"] = {"kind": "cuda-graphs", "live": True, "identity": None, "number": graphs}
        return found

    def _group(self, group: Any) -> dict[str, Any]:
        from torch.distributed import distributed_c10d as c10d

        registered = group in c10d._world.pg_map
        return self._object("process-group", group) | {
            "registered": registered,
            "backend": c10d._world.pg_map[group][0] if registered else None,
            "ranks": sorted(c10d._world.pg_group_ranks[group]) if registered else None,
        }

    def _object(self, kind: str, thing: Any) -> dict[str, Any]:
        return {"kind": kind, "live": True, "identity": self._serial(thing)}

    def _serial(self, thing: Any) -> int:
        if thing not in self._serials:
            self._serials[thing] = next(self._next)
        return self._serials[thing]


class _Heap:
    """One pass over every object of the process."""

    def __init__(self) -> None:
        from torch.distributed import ProcessGroup

        self.groups: list[Any] = []
        self.coordinators: dict[str, Any] = {}
        self.worker_processes: list[Any] = []
        objects = [thing for thing in _all_objects() if type(thing) not in _INERT]
        self._kinds = Counter(map(type, objects))
        self.graph_wrappers: list[Any] = []
        names = ("GroupCoordinator", "WorkerProc", "CUDAGraphWrapper", "BreakableCUDAGraphWrapper")
        wanted = {kind for kind in self._kinds if any(_derives(kind, name) for name in names)}
        for thing in [thing for thing in objects if type(thing) in wanted]:
            if _derives(type(thing), "WorkerProc"):
                self.worker_processes.append(thing)
            elif not _derives(type(thing), "GroupCoordinator"):
                self.graph_wrappers.append(thing)
            else:
                self.coordinators[thing.unique_name] = thing
        seen: set[int] = set()
        # A process group is not tracked by the collector itself, only what refers to it is.
        for start in range(0, len(objects), _BATCH):
            referents = gc.get_referents(*objects[start : start + _BATCH])
            if ProcessGroup not in set(map(type, referents)):
                continue
            for referent in referents:
                if type(referent) is ProcessGroup and id(referent) not in seen:
                    seen.add(id(referent))
                    self.groups.append(referent)

    def count(self, class_name: str) -> int:
        """Return how many objects there are of a class with this name, or of one derived from it."""
        return sum(number for kind, number in self._kinds.items() if _derives(kind, class_name))


def _all_objects() -> list[Any]:
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        if frozen:
            gc.freeze()


def _derives(kind: type, class_name: str) -> bool:
    return any(klass.__name__ == class_name for klass in kind.__mro__)


def _default_group() -> Any:
    from torch.distributed import distributed_c10d as c10d

    return c10d._world.default_pg


def _flashinfer_workspaces() -> dict[str, Any]:
    """Return vLLM's workspaces by name; one that is in both slots has the name of the first."""
    module = sys.modules.get(_FLASHINFER)
    found: dict[str, Any] = {}
    for name, slot in (
        ("flashinfer/normal", "_fi_ar_workspace"),
        ("flashinfer/quant", "_fi_ar_quant_workspace"),
    ):
        workspace = getattr(module, slot, None)
        if type(workspace).__module__.startswith("nvsnap_hooks."):
            continue  # what stands in its place while it is released
        if workspace is not None and not any(workspace is other for other in found.values()):
            found[name] = workspace
    return found


def _memories(workspace: Any) -> list[Any]:
    if getattr(workspace, "_destroyed", False):
        return []
    handle = getattr(workspace, "handle", None)
    single = handle if hasattr(handle, "buffer_ptrs") else getattr(handle, "mcast_device_memory", None)
    found = getattr(workspace, "mem_handles", None) or ([single] if single is not None else [])
    # One of a kind that is not known here is live as long as it is there.
    return list(found) or [workspace]


def _exchange_is_live(manager: Any) -> bool:
    """Return whether a manager holds something; the one-sided one holds its mapped workspace only."""
    # Not vars(): that makes a dictionary, which the collector may not track, and hides what is in it.
    held = [getattr(manager, name) for name in ("moe_alltoall", "communication") if hasattr(manager, name)]
    if not held:
        return True
    if held[0] is None:
        return False
    module = sys.modules.get("flashinfer.comm.mnnvl")
    records = getattr(getattr(module, "MnnvlMemory", None), "allocated_map", {})
    exchange = getattr(held[0], "alltoall", held[0])
    record = records.get(getattr(getattr(exchange, "mnnvl_mem", None), "ptr", None))
    # What cannot be told counts as held.
    return bool(getattr(record, "mapped", True))


def _has_nccl(communicator: Any) -> bool:
    return bool(getattr(communicator, "available", False) and not communicator.disabled)


def _has_native(communicator: Any) -> bool:
    return bool(getattr(communicator, "_ptr", 0))


def _has_buffer(communicator: Any) -> bool:
    return getattr(communicator, "buffer", None) is not None


def _peers(communicator: Any) -> set[int]:
    """Return the addresses at which a custom all-reduce maps buffers of other ranks."""
    return {
        address
        for pointers in (communicator.meta_ptrs, communicator.buffer_ptrs)
        for rank, address in enumerate(pointers)
        if rank != communicator.rank
    }


def _peers_in(memory: Any) -> set[int]:
    """Return the addresses at which torch's symmetric memory maps that of other ranks; none for others."""
    pointers = getattr(memory, "buffer_ptrs", ())
    return {int(address) for rank, address in enumerate(pointers) if rank != memory.rank}


def _on_another_device(address: int) -> bool:
    """Ask the driver whether there is memory of another device at an address; False where it cannot tell."""
    import torch

    if not torch.cuda.is_available():
        return False
    ordinal = ctypes.c_int(-1)
    ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    ask.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    code = ask(ctypes.byref(ordinal), _DEVICE_ORDINAL, address)
    return bool(code == 0 and ordinal.value != torch.cuda.current_device())


def _device_memory(worker: Any) -> dict[str, Any]:
    if getattr(getattr(worker, "device", None), "type", None) != "cuda":
        return {}
    import torch

    free, total = torch.cuda.mem_get_info(worker.device)
    return {"memory": {"free": free, "total": total} | footprint(worker)}


def _stale_group(workspace: Any) -> bool:
    """Return whether the group that vLLM notes for a workspace is one that torch does not know (any more)."""
    from torch.distributed import distributed_c10d as c10d

    table = getattr(sys.modules[_FLASHINFER], "_fi_ar_workspace_groups", None)
    if table is None:
        return False  # vLLM 0.26 notes none
    group = table.get(id(workspace))
    return not any(group is known for known in c10d._world.pg_map)


def mapped_segments() -> dict[str, int]:
    """Return the files below /dev/shm that this process maps, with the bytes mapped of each."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(_SHM):
            start, _, end = fields[0].partition("-")
            path = fields[5].removesuffix(" (deleted)")
            found[path] = found.get(path, 0) + int(end, 16) - int(start, 16)
    return found


def _sockets() -> dict[str, int]:
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    listening = 0
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                listening += 1
    return {"open": len(inodes), "listening": listening}
