"""Run in an engine's interpreter without a GPU: the hooks' CUDA parts against the engine's real classes.

Every function named ``check_…`` is one check; ``python cuda_parts.py`` prints one line of JSON with the
traceback of each, or null. Objects of the real classes are made without their constructors, which need a
GPU; what would reach the driver is recorded instead, and constructors are called with the real signatures.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import sys
import threading
import traceback
import types
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

from nvsnap_hooks import (
    communicators,
    device,
    exchange,
    flashinfer,
    graphs,
    inventory,
    nccl_standins,
    reference,
    thread_device,
)
from nvsnap_hooks.errors import BadOption, NoDevice, ReleasedError, UnsupportedPlatform
from nvsnap_hooks.holders import find_holders, find_untracked
from nvsnap_hooks.resources import Absent, Context, Deferred, Kept, LeftAlive, StillHeld
from nvsnap_hooks.teardown import Teardown

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXT = Context(None, None, 0, 2, 5.0)  # type: ignore[arg-type]  # none of these asks for more


class RecordingDevice:
    """Stands for the device; notes what is asked of it."""

    on_gpu = True

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def synchronize(self) -> None:
        self._events.append("synchronize")

    def give_back(self) -> None:
        self._events.append("give-back")

    def free(self) -> int:
        return 0


class Votes:
    """All ranks agree, unless this one has a problem."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def agree(self, step: str, problem: str | None) -> None:
        self._events.append(("meet", step.rpartition(" ")[2], problem))
        if problem is not None:
            raise RuntimeError(f"not all agree: {problem}")


def raises(kind: type[BaseException], call: Callable[[], Any], text: str = "") -> None:
    """Check that a call raises an error of a kind, with ``text`` in it."""
    try:
        call()
    except kind as error:
        told = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    assert text in told, told


def coordinator(**held: Any) -> Any:
    """Return a coordinator whose CUDA communicator holds what is given."""
    names = ("pynccl_comm", "ca_comm", "qr_comm", "symm_mem_comm", "fi_ar_comm")
    owner = types.SimpleNamespace(cpu_group="group", device="cuda:0", **dict.fromkeys(names))
    vars(owner).update(held)
    return types.SimpleNamespace(device_communicator=owner)


def without_constructor(kind: Any, **attributes: Any) -> Any:
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def constructed(kind: Any, events: list[Any], **attributes: Any) -> Any:
    """Replace a constructor by one that takes what the real one takes, and sets ``attributes``."""
    signature = inspect.signature(kind)

    def construct(self: Any, *args: Any, **keywords: Any) -> None:
        signature.bind(*args, **keywords)
        events.append(("construct", kind.__name__, keywords))
        vars(self).update(attributes)

    construct.__signature__ = inspect.signature(kind.__init__)  # type: ignore[attr-defined]
    return mock.patch.object(kind, "__init__", construct)


def custom_allreduce(events: list[Any], mode: str = "closed", code: int = 0) -> tuple[Any, Any, Any]:
    """Return a real, never constructed CustomAllreduce as a resource, its coordinator, and the patches."""
    import vllm.distributed.device_communicators.custom_all_reduce as module
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    made = without_constructor(
        module.CustomAllreduce,
        _ptr=7,
        disabled=False,
        meta_ptrs=[1, 2],
        buffer_ptrs=[3, 4],
        rank=0,
        rank_data=object(),
    )

    class Close:
        def __call__(self, address: int) -> int:
            events.append(("close", address))
            return code

    library = types.SimpleNamespace(cudaIpcCloseMemHandle=Close())
    operations = types.SimpleNamespace(
        dispose=lambda pointer: events.append(("dispose", pointer)),
        free_shared_buffer=lambda pointer: events.append(("free", pointer)),
    )
    patches = (
        mock.patch.object(CudaRTLibrary, "__init__", lambda self: setattr(self, "lib", library)),
        mock.patch.object(module, "ops", operations),
    )
    where = coordinator(ca_comm=made)
    found = communicators.of_coordinator(
        "tp:0",
        where,
        RecordingDevice(events),  # type: ignore[arg-type]
        {"custom-allreduce": mode},
    )
    resource = next(each for each in found if each.name == "tp:0/custom-allreduce")
    resource.votes = Votes(events)
    return resource, where, patches


