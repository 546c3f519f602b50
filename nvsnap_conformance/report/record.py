"""Writes the run record as the run goes: a stream of events, and results.json replaced after each case.

Both are complete up to the last case when the run is killed: events are appended line by line, and
results.json is written beside itself and renamed.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from nvsnap_conformance.report.model import RunRecord


def new_folder() -> Path:
    """Return the path of a new record's folder below the working directory; it does not exist yet."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path.cwd() / "nvs-runs" / f"{stamp}-{os.getpid()}"


class EventStream:
    """``events.jsonl``: one JSON object a line, each with ``at`` (UTC), ``monotonic`` and ``kind``.

    The file is made by the first event, with mode 0600, and flushed line by line; several workers may
    each have one of their own (``name``) in one folder.
    """

    def __init__(self, folder: Path, name: str = "events.jsonl") -> None:
        self.path = folder / name
        self._file: TextIO | None = None

    def emit(self, kind: str, **facts: Any) -> None:
        """Append one event; a value that JSON does not know is written as its text."""
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "monotonic": round(time.monotonic(), 6),
            "kind": kind,
            **facts,
        }
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


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
    """Replace ``path`` atomically, with mode 0600, and return it; its folder is made where need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.chmod(0o600)
    draft.replace(path)
    return path


def read_results(path: Path) -> RunRecord:
    """Read a ``results.json``; raises pydantic's ``ValidationError`` for what is not one."""
    return RunRecord.model_validate_json(path.read_text(encoding="utf-8"))
