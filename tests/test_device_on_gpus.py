"""The GPU forms of the device cases over fakes of cuda-bindings and NVML: all but the driver itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.checkpoint import device_checks
from nvsnap_conformance.checkpoint.cuda_driver import CudaDriverCheckpointer
from nvsnap_conformance.checkpoint.device_failure import Fate
from nvsnap_conformance.checkpoint.device_ranks import STAND_IN_DEVICES, DeviceRanks

if TYPE_CHECKING:
    from collections.abc import Iterator

FAKES = Path(__file__).parent / "fake_gpus"


NAMES = ("pynvml", "cuda", "cuda.bindings", "cuda.bindings.driver")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    real = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    monkeypatch.syspath_prepend(str(FAKES))
    driver = tmp_path / "driver"
    driver.mkdir()
    monkeypatch.setenv("NVSNAP_STAND_IN_DRIVER", str(driver))
    monkeypatch.setenv("NVS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        "nvsnap_conformance.checkpoint.cuda_driver._maps_cuda",
        lambda pid: (driver / f"{pid}.state").exists(),
    )
    yield driver
    # No other test of this process meets the fakes.
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(real)


@pytest.mark.parametrize("kind", ["gpu", "gpus"])
def test_processes_on_gpus_are_carried(kind: str) -> None:
    with DeviceRanks(kind) as ranks:
        on = {told.split()[0] for told in ranks.devices()}
        seen = ranks.cycle(CudaDriverCheckpointer())
    assert on == set(STAND_IN_DEVICES[: 2 if kind == "gpus" else 1])
    assert seen.memory == {"before": 128 << 20, "between": 0, "after": 128 << 20}
    assert device_checks.check_carried(seen, "memory") == []
    assert device_checks.check_memory(seen) == []
    assert device_checks.check_device_order(seen) == []
    assert device_checks.check_context_free(seen) == []


@pytest.mark.parametrize(
    ("fault", "at", "fate", "told"),
    [
        ("CUDA_ERROR_NOT_SUPPORTED", "checkpoint", Fate.RUNNING, []),
        ("LOST", "restore", Fate.KILLED, ["CUDA:801@restore.memory"]),
    ],
)
def test_what_became_of_a_failure_on_gpus_is_read_from_the_driver(
    folder: Path, fault: str, at: str, fate: Fate, told: list[str]
) -> None:
    with DeviceRanks("gpu") as ranks:
        (folder / "faults.json").write_text(json.dumps({f"{ranks.pids[1]}:{at}": fault}))
        seen = ranks.cycle(CudaDriverCheckpointer())
    assert seen.failure is not None
    assert seen.failure.fate is fate
    assert seen.states == (dict.fromkeys(seen.pids, "RUNNING") if fate is Fate.RUNNING else {})
    found = device_checks.check_carried(seen, "memory")
    assert [str(one.signature) for one in found] == told


def test_a_process_on_gpus_that_is_left_locked_is_seen() -> None:
    class LeavesThemLocked(CudaDriverCheckpointer):
        def checkpoint(self, _pids: list[int], _deadline: Any) -> Any:
            raise self._failed("checkpoint", "something", "801")

        def roll_back(self) -> Fate:
            return Fate.RUNNING

    with DeviceRanks("gpu") as ranks:
        seen = ranks.cycle(LeavesThemLocked())
    found = device_checks.check_carried(seen, "memory")
    assert [str(one.signature) for one in found] == ["DEVICE:LEFT_LOCKED"]


def test_two_processes_change_gpus() -> None:
    one, other = STAND_IN_DEVICES
    moves = {one: other, other: one}
    with DeviceRanks("gpus") as ranks:
        before = ranks.devices()
        seen = ranks.cycle(CudaDriverCheckpointer(moves=moves))
        after = ranks.devices()
    assert device_checks.check_carried(seen, "memory") == []
    assert device_checks.check_devices(before, after, moves) == []
    assert [told.split()[0] for told in after] == [other, one]
