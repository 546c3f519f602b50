"""Run in an engine's interpreter as ``cuda_parts.py`` is: workspaces as FlashInfer 0.6.14 makes them.

FlashInfer is not there, so its classes are stand-ins with the surface of that version, which
``nvsnap_conformance/hooks/surface.toml`` holds against the wheel. What torch unmaps with the last reference
to its symmetric memory is an object here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import vllm.distributed.device_communicators.flashinfer_all_reduce as engine
from nvsnap_hooks import device, flashinfer, held_workspace, inventory, observer
from nvsnap_hooks.errors import BadOption, ReleasedError
from nvsnap_hooks.holders import Tombstone
from nvsnap_hooks.reference import ReferenceHooks
from nvsnap_hooks.resources import Context, StillHeld, Unsupported
from vllm.distributed import parallel_state

from tests.cuda_parts import RecordingDevice, Votes, main, raises

if TYPE_CHECKING:
    from collections.abc import Iterator

REFERENCES: dict[int, Any] = {}
"""``flashinfer.comm.trtllm_ar._symm_workspace_refs``."""

GROUP = types.SimpleNamespace(size=lambda: 2, rank=lambda: 1, group_desc="tp:0")


class SymmetricMemory:
    """``torch._C._distributed_c10d._SymmetricMemory``, as far as the hooks look at one."""

    rank, world_size = 1, 2

    def __init__(self, address: int, multicast: int = 0) -> None:
        self.buffer_ptrs = [address, address + 1]
        self.multicast_ptr = multicast


class Trtllm:
    """``TRTLLMAllReduceFusionWorkspace``."""

    backend = "trtllm"
    made: tuple[Any, ...] = ()

    def __init__(
        self,
        *,
        tp_size: int,
        tp_rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: Any = None,
        comm_backend: Any = None,
        group: Any = None,
    ) -> None:
        import torch

        type(self).made = (comm_backend, group)
        self.world_size, self.rank, self._destroyed = tp_size, tp_rank, False
        pointers: list[list[int]] = [[1]]
        memories = [SymmetricMemory(10 * (number + 1)) for number in range(3)]
        size = {"tp_size": tp_size, "tp_rank": tp_rank, "max_token_num": max_token_num}
        size |= {"hidden_dim": hidden_dim, "use_fp32_lamport": dtype == torch.float32}
        REFERENCES[id(pointers)] = [("tensor", memory) for memory in memories]
        self._internal_workspace = (pointers, "tensor", memories, size)
        self.ipc_handles, self.workspace_tensor, self.mem_handles, self.metadata = self._internal_workspace

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._internal_workspace, name)

    def destroy(self) -> None:
        del self.ipc_handles, self.workspace_tensor, self.mem_handles, self.metadata
        self._destroyed = True


class Mapping:
    """``flashinfer.comm.mapping.Mapping``, which the module of the workspace below imports."""

    def __init__(self, world_size: int, rank: int, gpus_per_node: int, tp_size: int) -> None:
        assert world_size == gpus_per_node == tp_size
        self.world_size, self.rank = world_size, rank


class Mnnvl:
    """``MNNVLAllReduceFusionWorkspace``."""

    backend = "mnnvl"
    multicast = 99

    def __init__(self, mapping: Mapping, buffer_size_in_bytes: int, comm_backend: Any = None) -> None:
        assert comm_backend is not None
        self.world_size, self.rank, self._destroyed = mapping.world_size, mapping.rank, False
        self.buffer_size_bytes = buffer_size_in_bytes // 16 * 16
        self.handle, self.mc_ptr = SymmetricMemory(70, self.multicast), self.multicast

    def destroy(self) -> None:
        del self.handle, self.mc_ptr
        self._destroyed = True


class Table(dict[Any, Any]):
    """vLLM's table from workspaces to groups."""


@contextlib.contextmanager
def in_slots(
    normal: Any, quant: Any = None, *, forget: bool = True, group: Any = GROUP
) -> Iterator[list[Any]]:
    """Put workspaces where vLLM has them, and FlashInfer's module where it is; give a list for events."""
    coordinator = types.SimpleNamespace(cpu_group=group)
    library = types.ModuleType("flashinfer.comm.trtllm_ar")
    if forget:
        name = "trtllm_destroy_ipc_workspace_for_all_reduce_fusion"
        setattr(library, name, lambda pointers: REFERENCES.pop(id(pointers), None))
    with (
        mock.patch.dict(sys.modules, {library.__name__: library}),
        mock.patch.object(engine, "TorchDistBackend", lambda group: ("backend", group), create=True),
        mock.patch.object(engine, "_fi_ar_workspace_groups", Table({id(normal): "an old group"})),
        mock.patch.object(parallel_state, "get_tp_group", return_value=coordinator),
    ):
        engine._fi_ar_workspace, engine._fi_ar_quant_workspace = normal, quant
        try:
            yield []
        finally:
            engine._fi_ar_workspace = engine._fi_ar_quant_workspace = None
            REFERENCES.clear()