def check_custom_allreduce_closes_peers_before_owners_free() -> None:
    events: list[Any] = []
    resource, where, patches = custom_allreduce(events)
    elsewhere = types.SimpleNamespace(kept=where.device_communicator.ca_comm)
    assert resource.held()
    assert resource.addresses() == [1, 2, 3, 4]
    with patches[0], patches[1]:
        resource.release()
    assert events == [
        "synchronize",
        ("close", 2),
        ("close", 4),
        ("meet", "closed", None),
        ("dispose", 7),
        ("free", 1),
        ("free", 3),
    ], events
    for holder in (where.device_communicator.ca_comm, elsewhere.kept):
        raises(ReleasedError, functools.partial(getattr, holder, "disabled"))
    import vllm.distributed.device_communicators.custom_all_reduce as module

    again = {"_ptr": 9, "disabled": False, "meta_ptrs": [5, 6], "buffer_ptrs": [7, 8], "rank": 0}
    with constructed(module.CustomAllreduce, events, **again):
        resource.rebuild(CONTEXT)
    assert events[-1][2]["group"] == "group", events[-1]
    assert where.device_communicator.ca_comm is elsewhere.kept
    assert resource.addresses() == [5, 6, 7, 8]
    vars(elsewhere.kept)["_ptr"] = 0  # nothing to close at its end


def check_custom_allreduce_frees_nothing_while_a_handle_stays_open() -> None:
    events: list[Any] = []
    resource, where, patches = custom_allreduce(events, code=1)
    with patches[0], patches[1]:
        raises(RuntimeError, resource.release, "cudaIpcCloseMemHandle")
    assert not [event for event in events if event[0] in ("dispose", "free")], events
    vars(where.device_communicator.ca_comm)["_ptr"] = 0


def check_custom_allreduce_closed_by_the_engine_is_kept() -> None:
    events: list[Any] = []
    resource, _, patches = custom_allreduce(events, mode="closed-by-engine")
    with patches[0], patches[1]:
        raises(LeftAlive, resource.release, "2 mappings of peers' memory stay open")
    assert not [event for event in events if event[0] in ("close", "meet")], events


def check_custom_allreduce_that_comes_back_disabled_is_a_failure() -> None:
    events: list[Any] = []
    resource, _, patches = custom_allreduce(events)
    import vllm.distributed.device_communicators.custom_all_reduce as module

    with patches[0], patches[1]:
        resource.release()
    with constructed(module.CustomAllreduce, events, _ptr=0, disabled=True):
        raises(RuntimeError, lambda: resource.rebuild(CONTEXT), "disabled")


def nccl(events: list[Any], mode: str, destroy: Any = None, **symbols: bool) -> tuple[Any, Any]:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    for name in ("ncclCommDestroy", "ncclCommSuspend", "ncclCommResume", "has_symbol"):
        assert callable(getattr(NCCLLibrary, name)), name
    library = mock.create_autospec(NCCLLibrary, instance=True)
    library.has_symbol.side_effect = lambda name: symbols.get(name, False)
    library.ncclCommDestroy.side_effect = destroy or (lambda comm: events.append(("destroy", comm)))
    library.ncclCommSuspend.side_effect = lambda comm, flags: events.append(("suspend", comm, flags))
    library.ncclCommResume.side_effect = lambda comm: events.append(("resume", comm))
    made = without_constructor(
        PyNcclCommunicator,
        available=True,
        disabled=False,
        nccl=library,
        comm=11,
        nccl_version=22809,
        world_size=2,
        _suspended=False,
    )
    where = coordinator(pynccl_comm=made)
    found = communicators.of_coordinator(
        "tp:0",
        where,
        RecordingDevice(events),  # type: ignore[arg-type]
        {"nccl-communicator": mode},
    )
    return next(each for each in found if each.name == "tp:0/nccl-communicator"), where


