"""The device layer over processes that hold GPU memory: real ones on a GPU, and stand-ins everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.checkpoint import device_checks
from nvsnap_conformance.checkpoint.device_ranks import MEMORY, STAND_IN, VERBS, DeviceRanks
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.checkpoint.device_ranks import DeviceObservation

BUSY_SECONDS = 12.0
"""Bound of a verb while a kernel runs that does not end, in seconds."""

ERROR, NUMBER = "CUDA_ERROR_NOT_SUPPORTED", "801"


@pytest.mark.clause("DEVICE-ALL-TOGETHER")
def test_all_processes_take_each_step_together(
    device_kind: str, run_device: Callable[..., DeviceObservation]
) -> None:
    """By the driver's own log every verb has ended on all processes before the next begins on any."""
    with DeviceRanks(device_kind) as ranks:
        seen = run_device(ranks)
    require(device_checks.check_completed(seen) + device_checks.check_device_order(seen))


@pytest.mark.clause("DEVICE-MEMORY-RETURNS")
def test_memory_leaves_the_device_and_returns(
    device_kind: str, run_device: Callable[..., DeviceObservation]
) -> None:
    """The device holds less between checkpoint and restore, and each process finds its pattern again."""
    with DeviceRanks(device_kind) as ranks:
        seen = run_device(ranks)
    require(device_checks.check_completed(seen) + device_checks.check_memory(seen))


@pytest.mark.clause("DEVICE-CONTEXT-FREE-NAMED")
def test_a_process_without_a_context_is_left_alone(
    device_kind: str, run_device: Callable[..., DeviceObservation]
) -> None:
    """A process that never initialised CUDA is named in the lock's result, and no call is made on it."""
    with DeviceRanks(device_kind) as ranks:
        seen = run_device(ranks)
    require(device_checks.check_context_free(seen))


@pytest.mark.clause("DEVICE-READ-BACK")
def test_a_success_without_its_state_is_a_failure(
    run_device: Callable[..., DeviceObservation],
) -> None:
    """A driver that answers success and does nothing, at each verb, on one of two processes."""
    found = []
    for verb in VERBS:
        with DeviceRanks("stand-in", faults={(1, verb): "IDLE"}) as ranks:
            seen = run_device(ranks)
        found += device_checks.check_false_success(seen, verb, "a success without its state")
    require(found)


@pytest.mark.clause("DEVICE-FAILURE-NAMED")
def test_a_failure_says_verb_process_and_error(
    run_device: Callable[..., DeviceObservation],
) -> None:
    """An error at each verb, on each of two processes."""
    found = []
    for verb in VERBS:
        for rank in (0, 1):
            with DeviceRanks("stand-in", faults={(rank, verb): ERROR}) as ranks:
                seen = run_device(ranks)
            found += device_checks.check_named(seen, verb, seen.pids[rank], NUMBER, ERROR)
    require(found)


@pytest.mark.clause("DEVICE-FAILURE-ENDS-KNOWN")
@pytest.mark.parametrize("fault", [ERROR, "LOST"])
def test_a_failed_verb_leaves_all_or_none(fault: str, run_device: Callable[..., DeviceObservation]) -> None:
    """An error that changes nothing, and one after which a process is lost, at each verb."""
    found = []
    for verb in VERBS:
        with DeviceRanks("stand-in", faults={(1, verb): fault}) as ranks:
            seen = run_device(ranks)
        found += device_checks.check_false_success(seen, verb, fault) or device_checks.check_known_end(seen)
    require(found)


@pytest.mark.clause("DEVICE-FAILURE-ENDS-KNOWN")
def test_a_full_device_leaves_all_or_none(
    device_kind: str,
    run_device: Callable[..., DeviceObservation],
) -> None:
    """Somebody else has taken the device's memory when the processes are to be restored."""
    faults = {} if device_kind != STAND_IN else {(1, "restore"): "CUDA_ERROR_OUT_OF_MEMORY"}
    with DeviceRanks(device_kind, faults=faults) as ranks:
        seen = run_device(ranks, while_away=ranks.fill)
    found = device_checks.check_refused(seen, "restore", "a device without memory")
    require(found or device_checks.check_believed(seen))


@pytest.mark.clause("DEVICE-FAILURE-ENDS-KNOWN")
def test_a_busy_device_leaves_all_or_none(
    device_kind: str,
    run_device: Callable[..., DeviceObservation],
) -> None:
    """One of two processes runs a kernel that does not end, for which the driver's lock waits."""
    faults = {} if device_kind != STAND_IN else {(1, "lock"): "CUDA_ERROR_NOT_READY"}
    with DeviceRanks(device_kind, faults=faults, holding=(MEMORY, "busy")) as ranks:
        seen = run_device(ranks, verb_seconds=BUSY_SECONDS)
    found = device_checks.check_believed(seen)
    if not ranks.real:
        found += device_checks.check_refused(seen, "lock", "a device that is busy")
    require(found or device_checks.check_carried(seen, "busy"))


@pytest.mark.clause("DEVICE-HANG-BOUNDED")
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_that_never_returns_is_a_hang(verb: str, run_device: Callable[..., DeviceObservation]) -> None:
    """One of two processes' calls never returns; afterwards all run or none is left, and no helper is."""
    with DeviceRanks("stand-in", faults={(1, verb): "HANG"}) as ranks:
        seen = run_device(ranks)
    require(device_checks.check_hang(seen, verb) or device_checks.check_known_end(seen))