def the_resource(events: list[Any], kind: Any = RecordingDevice) -> Any:
    """Return the one workspace as a resource, ready for its release."""
    ((name, workspace, aliases),) = flashinfer.held()
    found: Any = held_workspace.resource(name, workspace, aliases, kind(events))
    found.votes = Votes(events)
    return found


def context(events: list[Any], seconds: float = 5.0) -> Context:
    return Context(None, Votes(events), 1, 2, seconds)  # type: ignore[arg-type]


def trtllm() -> Trtllm:
    import torch

    return Trtllm(tp_size=2, tp_rank=1, max_token_num=64, hidden_dim=512, dtype=torch.float32)


def check_all_that_holds_the_memory_is_dropped_and_the_workspace_made_again() -> None:
    workspace = trtllm()
    other = trtllm()
    elsewhere = types.SimpleNamespace(kept=workspace)
    watches = [weakref.ref(memory) for memory in workspace.mem_handles]
    with in_slots(workspace, workspace) as events:
        resource = the_resource(events)
        assert resource.aliases == ("flashinfer/quant",)
        assert resource.addresses() == [10, 11, 20, 21, 30, 31]
        del workspace
        resource.release()
        assert [watch() for watch in watches] == [None] * 3
        assert events == ["synchronize", ("meet", "idle", None), "give-back"], events
        assert list(REFERENCES) == [id(other.ipc_handles)], "it is told by its identity"
        assert engine._fi_ar_workspace_groups == {}
        assert (resource.held(), resource.addresses(), flashinfer.held()) == (False, [], [])
        for place in (engine._fi_ar_workspace, engine._fi_ar_quant_workspace, elsewhere.kept):
            assert type(place) is Tombstone
        raises(ReleasedError, lambda: elsewhere.kept.metadata)
        resource.rebuild(context(events))
        made = engine._fi_ar_workspace
        assert made is engine._fi_ar_quant_workspace is elsewhere.kept
        assert made.metadata == other.metadata
        assert (made.made, engine._fi_ar_workspace_groups) == ((("backend", GROUP), GROUP), {id(made): GROUP})
        assert resource.held()


def check_destroy_by_itself_frees_nothing_and_is_no_release() -> None:
    workspace = trtllm()
    with in_slots(workspace, forget=False) as events:
        resource = the_resource(events)
        del workspace
        raises(StillHeld, resource.release, "3 of its memories")


def check_memory_that_the_driver_knows_of_is_no_release() -> None:
    with in_slots(trtllm()) as events:
        resource = the_resource(events)
        with mock.patch.object(device, "still_mapped", lambda addresses: addresses[1:2]):
            raises(StillHeld, resource.release, "still mapped at 0xb")


def check_the_driver_is_asked_for_each_address() -> None:
    import ctypes

    import torch

    class Ask:
        def __call__(self, _value: Any, attribute: int, address: int) -> int:
            assert attribute == 9
            return 0 if address == 7 else 1

    driver = types.SimpleNamespace(cuPointerGetAttribute=Ask())
    with mock.patch.object(ctypes, "CDLL", return_value=driver):
        assert device.still_mapped([7]) == []
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            assert device.still_mapped([6, 7, 8]) == [7]


def check_nothing_is_dropped_where_a_rank_cannot_come_to_rest() -> None:
    class Broken(RecordingDevice):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access")

    workspace = trtllm()
    with in_slots(workspace) as events:
        resource = the_resource(events, Broken)
        raises(RuntimeError, resource.release, "illegal memory access")
        assert len(workspace.mem_handles) == 3
        assert engine._fi_ar_workspace is workspace
        resource.votes = None
        resource._device = RecordingDevice(events)
        raises(RuntimeError, resource.release, "no way to meet")
        assert engine._fi_ar_workspace is workspace


def check_what_cannot_be_freed_stays_by_its_name() -> None:
    def foreign(workspace: Any) -> None:
        workspace.mem_handles = [types.SimpleNamespace(uc_ptrs=[1])]

    def incomplete(workspace: Trtllm) -> None:
        del workspace.metadata

    def unknown(workspace: Trtllm) -> None:
        vars(workspace)["backend"] = "torch"

    for spoil, why in ((foreign, "symmetric memory"), (incomplete, "no metadata"), (unknown, "'torch'")):
        workspace = trtllm()
        spoil(workspace)
        with in_slots(workspace) as events:
            resource = the_resource(events)
            raises(Unsupported, resource.release, why)
            raises(Unsupported, functools.partial(resource.rebuild, context([])), "not released")
            assert (events, engine._fi_ar_workspace is workspace) == ([], True)
            assert held_workspace.moving() == []