def check_nccl_is_destroyed_and_made_again() -> None:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    events: list[Any] = []
    resource, where = nccl(events, "destroyed")
    assert resource.backend == "nccl-22809"
    resource.release()
    assert events == ["synchronize", ("destroy", 11)], events
    with constructed(PyNcclCommunicator, events, available=True, disabled=False):
        resource.rebuild(CONTEXT)
    assert where.device_communicator.pynccl_comm.available


def check_nccl_that_never_ends_is_a_failure_in_bounded_time() -> None:
    gate = threading.Event()
    resource, _ = nccl([], "destroyed", destroy=lambda _comm: gate.wait())
    resource.seconds = 0.2
    try:
        raises(TimeoutError, resource.release, "tp:0/nccl-communicator")
    finally:
        gate.set()


def check_nccl_suspended_is_kept_and_resumed() -> None:
    events: list[Any] = []
    resource, where = nccl(events, "suspended", ncclCommSuspend=True, ncclCommResume=True)
    before = where.device_communicator.pynccl_comm
    raises(LeftAlive, resource.release, "suspended")
    raises(LeftAlive, lambda: resource.rebuild(CONTEXT), "resumed")
    assert events == ["synchronize", ("suspend", 11, 1), ("resume", 11)], events
    assert where.device_communicator.pynccl_comm is before


def check_suspend_is_refused_where_the_library_has_none() -> None:
    from nvsnap_hooks.reference import ReferenceHooks

    _, where = nccl([], "suspended")
    hooks = ReferenceHooks(types.SimpleNamespace(device=None), {"teardown": {"nccl": "suspended"}})
    with mock.patch.object(inventory, "coordinators", return_value=[("tp:0", where, ())]):
        raises(BadOption, hooks._require_suspend, "ncclCommSuspend")


def check_a_stand_in_of_nccl_is_read_as_the_engine_reads_it() -> None:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    owner = types.SimpleNamespace(rank=0, world_size=2)
    for old in (True, False):
        had = nccl_standins.plant(owner, old=old)
        assert had is None
        assert type(owner.pynccl_comm) is PyNcclCommunicator
        # What the clause is about: the engine's own call skips it without an error.
        owner.pynccl_comm.suspend()
        assert owner.pynccl_comm._suspended is not old
        nccl_standins.remove(owner, had)
        assert not hasattr(owner, "pynccl_comm")
    owner.pynccl_comm = "the engine's own"
    nccl_standins.remove(owner, nccl_standins.plant(owner, old=True))
    assert owner.pynccl_comm == "the engine's own"


def check_symmetric_memory_that_disabled_itself_still_holds_its_buffer() -> None:
    import torch
    from vllm.distributed.device_communicators.symm_mem import SymmMemCommunicator

    events: list[Any] = []
    made = without_constructor(SymmMemCommunicator, disabled=True, buffer=torch.zeros(8))
    where = coordinator(symm_mem_comm=made)
    found = communicators.of_coordinator("tp:0", where, RecordingDevice(events), {})  # type: ignore[arg-type]
    resource = next(each for each in found if each.kind == "symmetric-memory")
    assert resource.held()
    resource.votes = Votes(events)
    resource.release()
    assert made.buffer is None
    with constructed(SymmMemCommunicator, events, disabled=False, buffer=torch.zeros(8)):
        resource.rebuild(CONTEXT)
    assert where.device_communicator.symm_mem_comm is not made


def check_quick_allreduce_is_closed_by_its_own_call() -> None:
    import vllm.distributed.device_communicators.quick_all_reduce as module

    events: list[Any] = []
    operations = types.SimpleNamespace(qr_destroy=lambda pointer: events.append(("destroy", pointer)))
    made = without_constructor(module.QuickAllReduce, _ptr=5, disabled=False)
    where = coordinator(qr_comm=made)
    found = communicators.of_coordinator("tp:0", where, RecordingDevice(events), {})  # type: ignore[arg-type]
    resource = next(each for each in found if each.kind == "quick-allreduce")
    with mock.patch.object(module, "ops", operations):
        resource.release()
    assert events == ["synchronize", ("destroy", 5)], events
    with constructed(module.QuickAllReduce, events, _ptr=6, disabled=False):
        resource.rebuild(CONTEXT)
    vars(where.device_communicator.qr_comm)["_ptr"] = 0


