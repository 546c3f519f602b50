"""What this rank of a vLLM engine holds across ranks, as the reference hooks see it, by stable names."""

from __future__ import annotations

import weakref
from typing import Any

from nvsnap_hooks import communicators, exchange, flashinfer, graphs, held_workspace
from nvsnap_hooks.device import Device
from nvsnap_hooks.holders import find_holders, instances_of
from nvsnap_hooks.resources import (
    Absent,
    Broadcaster,
    DefaultGroup,
    Group,
    Kept,
    Left,
    SharedMemory,
)
from nvsnap_hooks.teardown import Teardown

WORLD = "world/default"

_process: list[weakref.ref[Any]] = []


def coordinators() -> list[tuple[str, Any, tuple[str, ...]]]:
    """Return name, coordinator and further names of every living GroupCoordinator, sorted by name.

    Sorted, since the order of registration may differ between ranks; one that is registered under two
    names comes once.
    """
    from vllm.distributed import parallel_state

    names: dict[int, list[str]] = {}
    alive: dict[int, Any] = {}
    for name in sorted(parallel_state._groups):
        coordinator = parallel_state._groups[name]()
        if coordinator is not None:
            names.setdefault(id(coordinator), []).append(name)
            alive[id(coordinator)] = coordinator
    return [(known[0], alive[key], tuple(known[1:])) for key, known in names.items()]


def take(worker: Any = None, teardown: Teardown | None = None) -> list[Any]:
    """Return the resources of this rank in the order in which they are released.

    Captured graphs go first, for they hold collectives: ``destroy_process_group`` never returns while one
    with NCCL's is there (measured on two H200). Workspaces, message queues and communicators go before the
    groups that they use, NCCL's last of them, and the default group last of all.
    """
    from torch.distributed import distributed_c10d as c10d

    chosen = teardown or Teardown()
    found: list[Any] = [*_device_wide(worker, chosen), *_control_queues()]
    late: list[Any] = []
    groups: list[Group] = []
    for name, coordinator, aliases in coordinators():
        found += _communicator(name, coordinator, worker)
        if worker is not None and worker.device.type == "cuda":
            early, own = _device_communicators(name, coordinator, worker, chosen)
            found += early
            late += own
        for label in ("device", "cpu"):
            group = getattr(coordinator, f"{label}_group", None)
            resource = f"{name}/{label}"
            if not _registered(group):
                found.append(_without(resource, group))
                continue
            members = [list(ranks) for ranks in coordinator.group_ranks]
            groups.append(Group(resource, group, members, tuple(f"{alias}/{label}" for alias in aliases)))
    known = {id(group.group) for group in groups}
    default = c10d._get_default_group()
    for group in list(c10d._world.pg_map):
        if id(group) not in known and group is not default:
            ranks = list(c10d._world.pg_group_ranks[group])
            name = f"loose/{group.group_desc}{ranks}".replace(" ", "")
            twins = sum(other.name.startswith(name) for other in groups)
            groups.append(Group(f"{name}#{twins}" if twins else name, group, [ranks]))
    groups.append(DefaultGroup(WORLD, default, [list(range(default.size()))]))
    if chosen.nccl == "live":
        why = "left alive on request (teardown: nccl)"
        return [*found, *late, *(Left(group.name, group.kind, why) for group in groups)]
    managers = [resource.manager for resource in found if isinstance(resource, exchange.OverGroups)]
    _attach_holders(groups, besides=managers)
    return [*found, *late, *groups]


def rebuild_order(resources: list[Any]) -> list[Any]:
    """Return the resources in the order in which they come back: that of their release, turned round.

    Groups come first, the default one before all, then NCCL's communicators, then the others, then what uses
    them, and captured graphs last. Within a kind they go by name, as on every other rank.
    """
    kinds = [*reversed(communicators.KINDS)]

    def place(resource: Any) -> tuple[int, int, str]:
        if isinstance(resource, DefaultGroup):
            return 0, 0, resource.name
        if isinstance(resource, Group):
            return 1, 0, resource.name
        if type(resource) in kinds:
            return 2, kinds.index(type(resource)), resource.name
        return (4 if isinstance(resource, graphs.Graphs) else 3), 0, resource.name

    return sorted(resources, key=place)


def _registered(group: Any) -> bool:
    from torch.distributed import ProcessGroup
    from torch.distributed import distributed_c10d as c10d

    return isinstance(group, ProcessGroup) and group in c10d._world.pg_map