def check_a_workspace_with_multicast_keeps_its_size_and_its_address_kind() -> None:
    made = Mnnvl(Mapping(2, 1, 2, 2), 4096, "backend")
    with in_slots(made) as events:
        resource = the_resource(events)
        assert resource.addresses() == [70, 71, 99]
        watch = weakref.ref(made.handle)
        del made
        resource.release()
        assert (watch(), resource.backend) == (None, "mnnvl")
        resource.rebuild(context(events))
        again: Any = engine._fi_ar_workspace
        assert (again.buffer_size_bytes, again.rank, again.mc_ptr) == (4096, 1, 99)
        del again
        resource = the_resource(events)
        resource.release()
        with mock.patch.object(Mnnvl, "multicast", 0):
            raises(RuntimeError, lambda: resource.rebuild(context(events)), "lost its multicast")
        assert type(engine._fi_ar_workspace) is Tombstone


def check_a_group_of_another_size_is_told_before_anything_is_made() -> None:
    smaller = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0, group_desc="smaller")
    with in_slots(trtllm(), group=smaller) as events:
        resource = the_resource(events)
        resource.release()
        with mock.patch.object(Trtllm, "__init__", side_effect=AssertionError("made")):
            raises(RuntimeError, lambda: resource.rebuild(context(events)), "rank 1 of 2")


def check_a_constructor_that_waits_for_a_lost_rank_is_bounded() -> None:
    gate = threading.Event()
    with in_slots(trtllm()) as events:
        resource = the_resource(events)
        resource.release()
        try:
            with mock.patch.object(Trtllm, "__init__", side_effect=lambda **_: gate.wait()):
                raises(TimeoutError, lambda: resource.rebuild(context(events, 0.2)), "flashinfer/normal")
        finally:
            gate.set()


def check_kept_graphs_are_refused_where_addresses_change() -> None:
    def hooks(**teardown: str) -> ReferenceHooks:
        return ReferenceHooks(types.SimpleNamespace(device=None), {"teardown": teardown})

    kept = {"cuda-graphs": "kept"}
    with in_slots(trtllm()):
        raises(BadOption, hooks(**kept)._require_graphs_may_stay, "flashinfer/normal")
        hooks(**kept, **{"flashinfer-workspace": "live"})._require_graphs_may_stay()
        hooks()._require_graphs_may_stay()
    hooks(**kept)._require_graphs_may_stay()


def check_the_inventory_takes_it_by_its_memory() -> None:
    worker = types.SimpleNamespace(device=None, model_runner=None)
    with in_slots(trtllm()):
        found = {
            each.name: each for each in inventory._device_wide(worker, ReferenceHooks(worker, {}).teardown)
        }
    assert type(found["flashinfer/normal"]) is held_workspace.HeldWorkspace
    assert not found["flashinfer/quant"].held()
    later = type("Later", (Trtllm,), {"checkpoint_prepare": None})
    with in_slots(later(tp_size=2, tp_rank=1, max_token_num=64, hidden_dim=512)) as events:
        assert type(the_resource(events)) is flashinfer.Workspace


def check_what_its_own_calls_do_not_support_stays_in_both_directions() -> None:
    """As FlashInfer 0.6.15 and later have it for a workspace in torch's symmetric memory."""
    refuse = mock.Mock(side_effect=NotImplementedError("backed by torch symmetric memory"))
    later = type("Later", (Trtllm,), {"checkpoint_prepare": refuse, "checkpoint_restore": refuse})
    with in_slots(later(tp_size=2, tp_rank=1, max_token_num=64, hidden_dim=512)) as events:
        table: Any = engine._fi_ar_workspace_groups
        table[id(engine._fi_ar_workspace)] = GROUP
        resource = the_resource(events)
        raises(Unsupported, resource.release, "symmetric memory")
        raises(Unsupported, functools.partial(resource.rebuild, context(events)), "symmetric memory")


def check_the_observer_sees_it_go_and_what_is_left_of_it() -> None:
    watcher = observer.Observer(types.SimpleNamespace(rank=1), {})
    heap: Any = types.SimpleNamespace(graph_wrappers=[], count=lambda _: 0)
    with in_slots(trtllm()) as events:
        resource = the_resource(events)
        assert watcher._device_wide(heap)["flashinfer/normal"]["live"]
        resource.release()
        assert watcher._device_wide(heap) == {}
        with mock.patch.object(observer, "_on_another_device", lambda at: at == 20):
            left = watcher._device_wide(heap)["flashinfer/normal"]
        assert left["peers_mapped"] == ["0x14"], left
        resource.rebuild(context(events))
        assert watcher._device_wide(heap)["flashinfer/normal"]["partial"] is False
    gc.collect()


if __name__ == "__main__":
    main(globals())
