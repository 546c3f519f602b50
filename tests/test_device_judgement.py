"""Device checkpointers that do less than they say, and what the checks make of each."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.checkpoint import device_checks, stand_in_driver
from nvsnap_conformance.checkpoint.cuda_driver import CudaDriverCheckpointer
from nvsnap_conformance.checkpoint.device_failure import DeviceFailure, Fate
from nvsnap_conformance.checkpoint.device_process import DeviceProcess
from nvsnap_conformance.checkpoint.device_ranks import STAND_IN_DEVICES, DeviceObservation, DeviceRanks
from nvsnap_conformance.checkpoint.protocol import CheckpointResult
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded, UsageError
from nvsnap_conformance.outcomes import Outcome
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable

STAND_IN = Path(stand_in_driver.__file__)


def codes(findings: list[Any]) -> list[str]:
    return [str(found.signature) for found in findings]


def seen_with(kind: Callable[..., Any], **options: Any) -> DeviceObservation:
    with DeviceRanks("stand-in", **options) as ranks:
        return ranks.cycle(kind(driver=STAND_IN), verb_seconds=20.0)


def end(pid: int) -> None:
    process = ProcessId.of(pid)
    assert process is not None
    process.send(SIGKILL)
    wait_for("its end", lambda: not process.alive, Deadline.after(10.0), interval=0.01)


class KillsOne(CudaDriverCheckpointer):
    def unlock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        done = super().unlock(pids, deadline)
        end(pids[1])
        return done


class DoesNothing:
    def __init__(self, **_options: Any) -> None:
        pass

    def __getattr__(self, verb: str) -> Callable[..., CheckpointResult]:
        told: dict[str, Any] = {"calls": [], "states": {}, "without_context": {}}
        return lambda _pids, _deadline: CheckpointResult(verb, 0.0, (), told)


class IgnoresTheLock(CudaDriverCheckpointer):
    def problem(self, verb: str, reply: Any) -> tuple[str, str] | None:
        return None if verb == "lock" else super().problem(verb, reply)


class LosesAtRestore(CudaDriverCheckpointer):
    """Fails as driver 580 does with a live mapping, and leaves both processes as they are."""

    def restore(self, _pids: list[int], _deadline: Deadline) -> CheckpointResult:
        raise DeviceFailure("restore failed", signature="CUDA:1@restore", fate=Fate.STUCK)


def test_a_process_that_is_gone_is_not_carried() -> None:
    seen = seen_with(KillsOne)
    assert codes(device_checks.check_carried(seen, "any")) == ["DEVICE:STATE_LOST"]
    assert device_checks.came_to(seen) == "no answer: it is gone"


def test_a_cycle_in_which_nothing_was_checkpointed_carries_nothing() -> None:
    assert codes(device_checks.check_carried(seen_with(DoesNothing), "any")) == ["DEVICE:MEMORY_KEPT"]


def test_a_rank_with_memory_that_is_left_out_is_seen() -> None:
    seen = seen_with(CudaDriverCheckpointer, faults={(1, "lock"): "CUDA_ERROR_NOT_INITIALIZED"})
    assert codes(device_checks.check_carried(seen, "any")) == ["DEVICE:MEMORY_KEPT"]


def test_an_error_that_is_passed_over_is_no_refusal_of_a_later_verb() -> None:
    seen = seen_with(IgnoresTheLock, faults={(1, "lock"): "CUDA_ERROR_NOT_READY"})
    assert "DEVICE:FALSE_SUCCESS" in codes(device_checks.check_carried(seen, "busy"))
    assert codes(device_checks.check_believed(seen)) == ["DEVICE:FALSE_SUCCESS"]


def test_a_failure_at_restore_says_what_was_held_and_must_end_known() -> None:
    found = device_checks.check_carried(seen_with(LosesAtRestore), "ipc")
    assert codes(found) == ["CUDA:1@restore.ipc", "DEVICE:LEFT_LOCKED"]


def test_a_lost_process_ends_the_others() -> None:
    with DeviceRanks("stand-in") as ranks:
        device = CudaDriverCheckpointer(driver=STAND_IN)
        device.lock(ranks.pids, Deadline.after(20.0))
        device.checkpoint(ranks.pids, Deadline.after(20.0))
        end(ranks.pids[1])
        with pytest.raises(DeviceFailure) as caught:
            device.restore([ranks.pids[0], *ranks.context_free], Deadline.after(20.0))
        assert str(caught.value.signature) == "CUDA:LOST@restore"
        assert "host layer" in caught.value.cause


def test_half_a_move_is_undone_by_ending_the_engine() -> None:
    one, other = STAND_IN_DEVICES
    with DeviceRanks("stand-in") as ranks:
        # The second process sees one device only, so that a map of both does not hold for it.
        (ranks._folder / f"{ranks.pids[1]}.devices").write_text(f'["{other}"]')
        seen = ranks.cycle(CudaDriverCheckpointer(driver=STAND_IN, moves={one: other, other: one}))
    assert seen.failure is not None
    assert seen.failure.fate is Fate.KILLED
    assert "map of devices" in seen.failure.cause
    assert not any(seen.alive.values())


def test_a_map_that_names_a_device_twice_is_refused() -> None:
    one, other = STAND_IN_DEVICES
    with pytest.raises(UsageError, match="names one twice"):
        CudaDriverCheckpointer(driver=STAND_IN, moves={one: other, f"GPU-{one}": one})


def twisted(folder: Path, old: str, new: str) -> Path:
    text = STAND_IN.read_text()
    assert old in text
    path = folder / "driver.py"
    path.write_text(text.replace(old, new, 1))
    return path


def test_a_line_that_is_no_answer_is_a_failure_of_that_process(tmp_path: Path) -> None:
    chatty = twisted(
        tmp_path,
        "    began = time.monotonic()\n",
        "    began = time.monotonic()\n    print('hello', flush=True)\n",
    )
    with DeviceRanks("stand-in") as ranks:
        seen = ranks.cycle(CudaDriverCheckpointer(driver=chatty))
    assert seen.failure is not None
    assert str(seen.failure.signature) == "CUDA:HELPER@lock"
    assert "hello" in str(seen.failure)


@pytest.mark.parametrize(
    ("old", "signature", "fate"),
    [
        ("    return CUresult.CUDA_SUCCESS, pid", "CUDA:HANG@checkpoint", Fate.RUNNING),
        (
            "    state = _state(pid)\n    if state is None:\n        return CUresult.CUDA_ERROR_NOT_INIT",
            "CUDA:HANG@lock",
            Fate.RUNNING,
        ),
    ],
    ids=["restore-thread", "state"],
)
def test_a_call_beside_the_verbs_that_never_returns_is_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, signature: str, fate: Fate
) -> None:
    monkeypatch.setattr("nvsnap_conformance.checkpoint.cuda_driver.STATE_SECONDS", 2.0)
    still = twisted(tmp_path, old, f"    signal.pause()\n{old}")
    with DeviceRanks("stand-in") as ranks:
        seen = ranks.cycle(CudaDriverCheckpointer(driver=still), verb_seconds=20.0)
    assert seen.failure is not None
    assert str(seen.failure.signature) == signature
    assert seen.failure.outcome is Outcome.HANG
    assert seen.failure.fate is fate


def test_half_a_line_is_no_answer_within_the_deadline() -> None:
    process = DeviceProcess(["/bin/sh", "-c", "printf half; exec cat"], stdin=-1, stdout=-1, stderr=-1)
    try:
        with pytest.raises(DeadlineExceeded):
            process._line(Deadline.after(0.3))
    finally:
        process.end()
