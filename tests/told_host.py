"""A host layer for tests of the order in which an orchestrator calls its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.protocol import CheckpointResult

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.deadline import Deadline


class ToldHost:
    """A host layer that does nothing but say so."""

    name = "told"
    replaces_processes = False

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def dump(self, _process: Any, _folder: Path, _deadline: Deadline) -> CheckpointResult:
        self.told.append("dump")
        return CheckpointResult("dump", 0.0, ())

    def load(self, _process: Any, _folder: Path, _deadline: Deadline) -> CheckpointResult:
        self.told.append("load")
        return CheckpointResult("load", 0.0, ())