def _without(name: str, group: Any) -> Absent:
    from torch.distributed import ProcessGroup

    if isinstance(group, ProcessGroup):
        return Kept(name, "process-group", "a stateless group, unknown to torch.distributed")
    return Absent(name, "process-group", "the coordinator has none")


def _communicator(name: str, coordinator: Any, worker: Any) -> list[Any]:
    communicator = coordinator.device_communicator
    module = getattr(communicator, "dist_module", None)
    found: list[Any] = [exchange.of_communicator(f"{name}/all2all", communicator, worker)]
    if coordinator.mq_broadcaster is None:
        found.append(Absent(f"{name}/broadcaster", Broadcaster.kind, "the coordinator has none"))
    else:
        found.append(Broadcaster(f"{name}/broadcaster", coordinator))
    if type(module).__name__ == "_CPUSHMDistributed":
        found.append(SharedMemory(f"{name}/shm", communicator))
    else:
        found.append(Absent(f"{name}/shm", SharedMemory.kind, "the group does not use shared memory"))
    return found


def _control_queues() -> list[Any]:
    """Return the queues between the engine's executor and this worker.

    They carry the very RPC that ``restore`` is asked by, so they stay, and the report says so.
    """
    process = _worker_process()
    found: list[Any] = []
    for name, attribute in (
        ("executor/requests", "rpc_broadcast_mq"),
        ("executor/replies", "worker_response_mq"),
    ):
        if getattr(process, attribute, None) is None:
            found.append(Absent(name, "control-queue", "the executor runs in this process"))
        else:
            found.append(Kept(name, "control-queue", "carries the call that asks for the restore"))
    return found


def _worker_process() -> Any:
    """Return the executor's object for this process, ``None`` in the executor's own; it stays the same."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if not _process or _process[0]() is None:
        _process[:] = [weakref.ref(found) for found in instances_of(WorkerProc)[:1]]
    return _process[0]() if _process else None


def _device_communicators(
    name: str, coordinator: Any, worker: Any, teardown: Teardown
) -> tuple[list[Any], list[Any]]:
    """Return a coordinator's communicators on CUDA: those that go first, and NCCL's."""
    modes = {"nccl-communicator": teardown.nccl, "custom-allreduce": teardown.custom_allreduce}
    early: list[Any] = []
    late: list[Any] = []
    for resource in communicators.of_coordinator(name, coordinator, Device(worker.device), modes):
        if resource.held() and modes.get(resource.kind) == "live":
            option = "nccl" if resource.kind == "nccl-communicator" else resource.kind
            why = f"left alive on request (teardown: {option})"
            resource = Left(resource.name, resource.kind, why)  # noqa: PLW2901 - what becomes of it
        (late if resource.kind == "nccl-communicator" else early).append(resource)
    return early, late


def _device_wide(worker: Any, teardown: Teardown) -> list[Any]:
    captured = graphs.Graphs(worker)
    if not captured.held():
        found: list[Any] = [Absent(captured.name, captured.kind, "no graph is captured")]
    elif teardown.cuda_graphs == "kept":
        why = "kept on request (teardown: cuda-graphs): right only where every address comes back"
        found = [Left(captured.name, captured.kind, why)]
    else:
        found = [captured]
    workspaces = {
        name: held_workspace.resource(name, workspace, aliases, Device(getattr(worker, "device", None)))
        for name, workspace, aliases in flashinfer.held()
        if flashinfer.mapped(workspace)
    }
    for name in flashinfer.SLOTS:
        if name in workspaces and teardown.flashinfer_workspace == "live":
            why = "left alive on request (teardown: flashinfer-workspace)"
            found.append(Left(name, flashinfer.Workspace.kind, why))
        elif name in workspaces:
            found.append(workspaces[name])
        elif not any(name in workspace.aliases for workspace in workspaces.values()):
            found.append(Absent(name, flashinfer.Workspace.kind, "there is none"))
    return found


def _attach_holders(groups: list[Group], *, besides: list[Any]) -> None:
    """Find what holds the groups; ``besides`` go before the groups do, so nothing may hold on to them."""
    from torch.distributed import distributed_c10d as c10d

    targets = [group.group for group in groups]
    registries = (c10d._world, c10d._world.__dict__, c10d._world.pg_map, c10d._world.pg_to_tag)
    lists = tuple(c10d._world.tags_to_pg.values()) + tuple(group.__dict__ for group in groups)
    found = find_holders(targets, ignore=(*registries, *lists, *besides))
    for group, (places, stuck) in zip(groups, found, strict=True):
        # A dictionary of nothing but numbers and groups is not tracked by the collector, so not found above.
        group.holders, group.stuck = places + flashinfer.holders_of(group.group), stuck