def check_an_unknown_communicator_is_told() -> None:
    where = coordinator(next_comm=object(), fi_ar_comm=object())
    found = communicators.of_coordinator("tp:0", where, RecordingDevice([]), {})  # type: ignore[arg-type]
    told = {each.name: type(each) for each in found if type(each) is not Absent}
    assert told == {"tp:0/next_comm": Kept}, told
    assert all(each.held() is False for each in found if type(each) is Absent)


def check_a_workspace_does_not_come_back_over_a_group_of_another_size() -> None:
    import vllm.distributed.device_communicators.flashinfer_all_reduce as module

    class Workspace:
        backend = "trtllm"
        world_size, rank = 4, 1
        mem_handles = ()

        def checkpoint_restore(self, comm_backend: Any) -> None:
            raise AssertionError(f"restored over {comm_backend}")

    workspace = Workspace()
    group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 1, group_desc="smaller")
    module._fi_ar_workspace_groups[id(workspace)] = group
    try:
        resource = flashinfer.Workspace("flashinfer/normal", workspace, ())
        raises(RuntimeError, lambda: resource.rebuild(CONTEXT), "rank 1 of 4")
    finally:
        module._fi_ar_workspace_groups.clear()


def check_the_constructor_names_are_the_engines() -> None:
    """The attributes by which communicators are found are those that the engine's constructor sets."""
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    source = inspect.getsource(CudaCommunicator.__init__)
    for family in communicators.KINDS:
        assert f"self.{family.attribute}" in source, family.attribute
    for name in communicators.STATELESS:
        assert f"self.{name}" in source, name


def manager() -> Any:
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

    full = [
        BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=n, num_reqs=n, uniform_token_count=1)
        for n in (4, 2, 1)
    ]
    return without_constructor(
        ModelCudaGraphManager,
        graphs={each: object() for each in full},
        pool=(0, 1),
        _graphs_captured=True,
        _capture_descs={CUDAGraphMode.FULL: full},
        _candidates={(n, 0): [d for d in reversed(full) if d.num_tokens >= n] for n in range(1, 5)},
        _lora_dispatch_map={},
        _max_lora_case=0,
    )


class ManagerRunner:
    """Model runner V2, as far as it captures."""

    def __init__(self, held: Any) -> None:
        self.cudagraph_manager = held
        self.fail = False

    def capture_model(self) -> None:
        for descriptors in self.cudagraph_manager._capture_descs.values():
            for each in descriptors:
                if self.fail:
                    raise RuntimeError("capture fails")
                assert each not in self.cudagraph_manager.graphs, "captured twice"
                self.cudagraph_manager.graphs[each] = object()
        self.cudagraph_manager._graphs_captured = True


def worker(runner: Any) -> Any:
    return types.SimpleNamespace(model_runner=runner, vllm_config=_config(), device=None)


def _config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


def mode_of(held: Any) -> str:
    return str(held.dispatch(1, 1, 1, 0).cg_mode.name)


def check_managers_dispatch_eagerly_until_all_is_captured() -> None:
    held = manager()
    resource = graphs.Graphs(worker(ManagerRunner(held)))
    assert resource.held()
    assert mode_of(held) == "FULL"
    resource.release()
    assert (held.graphs, mode_of(held), resource.held()) == ({}, "NONE", False)
    raises(Deferred, lambda: resource.rebuild(CONTEXT))
    again = resource.recapture
    assert again is not None
    seen = []
    while again.state != "captured":
        assert mode_of(held) == "NONE", "dispatched to graphs before all are there"
        again.step(1)
        seen.append((again.state, again.done, len(held.graphs)))
    assert seen == [("capturing", 1, 1), ("capturing", 2, 2), ("captured", 3, 3)], seen
    assert mode_of(held) == "FULL"
    assert len(held._capture_descs) == 1
    assert sum(map(len, held._capture_descs.values())) == 3


