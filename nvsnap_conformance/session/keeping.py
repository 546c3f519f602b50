"""The session's stream of events, which outlives a full disk: the run ends then, and says so once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.report.record import EventStream, write_results

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.report.model import RunRecord


class RecordKeeper(EventStream):
    """Writes events and results, and raises for neither: ``failure`` is the first error, ``None`` without."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.failure: EnvironmentFailure | None = None
        self._folder = folder

    def emit(self, kind: str, **facts: Any) -> None:
        """Append one event, unless an earlier one could not be written."""
        if self.failure is None:
            try:
                super().emit(kind, **facts)
            except EnvironmentFailure as error:
                self.failure = error

    def results(self, record: RunRecord) -> None:
        """Replace ``results.json``; tried again after a failure, since room may have been made."""
        try:
            write_results(self._folder, record)
        except EnvironmentFailure as error:
            self.failure = self.failure or error
