"""Known-bad freezers: what the clause that every thread is stopped must catch."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGCONT
from typing import TYPE_CHECKING

from nvsnap_conformance.checkpoint.freeze import FreezeCheckpointer, read_states
from nvsnap_conformance.checkpoint.protocol import CheckpointResult, ProcessState
from nvsnap_conformance.deadline import Deadline, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.engines.process import EngineProcess


class FreezeSkipsOne(FreezeCheckpointer):
    """Leaves the last process that is not the root running, and reports it stopped."""

    name = "freeze-skips-one"

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Freeze all, continue one, report what was true before that; the root if it is alone."""
        result = super().dump(process, folder, deadline)
        skipped = process.tree()[-1]
        skipped.send(SIGCONT)
        wait_for(
            "the skipped process to run",
            lambda: not read_states([skipped])[0].stopped,
            deadline,
            interval=0.005,
        )
        return result


class FreezeReportsOnly(FreezeCheckpointer):
    """Stops nothing, and reports every thread stopped."""

    name = "freeze-reports-only"

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:  # noqa: ARG002
        """Report without a signal sent."""
        states = tuple(_claimed(state) for state in read_states(process.tree()))
        return CheckpointResult("dump", 0.0, states)

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:  # noqa: ARG002
        """Report the processes as they are: they never stopped."""
        return CheckpointResult("load", 0.0, read_states(process.tree()))


def _claimed(state: ProcessState) -> ProcessState:
    return replace(state, state="T", threads=dict.fromkeys(state.threads, "T"))