def check_a_failed_capture_leaves_the_engine_eager() -> None:
    held = manager()
    runner = ManagerRunner(held)
    resource = graphs.Graphs(worker(runner))
    resource.release()
    again = resource.recapture
    assert again is not None
    again.step(1)
    runner.fail = True
    try:
        again.step(2)
    except RuntimeError as error:
        again.give_up(str(error))
    assert (again.state, mode_of(held)) == ("failed", "NONE")
    assert sum(map(len, held._capture_descs.values())) == 3


def check_a_second_prepare_half_way_starts_over() -> None:
    held = manager()
    target = worker(ManagerRunner(held))
    first = graphs.Graphs(target)
    first.release()
    assert first.recapture is not None
    first.recapture.step(1)
    second = graphs.Graphs(target)
    second.pending = first.recapture
    second.release()
    assert second.recapture is first.recapture
    assert (second.recapture.done, held.graphs) == (0, {})
    second.recapture.step(3)
    assert (second.recapture.state, mode_of(held)) == ("captured", "FULL")


def check_dispatchers_answer_none_until_all_is_captured() -> None:
    from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    keys = {
        CUDAGraphMode.PIECEWISE: {BatchDescriptor(4), BatchDescriptor(2)},
        CUDAGraphMode.FULL: set(),
    }
    compilation = types.SimpleNamespace(max_cudagraph_capture_size=4, cudagraph_mode=CUDAGraphMode.PIECEWISE)
    scheduler = types.SimpleNamespace(max_num_seqs=4)
    dispatcher = without_constructor(
        CudagraphDispatcher,
        keys_initialized=True,
        cudagraph_mode=CUDAGraphMode.PIECEWISE,
        cudagraph_keys=keys,
        specialize_lora_count=False,
        compilation_config=compilation,
        _bs_to_padded_graph_size=[0, 2, 2, 4, 4],
        captured_lora_counts=[],
        uniform_decode_query_len=1,
        vllm_config=types.SimpleNamespace(lora_config=None, scheduler_config=scheduler),
    )
    wrapper = without_constructor(
        CUDAGraphWrapper,
        concrete_cudagraph_entries={
            key: CUDAGraphEntry(key, cudagraph=object()) for key in keys[CUDAGraphMode.PIECEWISE]
        },
        runnable=None,
        is_debugging_mode=False,
        graph_pool=(0, 1),
    )

    class DispatcherRunner:
        """Model runner V1, as far as it captures."""

        cudagraph_dispatcher = dispatcher

        def capture_model(self) -> None:
            for _, descriptors in dispatcher.get_capture_descs():
                for key in descriptors:
                    wrapper.concrete_cudagraph_entries[key] = CUDAGraphEntry(key, cudagraph=object())

    def mode() -> str:
        return str(dispatcher.dispatch(2)[0].name)

    resource = graphs.Graphs(worker(DispatcherRunner()))
    assert mode() == "PIECEWISE"
    resource.release()
    assert (wrapper.concrete_cudagraph_entries, mode()) == ({}, "NONE")
    again = resource.recapture
    assert again is not None
    again.step(1)
    assert (again.state, mode(), len(wrapper.concrete_cudagraph_entries)) == ("capturing", "NONE", 1)
    again.step(1)
    assert (again.state, mode(), len(wrapper.concrete_cudagraph_entries)) == ("captured", "PIECEWISE", 2)
    assert dispatcher.cudagraph_keys is keys


def check_a_graph_held_by_something_unknown_is_a_failed_release() -> None:
    import torch

    held = manager()
    resource = graphs.Graphs(worker(ManagerRunner(held)))
    with mock.patch.object(torch.cuda, "CUDAGraph", type("CUDAGraph", (), {})) as kind:
        unknown = kind()
        raises(StillHeld, resource.release, "1 captured graphs")
        del unknown


def check_graphs_that_cannot_be_captured_again_are_named() -> None:
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    assert graphs.foreign() == []
    held = without_constructor(EncoderCudaGraphManager, budget_graphs={"image": {1: object()}})
    assert graphs.foreign() == [type(held).__name__]


