"""Stand-ins for what only GPUs hold, in a real worker on CPU, behind vLLM's own names.

FlashInfer workspaces, all-to-all managers of vLLM's own (``AgRsAll2AllManager``, by its own constructor) and
a captured graph are put where vLLM keeps them, and the tensor-parallel communicator gets the checkpoint
methods of ``CudaCommunicator``, so that the engine's own code finds them. A workspace keeps FlashInfer's
protocol (0.7.0, ``comm/allreduce.py``): repeated calls are no-ops, a barrier of all ranks is part of each, a
half-mapped set is an error for good. The barriers run over the group's real backend. As on CUDA, they cannot
be mapped or unmapped in a thread that does not have the worker's device.

Calls are logged in their order, and one of them can be made to fail on one rank.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from typing import Any

from nvsnap_hooks import flashinfer, graphs, inventory, nccl_standins
from nvsnap_hooks.thread_device import ThreadDevice

GROUP = "tp:0"
EXPERTS = "ep:0"
"""Where vLLM has its all-to-all manager; a model without experts has no such coordinator."""

MEMORIES = 3

_planted: dict[str, Any] = {}


class InjectedError(RuntimeError):
    """Told to fail."""


class NoCurrentDeviceError(RuntimeError):
    """The worker's device is not the calling thread's, as CUDA words it."""


class Log:
    """The calls on this rank, in order; ``fault`` is the one that fails, at its ``nth`` time."""

    def __init__(self, fault: dict[str, Any] | None) -> None:
        self.events: list[dict[str, Any]] = []
        self._fault = fault

    def note(self, what: str, name: str) -> None:
        """Write an event down; raise :class:`InjectedError` where that is what was asked for."""
        seen = sum(event["what"] == what for event in self.events)
        self.events.append({"what": what, "name": name})
        if self._fault is not None and (what, seen) == (self._fault["what"], self._fault.get("nth", 0)):
            self._fault = None
            raise InjectedError(f"{what} {name} fails, as asked for")


class Backend:
    """FlashInfer's communication backend over a torch group, as far as a workspace uses it."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        import torch.distributed as dist

        dist.barrier(group=self.group)


class Memory:
    """One shared memory of a workspace."""

    def __init__(self, backend: Backend) -> None:
        self.mapped = True
        self.comm_backend = backend


