"""GPU memory of ranks and devices, and the speed of pinned copies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.experiments import bandwidth, gpu_memory
from nvsnap_conformance.experiments.gpu_memory import BY_DEVICE, BY_PROCESS, NvmlMemory, settled
from nvsnap_conformance.experiments.record import (
    ArmOutcome,
    MemoryReading,
    PinnedCopy,
)
from nvsnap_conformance.experiments.standin import StandInApparatus
from tests.experiment_runs import PLAN, FakeNvml, as_record, experiment

if TYPE_CHECKING:
    import pytest

# GPU memory ----------------------------------------------------------------------------------------


def test_memory_by_process_counts_all_devices_and_what_is_gone_as_nothing() -> None:
    nvml = FakeNvml(a=0, b=0)
    memory = NvmlMemory(nvml, ["a", "b"], exclusive=False)
    nvml.processes = {"a": {1: 100, 2: 10}, "b": {2: 200, 9: 999}}
    assert memory.of_ranks([1, 2]) == [100, 210]
    assert memory.source == BY_PROCESS
    nvml.processes = {"a": {1: 100}}
    assert memory.of_ranks([1, 2]) == [100, 0]
    nvml.processes = {"a": {1: 100, 2: None}}
    assert memory.of_ranks([1, 2]) == [100, None]


def test_pids_of_another_namespace_are_not_believed() -> None:
    nvml = FakeNvml(a=1000, b=2000)
    memory = NvmlMemory(nvml, ["a", "b"], exclusive=False)
    nvml.processes = {"a": {1: 100}, "b": {70001: 200}}
    assert memory.of_ranks([1, 2]) == [None, None]
    assert "not told" in memory.source


def test_alone_on_its_devices_a_rank_holds_what_its_device_has_more() -> None:
    nvml = FakeNvml(a=1000, b=2000)
    memory = NvmlMemory(nvml, ["a", "b"], exclusive=True)
    nvml.used = {"a": 1500, "b": 2700}
    assert memory.of_ranks([1, 2]) == [500, 700]
    assert memory.source == BY_DEVICE


def test_a_process_without_a_number_and_a_lost_gpu_are_no_reading() -> None:
    nvml = FakeNvml(a=1000, b=2000)
    memory = NvmlMemory(nvml, ["a", "b"], exclusive=True)
    nvml.processes = {"a": {1: None}, "b": {2: 5}}
    nvml.used = {"a": 1007, "b": 2005}
    assert memory.of_ranks([1, 2]) == [7, 5]
    assert memory.source == BY_DEVICE
    before = memory.of_devices()
    del nvml.used["b"]
    assert memory.of_ranks([1, 2]) == [None, None]
    assert settled(memory, before) == (None, "NVML does not say any more what is used")


def test_a_device_is_back_within_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "SETTLE_SECONDS", 0.05)
    nvml = FakeNvml(a=0)
    memory = NvmlMemory(nvml, ["a"], exclusive=True)
    before = memory.of_devices()
    nvml.used = {"a": 60 << 20}
    assert settled(memory, before) == (True, "back at the baseline")
    nvml.used = {"a": 70 << 20}
    back, note = settled(memory, before)
    assert back is False
    assert "a has 70 MiB more" in note
    assert settled(memory, None)[0] is None


# Speed -------------------------------------------------------------------------------------------------


def test_only_arms_that_ran_alone_are_related_to_the_pinned_copy(tmp_path: Path) -> None:
    out = tmp_path / "run"
    apparatus = StandInApparatus(2)
    apparatus.conditions = apparatus.conditions.model_copy(update={"stand_in": False})
    experiment(out, apparatus, names=("E", "J"), at_once=2, bandwidth=True).run()
    assert "## Speed" not in (out / "teardown.md").read_text()
    experiment(out, apparatus, names=("I", "L", "A"), resume=True).run()
    told = json.loads((out / "teardown.json").read_text())["speeds"]
    assert [speed["name"] for speed in told] == ["I"]
    assert told[0]["moved"] == 877 << 20
    assert "## Speed" in (out / "teardown.md").read_text()


def test_a_share_of_the_pinned_copy() -> None:
    arm = as_record(PLAN.arm[0], ArmOutcome.RIGHT).model_copy(
        update={
            "seconds": {"checkpoint": 2.0, "restore": 1.0},
            "gpu_memory": [
                MemoryReading(moment=moment, rank=rank, bytes=held)
                for moment, rank, held in (
                    ("prepared", 0, 10 << 30), ("prepared", 1, 11 << 30),
                    ("checkpointed", 0, 0), ("checkpointed", 1, 1 << 30),
                )
            ],
        }
    )  # fmt: skip
    copy = PinnedCopy(d2h=float(50 << 30), h2d=float(20 << 30))
    lost = arm.model_copy(update={"outcome": ArmOutcome.LOST})
    assert bandwidth.speeds([lost], [arm.name], copy) == []
    at_no_time = arm.model_copy(update={"seconds": {"checkpoint": 0.0, "restore": 1.0}})
    assert bandwidth.speeds([at_no_time], [arm.name], copy) == []
    (speed,) = bandwidth.speeds([arm], [arm.name], copy)
    assert speed["moved"] == 10 << 30
    assert (speed["checkpoint_share"], speed["restore_share"]) == (0.1, 0.5)
    assert bandwidth.speeds([arm], [], copy) == []


FAKE_TORCH = """
class cuda:
    device_count = staticmethod(lambda: 2)
    synchronize = staticmethod(lambda: None)
    class device:
        def __init__(self, number): pass
        def __enter__(self): pass
        def __exit__(self, *_): pass
class Tensor:
    def copy_(self, other): pass
uint8 = None
empty = lambda *_, **__: Tensor()
"""


def test_pinned_copies_are_timed_in_the_engine_s_interpreter(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    work = tmp_path / "work"
    work.mkdir()
    copy = bandwidth.measure(Path(sys.executable), {"PYTHONPATH": str(tmp_path)}, work)
    assert copy.d2h > 0
    assert copy.h2d > 0


def test_no_pinned_copies_is_told_and_no_more(tmp_path: Path) -> None:
    class NoTorch(StandInApparatus):
        def pinned_copy(self, workdir: Path) -> PinnedCopy:
            return bandwidth.measure(Path(sys.executable), {"PYTHONPATH": "/nowhere"}, workdir)

    said: list[str] = []
    record = experiment(tmp_path / "run", NoTorch(2), names=("E",), bandwidth=True, say=said.append).run()
    assert record.exit_code == 0
    assert any("pinned copies could not be timed" in line and "torch" in line for line in said)