def check_everything_comes_back_in_the_order_turned_round() -> None:
    events: list[Any] = []
    custom, first, _ = custom_allreduce(events)
    own, _ = nccl(events, "destroyed")
    captured = graphs.Graphs()
    order = [type(each).__name__ for each in inventory.rebuild_order([captured, custom, own])]
    assert order == ["PyNccl", "CustomAllreduce", "Graphs"], order
    vars(first.device_communicator.ca_comm)["_ptr"] = 0


def check_options_are_checked() -> None:
    assert Teardown.of(None) == Teardown("destroyed", "closed", "freed", "dropped")
    assert Teardown.of({"custom-allreduce": "live"}).custom_allreduce == "live"
    for option in ("live", {"nccl": "gone"}, {"gloo": "live"}):
        raises(BadOption, functools.partial(Teardown.of, option))


def check_a_holder_that_the_collector_does_not_track_is_found() -> None:
    target = object()
    holder = types.SimpleNamespace(table={1: target})
    assert not gc.is_tracked(holder.table)
    assert find_holders([target])[0] == ([], [])
    (place,) = find_untracked(target)
    place.put("another")
    assert holder.table == {1: "another"}


def check_a_bounded_call_hands_its_error_on() -> None:
    def fails() -> None:
        raise ValueError("told to")

    raises(ValueError, lambda: device.bounded(fails, 5.0, "a call"))


def check_a_world_with_data_parallelism_is_refused() -> None:
    import torch.distributed as dist

    parallel = types.SimpleNamespace(world_size=1, nnodes=1)
    worker = types.SimpleNamespace(device=types.SimpleNamespace(type="cpu"), parallel_config=parallel)
    hooks = reference.ReferenceHooks(worker, {})
    with mock.patch.object(dist, "is_initialized", return_value=True):
        with mock.patch.object(dist, "get_world_size", return_value=1):
            hooks._require_known_engine()
        with mock.patch.object(dist, "get_world_size", return_value=2):
            raises(UnsupportedPlatform, hooks._require_known_engine, "data parallelism")


def check_the_device_is_taken_in_the_calling_thread_by_the_engine_s_own_call() -> None:
    import torch

    taken: list[Any] = []

    def take(wanted: Any) -> None:
        taken.append((threading.current_thread().name, wanted))

    parallel = types.SimpleNamespace(world_size=1, nnodes=1)
    worker = types.SimpleNamespace(device=torch.device("cpu"), parallel_config=parallel)
    hooks = reference.ReferenceHooks(worker, {})
    with mock.patch.object(torch.cpu, "set_device", take):
        thread = threading.Thread(target=lambda: hooks._refusal(reference.PREPARED), name="another")
        thread.start()
        thread.join()
    assert taken == [("another", worker.device)]


def check_a_device_that_cannot_be_taken_is_a_refusal() -> None:
    import torch

    parallel = types.SimpleNamespace(world_size=1, nnodes=1)
    worker = types.SimpleNamespace(device=torch.device("cpu"), parallel_config=parallel)
    hooks = reference.ReferenceHooks(worker, {})
    with mock.patch.object(torch.cpu, "set_device", side_effect=RuntimeError("CUDA error 101")):
        refusal = hooks._refusal(reference.SERVING)
    assert isinstance(refusal, NoDevice)
    assert "CUDA error 101" in str(refusal)


def check_a_thread_has_the_device_once_it_was_made_current_there() -> None:
    import torch

    original = torch.cpu.set_device
    found = thread_device.ThreadDevice(torch.device("cpu"))
    found.watch()
    told: list[bool] = []

    def look() -> None:
        told.append(found.is_current())
        torch.cpu.set_device(torch.device("cpu"))
        told.append(found.is_current())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert told == [False, True]
    assert found.is_current()
    found.unwatch()
    assert torch.cpu.set_device is original


def check_on_cuda_the_driver_says_which_device_a_thread_has() -> None:
    import torch

    found = thread_device.ThreadDevice(torch.device("cuda", 1))
    found.watch()
    for number, right in ((None, False), (0, False), (1, True)):
        with mock.patch.object(thread_device, "_context_device", return_value=number):
            assert found.is_current() is right
    found.unwatch()