class StandInWorkspace:
    """A workspace of the TRT-LLM kind."""

    backend = "trtllm"
    mc_ptr = 1
    unsupported = False
    """Whether it lies in torch's symmetric memory, so that it can be neither unmapped nor mapped again."""

    def __init__(self, name: str, group: Any, log: Log, device: ThreadDevice) -> None:
        self.name = name
        self.mem_handles = [Memory(Backend(group)) for _ in range(MEMORIES)]
        self.log = log
        self.device = device
        self._destroyed = False

    def checkpoint_prepare(self) -> None:
        """Unmap every memory between two barriers."""
        self.log.note("workspace-prepare", self.name)
        self._require_able("prepare")
        if not self._whole(mapped=True):
            return
        for memory in self.mem_handles:
            memory.comm_backend.barrier()
            memory.mapped = False
        self.mem_handles[0].comm_backend.barrier()

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Map every memory over the given backend."""
        self.log.note("workspace-restore", self.name)
        self._require_able("restore")
        if not self._whole(mapped=False):
            return
        for memory in self.mem_handles:
            # The second of three: what a failure in the middle leaves behind can only be thrown away.
            self.log.note("memory-restore", self.name)
            memory.mapped, memory.comm_backend = True, comm_backend
        comm_backend.barrier()

    def destroy(self) -> None:
        """Give everything back, addresses too."""
        self._destroyed = True
        self.mem_handles = []

    def _require_able(self, verb: str) -> None:
        if self.unsupported:
            raise NotImplementedError(f"{verb} of a workspace that is backed by torch symmetric memory")
        if not self.device.is_current():
            thread = threading.current_thread().name
            self.log.note("no-device", f"{verb} in {thread}")
            raise NoCurrentDeviceError(
                f"CUDA error 101 (cudaErrorInvalidDevice): {self.name} was called in {thread}"
            )

    def _whole(self, *, mapped: bool) -> bool:
        states = {memory.mapped for memory in self.mem_handles}
        if len(states) > 1:
            raise RuntimeError(f"the memories of {self.name} are in an inconsistent state")
        return states == {mapped}


class Kernel:
    """What holds a manager beside its communicator, as the kernels of layers with experts do."""

    def __init__(self, manager: Any) -> None:
        self.all2all_manager = manager


for _family in (Backend, Memory, StandInWorkspace, Kernel):
    # Hooks must follow what these hold, as they do the engine's, and not pass them over as ours.
    _family.__module__ = "flashinfer.stand_in"


class Graph:
    """A captured graph; its end is an event."""


class StandIns:
    """Puts the stand-ins into this worker, tells what happened to them, and takes them out again."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self._worker = worker
        self._options = options

    def plant(
        self,
        *,
        alias: bool = True,
        permute: bool = False,
        unlike: bool = False,
        fault: dict[str, Any] | None = None,
        unsupported: bool = False,
        old_nccl: str | None = None,
    ) -> dict[str, Any]:
        """Plant; both slots hold one workspace where ``alias``.

        On the last rank ``permute`` turns the order round in which the groups are registered, and ``unlike``
        makes its workspace one of another backend. ``fault`` is ``{"rank", "what", "nth"}``. Where
        ``unsupported`` no workspace can be unmapped, on any rank, and each says so. With ``old_nccl`` there
        is a communicator of NCCL's, over a library that has no ``ncclCommSuspend`` on every rank (``every``)
        or on the last one only (``last``).
        """
        import vllm.distributed.device_communicators.flashinfer_all_reduce as module
        from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
        from vllm.distributed import parallel_state
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

        if _planted:
            raise RuntimeError("stand-ins are there already")
        last = self._worker.rank == self._worker.parallel_config.world_size - 1
        log = Log(fault if fault is not None and fault["rank"] == self._worker.rank else None)
        coordinator = _coordinator()
        communicator = coordinator.device_communicator
        device = ThreadDevice(self._worker.device)
        normal = StandInWorkspace("normal", coordinator.cpu_group, log, device)
        quant = normal if alias else StandInWorkspace("quant", coordinator.cpu_group, log, device)
        normal.unsupported = quant.unsupported = unsupported
        if unlike and last:
            normal.backend = "mnnvl"
        _planted.update(
            log=log,
            device=device,
            had_backend=hasattr(module, "TorchDistBackend"),
            registered=list(parallel_state._groups.items()),
            communicator=communicator,
            workspaces={"normal": normal} | ({} if alias else {"quant": quant}),
            # On GPUs FlashInfer's workspaces are in the slots. They stay mapped, out of sight; hooks that
            # make groups anew follow them in vLLM's table, as any other holder.
            slots={slot: getattr(module, slot) for slot in flashinfer.SLOTS.values()},
        )
        if not _planted["had_backend"]:
            module.TorchDistBackend = Backend
        module._fi_ar_workspace, module._fi_ar_quant_workspace = normal, quant
        for workspace in (normal, quant):
            module._fi_ar_workspace_groups[id(workspace)] = coordinator.cpu_group
        for name in ("checkpoint_prepare", "checkpoint_restore"):
            setattr(communicator, name, types.MethodType(getattr(CudaCommunicator, name), communicator))
        self._plant_managers()
        if old_nccl is not None:
            old = last or old_nccl == "every"
            _planted["had_nccl"] = [nccl_standins.plant(communicator, old=old)]
        graph = Graph()
        weakref.finalize(graph, log.events.append, {"what": "graph-dropped", "name": "cuda-graphs"})
        wrapper = object.__new__(CUDAGraphWrapper)
        wrapper.concrete_cudagraph_entries = {
            "stand-in": CUDAGraphEntry(batch_descriptor=None, cudagraph=graph)
        }
        CUDAGraphWrapper._all_instances.add(wrapper)
        _planted["wrapper"] = wrapper
        if permute and last:
            turned = list(reversed(parallel_state._groups.items()))
            parallel_state._groups.clear()
            parallel_state._groups.update(turned)
        _wrap_group_calls(log)
        device.watch()
        return {"planted": sorted(_planted["workspaces"])}

    def _plant_managers(self) -> None:
        """Plant one manager at the experts' communicator, in a kernel too, and one that stands alone."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

        coordinator = _coordinator(EXPERTS, GROUP)
        with set_current_vllm_config(self._worker.vllm_config):
            other, manager = (AgRsAll2AllManager(coordinator.cpu_group) for _ in range(2))
        communicator = coordinator.device_communicator
        _planted.update(exchange=coordinator, had_manager=communicator.all2all_manager)
        # By a weak reference: what is planted must go with what the engine has of it.
        _planted.update(manager=weakref.ref(manager), kernel=Kernel(manager), other=Kernel(other))
        communicator.all2all_manager = manager

    def renew_group(self) -> dict[str, Any]:
        """Rebuild the communicator's CPU group under the feet of the hooks, as an orchestrator may.

        Only where the hooks have left it alone: ``{"renewed": false}`` otherwise.
        """
        import torch.distributed as dist
        from torch.distributed import ProcessGroup

        coordinator = _coordinator()
        old = coordinator.cpu_group
        if not isinstance(old, ProcessGroup):
            return {"renewed": False}
        new = dist.new_group(dist.get_process_group_ranks(old), backend="gloo", group_desc=old.group_desc)
        coordinator.cpu_group = coordinator.device_communicator.cpu_group = new
        _planted["renewed"] = (old, new)
        return {"renewed": True}

    def report(self) -> dict[str, Any]:
        """Return the events, and of each workspace whether it is mapped, and over the group in force."""
        group = getattr(_coordinator(), "cpu_group", None)
        return {
            "events": _planted["log"].events,
            "workspaces": {
                name: {
                    "mapped": [memory.mapped for memory in workspace.mem_handles],
                    "current": all(_group_of(m.comm_backend) is group for m in workspace.mem_handles),
                }
                for name, workspace in _planted["workspaces"].items()
            },
            "all2all": _managers(),
            "graphs": graphs.graphs_of(_planted["wrapper"]),
        }

    def remove(self) -> dict[str, Any]:
        """Take everything out; ``{"removed": false}`` where nothing is planted."""
        import torch.distributed as dist
        from vllm.distributed import parallel_state

        if not _planted:
            return {"removed": False}
        _planted["device"].unwatch()
        module: Any = sys.modules[flashinfer.MODULE]
        for slot, workspace in _planted["slots"].items():
            setattr(module, slot, workspace)
        for workspace in _planted["workspaces"].values():
            module._fi_ar_workspace_groups.pop(id(workspace), None)
        if not _planted["had_backend"]:
            del module.TorchDistBackend
        _planted["exchange"].device_communicator.all2all_manager = _planted["had_manager"]
        for name in ("checkpoint_prepare", "checkpoint_restore"):
            _planted["communicator"].__dict__.pop(name, None)
        for had in _planted.get("had_nccl", ()):
            nccl_standins.remove(_planted["communicator"], had)
        for name, original in _planted["wrapped"].items():
            setattr(dist, name, original)
        parallel_state._groups.clear()
        parallel_state._groups.update(_planted["registered"])
        if "renewed" in _planted:
            old, new = _planted["renewed"]
            coordinator = _coordinator()
            coordinator.cpu_group = coordinator.device_communicator.cpu_group = old
            dist.destroy_process_group(new)
        _planted.clear()
        return {"removed": True}


def _group_of(backend: Any) -> Any:
    """Return the group of a backend: ours, or FlashInfer's own ``TorchDistBackend`` (0.6.15 to 0.7.2)."""
    return backend.group if isinstance(backend, Backend) else backend._group


