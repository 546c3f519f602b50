"""The device layer: rounds over real helper processes against the stand-in driver, and inside a lifecycle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from nvsnap_conformance.checkpoint import device_checks, stand_in_driver
from nvsnap_conformance.checkpoint.cuda_driver import CudaDriverCheckpointer
from nvsnap_conformance.checkpoint.cuda_driver_calls import Helper
from nvsnap_conformance.checkpoint.device_failure import DeviceFailure, Fate
from nvsnap_conformance.checkpoint.device_ranks import STAND_IN_DEVICES, DeviceRanks
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.protocol import HooksSpec, Rank, RankReply
from nvsnap_conformance.errors import EnvironmentFailure, UsageError
from nvsnap_conformance.lifecycle.driver import LifecycleDriver, Variant
from nvsnap_conformance.lifecycle.observe import CycleObservation, check_completed
from nvsnap_conformance.lifecycle.oracle import Answers
from nvsnap_conformance.lifecycle.trace import check_order
from nvsnap_conformance.outcomes import Outcome, Signature
from nvsnap_conformance.processes import ProcessId
from tests.told_host import ToldHost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.checkpoint.protocol import CheckpointResult

STAND_IN = Path(stand_in_driver.__file__)


def deadline(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


def test_a_verb_out_of_turn_is_refused_before_anything_is_called() -> None:
    with DeviceRanks("stand-in") as ranks:
        device = CudaDriverCheckpointer(driver=STAND_IN)
        with pytest.raises(UsageError, match="none were locked"):
            device.checkpoint(ranks.pids, deadline())
        device.lock(ranks.pids, deadline())
        with pytest.raises(UsageError, match="give every verb the processes"):
            device.checkpoint(ranks.pids[:1], deadline())
        assert device.abandon() is Fate.RUNNING
        assert device.abandon() is None


def test_processes_without_any_context_are_refused() -> None:
    with DeviceRanks("stand-in") as ranks:
        device = CudaDriverCheckpointer(driver=STAND_IN)
        with pytest.raises(EnvironmentFailure, match="no process of the engine has a CUDA context"):
            device.lock(ranks.context_free, deadline())


def test_without_cuda_bindings_or_driver_the_error_says_so(tmp_path: Path) -> None:
    broken = tmp_path / "driver.py"
    broken.write_text("raise ImportError('No module named cuda')")
    with DeviceRanks("stand-in") as ranks:
        with pytest.raises(EnvironmentFailure, match="No module named cuda") as caught:
            CudaDriverCheckpointer(driver=broken).lock(ranks.pids, deadline())
        assert "nvsnap-conformance[gpu]" in caught.value.next_step
        no_gpu = tmp_path / "no_gpu.py"
        no_gpu.write_text(
            STAND_IN.read_text().replace(
                "return (CUresult.CUDA_SUCCESS,)", "return (CUresult.CUDA_ERROR_INVALID_VALUE,)", 1
            )
        )
        with pytest.raises(EnvironmentFailure, match="CUDA_ERROR_INVALID_VALUE"):
            CudaDriverCheckpointer(driver=no_gpu).lock(ranks.pids, deadline())


def test_a_helper_that_dies_in_a_call_is_a_failure_of_that_process(tmp_path: Path) -> None:
    dying = tmp_path / "driver.py"
    dying.write_text(
        STAND_IN.read_text().replace(
            "    fault = _fault(pid, verb)\n    if fault",
            '    if verb == "checkpoint":\n        os._exit(9)\n    fault = _fault(pid, verb)\n    if fault',
            1,
        )
    )
    with DeviceRanks("stand-in") as ranks:
        device = CudaDriverCheckpointer(driver=dying)
        device.lock(ranks.pids, deadline())
        with pytest.raises(DeviceFailure) as caught:
            device.checkpoint(ranks.pids, deadline())
    assert str(caught.value.signature) == "CUDA:HELPER@checkpoint"
    assert caught.value.fate is Fate.RUNNING


def test_processes_that_do_not_come_back_end_the_engine() -> None:
    with DeviceRanks("stand-in", 3) as ranks:
        device = CudaDriverCheckpointer(driver=STAND_IN)
        first, second, other = ranks.pids
        device.lock([first, second], deadline())
        device.checkpoint([first, second], deadline())
        with pytest.raises(DeviceFailure, match="2 processes were checkpointed, 1 came back") as caught:
            device.restore([first, other], deadline())
    assert str(caught.value.signature) == "CUDA:LOST@restore"


def test_a_roll_back_waits_for_a_driver_that_is_still_at_work() -> None:
    class StillAtWork(CudaDriverCheckpointer):
        looks = 0

        def read_states(self, pids: Sequence[int], deadline: Deadline) -> dict[int, str | None]:
            states = super().read_states(pids, deadline)
            self.looks += 1
            return {**states, pids[0]: "CHECKPOINTING"} if self.looks < 4 else states

    with DeviceRanks("stand-in", faults={(0, "checkpoint"): "CUDA_ERROR_NOT_SUPPORTED"}) as ranks:
        device = StillAtWork(driver=STAND_IN)
        seen = ranks.cycle(device)
    assert device.looks >= 4
    assert seen.failure is not None
    assert seen.failure.fate is Fate.RUNNING


def test_the_restore_threads_are_told() -> None:
    with DeviceRanks("stand-in") as ranks:
        device = CudaDriverCheckpointer(driver=STAND_IN)
        device.lock(ranks.pids, deadline())
        told = device.checkpoint(ranks.pids, deadline()).details
        assert told["restore_threads"] == {pid: pid for pid in ranks.pids}
        assert device.abandon() is Fate.RUNNING


def test_a_helper_ends_with_its_input() -> None:
    with DeviceRanks("stand-in") as ranks:
        helper = Helper(ranks.pids[0], STAND_IN)
        helper.ready(deadline())
        assert helper.usable
        helper._stdin.close()
        wait_for("the helper's end", lambda: not helper.usable, deadline(), interval=0.01)
        helper.close()


# Onto other devices --------------------------------------------------------------------------------


def test_a_restore_onto_other_devices_is_where_it_was_to_be() -> None:
    one, other = STAND_IN_DEVICES
    with DeviceRanks("stand-in") as ranks:
        before = ranks.devices()
        moved = {str(UUID(one)): f"GPU-{UUID(other)}", f"GPU-{UUID(other)}": one}
        seen = ranks.cycle(CudaDriverCheckpointer(driver=STAND_IN, moves=moved))
        after = ranks.devices()
    assert device_checks.check_completed(seen) + device_checks.check_carried(seen, "memory") == []
    assert [told.split()[0] for told in before] == [one, other]
    assert [told.split()[0] for told in after] == [other, one]
    assert device_checks.check_devices(before, after, {one: other, other: one}) == []


def test_after_a_map_that_the_driver_refuses_the_processes_run_where_they_were() -> None:
    one, _ = STAND_IN_DEVICES
    with DeviceRanks("stand-in") as ranks:
        seen = ranks.cycle(CudaDriverCheckpointer(driver=STAND_IN, moves={one: one}))
        assert [told.split()[0] for told in ranks.devices()] == list(STAND_IN_DEVICES)
    assert seen.at == "restore"
    assert seen.failure is not None
    assert str(seen.failure.signature) == "CUDA:1@restore"
    assert seen.failure.fate is Fate.RUNNING
    assert set(seen.answers.values()) == {"right"}


def test_a_map_of_anything_but_uuids_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="'GPU-0' is no UUID of a GPU"):
        CudaDriverCheckpointer(driver=STAND_IN, moves={"GPU-0": "1"})


def test_a_process_that_sees_the_old_device_s_bus_id_is_found() -> None:
    before, swap = ["a bus:a", "b bus:b"], {"a": "b", "b": "a"}

    def codes(*after: str) -> list[str]:
        return [str(one.signature) for one in device_checks.check_devices(before, list(after), swap)]

    assert codes("b bus:b", "a bus:a") == []
    assert codes("b bus:a", "a bus:a") == ["DEVICE:STALE_BUS_ID"]
    assert codes("b bus:b", "b bus:b") == ["DEVICE:NOT_MOVED"]


# What is held, and what a cycle came to ------------------------------------------------------------


def test_a_failure_of_the_suite_s_own_is_no_refusal() -> None:
    with DeviceRanks("stand-in", faults={(1, "restore"): "CUDA_ERROR_OUT_OF_MEMORY"}) as ranks:
        seen = ranks.cycle(CudaDriverCheckpointer(driver=STAND_IN))
    assert device_checks.check_refused(seen, "restore", "it") == []
    assert device_checks.came_to(seen) == "failed at restore: CUDA:2@restore"
    assert seen.failure is not None
    seen.failure.signature = Signature.parse("CUDA:HELPER@restore")
    assert [str(f.signature) for f in device_checks.check_refused(seen, "restore", "it")] == [
        "DEVICE:UNREFUSED"
    ]
    assert [str(f.signature) for f in device_checks.check_refused(seen, "lock", "it")] == [
        "DEVICE:FALSE_SUCCESS"
    ]


def test_what_a_peer_has_mapped_is_refused_and_goes_once_it_is_closed() -> None:
    with DeviceRanks("stand-in") as ranks:
        ranks.share()
        mapped = ranks.cycle(CudaDriverCheckpointer(driver=STAND_IN))
        assert device_checks.came_to(mapped) == "refused at checkpoint: CUDA:801@checkpoint"
        assert device_checks.check_carried(mapped, "any") == []
        ranks.close_shared()
        closed = ranks.cycle(CudaDriverCheckpointer(driver=STAND_IN))
        ranks.share_again(closed)
    assert device_checks.came_to(closed) == "carried"
    assert closed.shared_again == {"old": "", "new": ""}
    assert device_checks.check_shared_again(closed, "any") == []
    assert len(device_checks.check_shared_again(mapped, "any")) == 2  # nobody tried


def test_a_peer_that_cannot_map_is_a_finding_after_the_cycle_and_an_error_before() -> None:
    with DeviceRanks("stand-in") as ranks:
        seen = ranks.cycle(CudaDriverCheckpointer(driver=STAND_IN))
        (ranks._folder / f"{ranks.pids[1]}.mapped").mkdir()  # the file cannot be written
        ranks.share_again(seen)
        found = device_checks.check_shared_again(seen, "any")
        with pytest.raises(EnvironmentFailure, match="rank 1 cannot take memory"):
            ranks.share()
    codes = ["DEVICE:NOT_SHARED_AGAIN@any", "DEVICE:NOT_SHARED_ANEW@any"]
    assert [str(one.signature) for one in found] == codes
    assert "old memory not shared again: rank 1 cannot take memory" in device_checks.came_to(seen)


# Inside a lifecycle --------------------------------------------------------------------------------


class Engine:
    """As much of an engine as the orchestrator asks for, over :class:`DeviceRanks`."""

    def __init__(self, ranks: DeviceRanks) -> None:
        self._ranks = ranks
        self.config = SimpleNamespace(tensor_parallel=2)
        members = [found for pid in [*ranks.pids, *ranks.context_free] if (found := ProcessId.of(pid))]
        self.process = SimpleNamespace(
            tree=lambda: members, namespace_pid=lambda process: process.pid, clock_offset=0.0
        )

    def ranks(self, _deadline: Deadline) -> list[Rank]:
        return [
            Rank(rank, found, None, "rpc")
            for rank, pid in enumerate(self._ranks.pids)
            if (found := ProcessId.of(pid))
        ]

    def rpc(self, _method: str, **_arguments: Any) -> list[RankReply]:
        return [RankReply(rank, "n", "n", value={"state": "ok"}) for rank in (0, 1)]

    def quiesce(self, _deadline: Deadline) -> None:
        pass

    def resume(self, _deadline: Deadline) -> None:
        pass


class BrokenHost:
    name = "broken"
    replaces_processes = False

    def dump(self, _process: Any, _folder: Path, _deadline: Deadline) -> CheckpointResult:
        raise EnvironmentFailure("the disk is full")


class ToldDevice(CudaDriverCheckpointer):
    """The suite's own, which says what it does."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(driver=STAND_IN)
        self.told = told

    def checkpoint(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        self.told.append("checkpoint")
        return super().checkpoint(pids, deadline)

    def restore(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        self.told.append("restore")
        return super().restore(pids, deadline)


@pytest.mark.parametrize(("with_device", "with_host"), [(True, True), (True, False), (False, True)])
def test_while_it_is_away_everything_is_checkpointed(
    tmp_path: Path, *, with_device: bool, with_host: bool
) -> None:
    told: list[str] = []
    with DeviceRanks("stand-in") as ranks:
        host, device = ToldHost(told) if with_host else None, ToldDevice(told) if with_device else None
        driver = LifecycleDriver(Engine(ranks), HooksSpec(), host, tmp_path, device=device)  # type: ignore[arg-type]
        driver.while_away = lambda: told.append("away")
        record = driver.run(Variant.FULL, deadline(60.0))
    assert record.failure is None
    outer, inner = ["checkpoint"] * with_device, ["dump"] * with_host
    assert told == [*outer, *inner, "away", *["load"] * with_host, *["restore"] * with_device]


def orchestrate(ranks: DeviceRanks, tmp_path: Path, host: Any = None) -> LifecycleDriver:
    device = CudaDriverCheckpointer(driver=STAND_IN)
    driver = LifecycleDriver(Engine(ranks), HooksSpec(), host, tmp_path, device=device)  # type: ignore[arg-type]
    driver.run(Variant.FULL, deadline(60.0))
    return driver


@pytest.mark.parametrize(
    ("after", "failure"), [(900, "DEVICE:MEMORY_KEPT@checkpoint"), (0, None), (None, None)]
)
def test_a_checkpoint_that_leaves_the_engine_s_memory_has_failed(
    tmp_path: Path, after: int | None, failure: str | None
) -> None:
    told = iter([1000, after])
    with DeviceRanks("stand-in") as ranks:
        device = CudaDriverCheckpointer(driver=STAND_IN)
        driver = LifecycleDriver(
            Engine(ranks),  # type: ignore[arg-type]
            HooksSpec(),
            None,
            tmp_path,
            device=device,
            device_memory=lambda: None if (mib := next(told)) is None else mib << 20,
        )
        record = driver.run(Variant.FULL, deadline(60.0))
        assert set(ranks.answers().values()) == {"right"}  # rolled back, or restored
    told_as = record.failure and str(record.failure.signature)
    assert told_as == failure


def test_the_lifecycle_records_each_rank_s_calls_in_order(tmp_path: Path) -> None:
    with DeviceRanks("stand-in") as ranks:
        record = orchestrate(ranks, tmp_path).record
        assert record.failure is None
        assert check_order(record.events, ranks=2) == []
        verbs = [event.verb.value for event in record.events if event.rank == 1]
        assert verbs == ["prepare", "lock", "checkpoint", "restore", "unlock", "rebuild"]
        told = record.as_json()["device"]
        assert set(told) == {"lock", "checkpoint", "restore", "unlock"}
        assert list(told["lock"]["without_context"]) == ranks.context_free


def test_a_failure_ends_the_cycle_with_the_driver_s_signature(tmp_path: Path) -> None:
    with DeviceRanks("stand-in", faults={(1, "restore"): "LOST"}) as ranks:
        driver = orchestrate(ranks, tmp_path)
        failure = driver.record.failure
        assert failure is not None
        assert (str(failure.signature), failure.outcome) == ("CUDA:801@restore", Outcome.FAILED)
        assert driver.record.failed_calls
        told = {event.rank: event.ok for event in driver.record.events if event.verb == "restore"}
        assert told == {0: True, 1: False}
        seen = CycleObservation(driver.record, False, Answers(()), {}, [])
        (found,) = check_completed(seen)
        assert str(found.signature) == "CUDA:801@restore"
        assert "was killed" in found.message
        assert not any(left.alive for pid in ranks.pids if (left := ProcessId.of(pid)))


def test_a_failure_of_the_host_layer_unlocks_the_ranks(tmp_path: Path) -> None:
    with DeviceRanks("stand-in") as ranks:
        driver = orchestrate(ranks, tmp_path, BrokenHost())
        assert driver.record.failure is not None
        assert driver.record.failure.verb == "dump"
        seen = ranks.cycle(CudaDriverCheckpointer(driver=STAND_IN))
        assert seen.error is None  # they were running, with their memory
        assert set(seen.answers.values()) == {"right"}
