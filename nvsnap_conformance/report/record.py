"""Writes the run record as the run goes: a stream of events, and results.json replaced after each case.

Both are complete up to the last case when the run is killed: events are appended line by line, and
results.json is written beside itself and renamed.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from nvsnap_conformance.files import read_text
from nvsnap_conformance.report.model import RunRecord
from nvsnap_conformance.report.place import unwritten

if TYPE_CHECKING:
    from pathlib import Path


class EventStream:
    """``events.jsonl``: one JSON object a line, each with ``at`` (UTC), ``monotonic`` and ``kind``.

    The file is made by the first event, with mode 0600, and flushed line by line; several workers may
    each have one of their own (``name``) in one folder.
    """

    def __init__(self, folder: Path, name: str = "events.jsonl") -> None:
        self.path = folder / name
        self._file: TextIO | None = None

    def emit(self, kind: str, **facts: Any) -> None:
        """Append one event; a value that JSON does not know is written as its text.

        Raises :class:`EnvironmentFailure` where it cannot be written; the events before stay readable.
        """
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "monotonic": round(time.monotonic(), 6),
            "kind": kind,
            **facts,
        }
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            self.close()
            raise unwritten(self.path, error) from error

    def _open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "w", encoding="utf-8")

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            # What could not be written is still in the buffer, and fails again.
            with suppress(OSError):
                file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read a stream back; a last line that was cut short by a kill is left out."""
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            break
        events.append(event)
    return events


def write_results(folder: Path, record: RunRecord) -> Path:
    """Replace ``results.json`` in ``folder`` atomically and return its path."""
    return write_whole(folder / "results.json", record.model_dump_json(indent=1) + "\n")


def write_whole(path: Path, text: str) -> Path:
    """Replace ``path`` atomically, with mode 0600, and return it; its folder is made where need be.

    Raises :class:`EnvironmentFailure` where it cannot be written; what was there before stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o600)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise unwritten(path, error) from error
    return path


def read_results(path: Path) -> RunRecord:
    """Read a ``results.json``; raises pydantic's ``ValidationError`` for what is not one."""
    return RunRecord.model_validate_json(read_text(path))