def _coordinator(*names: str) -> Any:
    """Return the first of these coordinators that there is, by default the tensor-parallel one."""
    known = {name: found for name, found, _aliases in inventory.coordinators()}
    return next(known[name] for name in names or (GROUP,) if name in known)


def _managers() -> dict[str, Any]:
    """Return what became of the all-to-all managers.

    ``name`` is the observer's, ``alive`` says of the planted object whether it exists, ``there`` whether
    there is a manager where it was, ``current`` whether that one is over the group in force, ``shared``
    whether the kernel holds the same one. ``apart`` is true while the lone one is another, over that group.
    """
    coordinator = _planted["exchange"]
    group = coordinator.cpu_group
    manager = coordinator.device_communicator.all2all_manager
    other = _planted["other"].all2all_manager
    there = _is_manager(manager)
    return {
        "name": f"{coordinator.unique_name}/all2all",
        "alive": _planted["manager"]() is not None,
        "there": there,
        "current": there and manager.cpu_group is group,
        "shared": _planted["kernel"].all2all_manager is manager,
        "apart": _is_manager(other) and other is not manager and other.cpu_group is group,
    }


def _is_manager(thing: Any) -> bool:
    from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

    return isinstance(thing, All2AllManagerBase)


def _wrap_group_calls(log: Log) -> None:
    """Log the making and destroying of groups, whoever calls for it."""
    import torch.distributed as dist

    destroy, make = dist.destroy_process_group, dist.new_group
    # Torch's own names differ between ranks for groups of one rank each, and descriptions are not set.
    names = {
        id(getattr(coordinator, f"{label}_group")): f"{name}/{label}"
        for name, coordinator, _aliases in inventory.coordinators()
        for label in ("device", "cpu")
    }

    def destroying(group: Any = None) -> None:
        log.note("destroy-group", "world" if group is None else names.get(id(group), "unknown"))
        destroy(group)

    def making(*args: Any, **kwargs: Any) -> Any:
        log.note("new-group", f"{args} {kwargs.get('backend')}")
        return make(*args, **kwargs)

    _planted["wrapped"] = {"destroy_process_group": destroy, "new_group": make}
    dist.destroy_process_group, dist.new_group = destroying, making