class ExchangeOwner:
    """What holds an all-to-all manager, as a device communicator and a layer's kernel do."""

    def __init__(self, manager: Any) -> None:
        self.all2all_manager = manager
        self.cpu_group = "the group in force"


def a_manager(name: str = "AgRsAll2AllManager") -> Any:
    from vllm.distributed.device_communicators import all2all

    made = object.__new__(getattr(all2all, name))
    made.cpu_group, made.tcp_store_group = "an old group", None
    return made


def check_a_manager_over_groups_goes_and_comes_back_by_identity() -> None:
    other = a_manager()
    owner, kernel = ExchangeOwner(a_manager()), ExchangeOwner(None)
    kernel.all2all_manager = owner.all2all_manager
    watch = weakref.ref(owner.all2all_manager)
    resource = exchange.of_communicator("ep:0/all2all", owner, types.SimpleNamespace(vllm_config=None))
    assert resource.held()
    assert resource.backend == "AgRsAll2AllManager"
    resource.release()
    assert not resource.held()
    assert watch() is None
    for holder in (owner, kernel):
        raises(ReleasedError, functools.partial(getattr, holder.all2all_manager, "dispatch"))
    assert other.cpu_group == "an old group"
    with mock.patch.object(exchange.OverGroups, "make", side_effect=a_manager):
        resource.rebuild(CONTEXT)
    assert owner.all2all_manager is kernel.all2all_manager is resource.manager
    assert type(resource.manager) is type(other)
    assert resource.manager is not other


def check_a_manager_is_made_by_its_own_constructor_over_the_group_in_force() -> None:
    import vllm.config

    made: list[Any] = []

    def construct(manager: Any, cpu_group: Any, tcp_store_group: Any = None) -> None:
        made.append((manager, cpu_group, tcp_store_group))

    owner = ExchangeOwner(a_manager())
    resource = exchange.OverGroups("ep:0/all2all", owner, types.SimpleNamespace(vllm_config="its own"))
    with (
        mock.patch.object(type(owner.all2all_manager), "__init__", construct),
        mock.patch.object(vllm.config, "set_current_vllm_config") as current,
    ):
        manager = resource.make()
    assert made == [(manager, "the group in force", None)]
    current.assert_called_once_with("its own")


def check_a_manager_that_something_unknown_holds_is_told() -> None:
    owner = ExchangeOwner(a_manager())
    hidden = (owner.all2all_manager,)
    resource = exchange.of_communicator("ep:0/all2all", owner, None)
    raises(StillHeld, resource.release, "builtins.tuple")
    assert hidden[0].cpu_group == "an old group"


def check_every_other_manager_stays_by_its_name() -> None:
    from vllm.distributed.device_communicators import all2all
    from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

    families = {
        name: kind
        for name, kind in vars(all2all).items()
        if isinstance(kind, type) and issubclass(kind, All2AllManagerBase) and kind is not All2AllManagerBase
    }
    assert families.keys() >= exchange.OVER_GROUPS
    others = families.keys() - exchange.OVER_GROUPS - {"FlashInferNVLinkOneSidedManager"}
    assert len(others) > 5
    for name in others:
        found = exchange.of_communicator("ep:0/all2all", ExchangeOwner(a_manager(name)), None)
        assert isinstance(found, Kept), name
        assert name in found.why


def check_a_manager_over_a_stateless_group_stays() -> None:
    manager = a_manager()
    manager.tcp_store_group = object()
    assert isinstance(exchange.of_communicator("ep:0/all2all", ExchangeOwner(manager), None), Kept)
    for owner in (None, ExchangeOwner(None)):
        assert type(exchange.of_communicator("ep:0/all2all", owner, None)) is Absent


def main(names: dict[str, Any]) -> None:
    """Run the checks among a module's names."""
    results: dict[str, str | None] = {}
    for name, check in list(names.items()):
        if name.startswith("check_"):
            try:
                check()
            except BaseException:
                results[name] = traceback.format_exc()
            else:
                results[name] = None
    print(json.dumps(results), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main(globals())
