"""What the tests of experiments share: the shipped plan, what was measured, runs over stand-ins, an NVML."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.experiments.plan import Arm, read_plan
from nvsnap_conformance.experiments.record import (
    ArmOutcome,
    ArmRecord,
)
from nvsnap_conformance.experiments.runner import Experiment
from nvsnap_conformance.experiments.standin import StandInApparatus
from nvsnap_conformance.report.compare_input import read_expected

if TYPE_CHECKING:
    from nvsnap_conformance.report.model import RunRecord

ROOT = Path(__file__).parents[1]
PLAN = read_plan()
EXPECTED = read_expected(ROOT / "docs" / "evidence" / "teardown.expected.toml")
MEASURED = {arm.name: arm.outcome for arm in EXPECTED.arm}


def as_record(arm: Arm, outcome: ArmOutcome) -> ArmRecord:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return ArmRecord(
        name=arm.name, summary=arm.summary, factors=arm.factors, outcome=outcome, phase=None, error=None,
        reason="", started=now, ended=now,
    )  # fmt: skip


def experiment(out: Path, apparatus: StandInApparatus | None = None, **more: Any) -> Experiment:
    names = more.pop("names", ())
    return Experiment(PLAN, PLAN.select(names), apparatus or StandInApparatus(2), out, **more)


def outcomes(record: RunRecord) -> dict[str, ArmOutcome]:
    assert record.experiment is not None
    return {arm.name: arm.outcome for arm in record.experiment.arms}


class FakeNvml:
    """What is used of NVML: devices with bytes (none: lost), and their processes with bytes."""

    class NVMLError(Exception):
        pass

    def __init__(self, **used: int) -> None:
        self.used = used
        self.processes: dict[str, dict[int, int | None]] = {}

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        if handle not in self.used:
            raise self.NVMLError("GPU is lost")
        return type("Info", (), {"used": self.used[handle]})

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        if handle not in self.used:
            raise self.NVMLError("GPU is lost")
        return [
            type("Process", (), {"pid": pid, "usedGpuMemory": held})
            for pid, held in self.processes.get(handle, {}).items()
        ]
