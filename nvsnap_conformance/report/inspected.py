"""What a path given to ``inspect`` holds, by content: a hang bundle, a run record, or a stream of events."""

from __future__ import annotations

import fnmatch
import json
import os
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.files import read_bytes
from nvsnap_conformance.outcomes import ExitCode, Outcome
from nvsnap_conformance.report.compare_input import RecordError, read_record
from nvsnap_conformance.report.writing import is_written

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.report.model import RunRecord

_BUNDLE, _RESULTS, _EVENTS = "bundle.json", "results.json", "events*.jsonl"


class Content(StrEnum):
    """What was found."""

    BUNDLE = "hang bundle"
    RECORD = "run record"
    EVENTS = "event stream"


def find(path: Path) -> tuple[Content, Path]:
    """Return what ``path`` holds and where: a bundle's folder, a record's file, or a stream's.

    A stream beside the record of its run is that run: the record says more. Raises :class:`UsageError` for
    anything else.
    """
    try:
        if path.is_dir():
            return _in_folder(path)
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            next_step="give a file that you have the right to read, or a folder that holds one",
        ) from error
    if path.name == _BUNDLE:
        return Content.BUNDLE, path.parent
    whole = _object(data)
    if path.name == _RESULTS or "schema_version" in whole:
        return Content.RECORD, path
    if {"at", "kind"} <= _object(data.split(b"\n", 1)[0]).keys():
        if path.match(_EVENTS) and (path.parent / _RESULTS).exists():
            return Content.RECORD, path.parent / _RESULTS
        return Content.EVENTS, path
    raise _unknown(path)


def _in_folder(path: Path) -> tuple[Content, Path]:
    names = set(os.listdir(path))  # noqa: PTH208 - Path.glob hides that a folder cannot be read
    if _BUNDLE in names:
        return Content.BUNDLE, path
    if _RESULTS in names:
        return Content.RECORD, path / _RESULTS
    streams = sorted(name for name in names if fnmatch.fnmatchcase(name, _EVENTS))
    if streams:
        return Content.EVENTS, path / streams[0]
    raise _unknown(path)


def record_summary(path: Path) -> tuple[dict[str, Any], int]:
    """Return what a run record says in short, and the exit code of ``inspect``: the record's own.

    A run that has not ended, or was aborted, is incomplete (6). Raises ``RecordError`` for a damaged one.
    """
    record = read_record(path)
    unfinished = _unfinished(path.parent) if record.state == "running" else None
    facts: dict[str, Any] = {
        "content": Content.RECORD.value,
        "state": record.state,
        "verdict": record.verdict if unfinished is None else f"INCOMPLETE: {unfinished}",
        "targets": record.targets,
        "clauses": len(record.clauses),
        "not_passed": [
            {"clause": c.clause, "arm": c.arm, "outcome": c.outcome.value, "note": c.note}
            for c in record.clauses
            if c.outcome is not Outcome.PASSED
        ],
        "survived": {m.name: m.survived for m in record.mutants if m.survived},
        "missing": record.missing,
    }
    return facts, _code(record)


def events_summary(path: Path) -> tuple[dict[str, Any], int]:
    """Return what is left of a run that wrote no record, from its event stream; always incomplete (6).

    A last line that was cut short is left out; :class:`RecordError` where the stream has no event at all.
    """
    events = []
    try:
        lines = read_bytes(path).splitlines()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}", next_step="check the path") from error
    for line in lines:
        event = _object(line)
        if "kind" not in event:
            break
        events.append(event)
    if not events:
        raise RecordError(
            f"{path} is no event stream of a run: its first line is no event",
            cause="it was cut short, or is another file",
            next_step=f"give the folder of a run, which holds {_RESULTS}",
        )
    cases = [event for event in events if event["kind"] == "case"]
    ended = {(str(case.get("nodeid")), str(case.get("arm"))) for case in cases}
    began = [(str(e.get("nodeid")), str(e.get("arm"))) for e in events if e["kind"] == "case-start"]
    facts: dict[str, Any] = {
        "content": Content.EVENTS.value,
        "state": "aborted",
        "verdict": (
            f"INCOMPLETE: the run wrote no record, its events end after {len(cases)} cases; "
            f"{_unfinished(path.parent)}"
        ),
        "targets": _texts(next((e.get("targets") for e in events if e["kind"] == "session"), None)),
        "clauses": 0,
        "not_passed": [
            {
                "clause": str(case.get("clauses")),
                "arm": str(case.get("arm")),
                "outcome": str(case.get("outcome")),
                "note": str(case.get("message") or ""),
            }
            for case in cases
            if case.get("outcome") != Outcome.PASSED.value
        ],
        "survived": {},
        "missing": [
            f"{nodeid} on {arm} began and did not end" for nodeid, arm in began if (nodeid, arm) not in ended
        ],
    }
    return facts, ExitCode.INCOMPLETE


def text(facts: dict[str, Any]) -> str:
    """Write a summary for people."""
    lines = [
        f"{facts['content']}, {facts['state']}: {facts['verdict']}",
        f"targets: {', '.join(map(str, facts['targets'])) or 'none'}",
    ]
    for entry in facts["not_passed"]:
        lines.append(f"{entry['outcome']:>16}  {entry['clause']} on {entry['arm']}")
        lines += [f"{'':18}{line}" for line in entry["note"].splitlines()[:3]]
    lines += [f"mutant {name} SURVIVED {', '.join(clauses)}" for name, clauses in facts["survived"].items()]
    lines += [f"missing: {what}" for what in facts["missing"]]
    return "\n".join(lines)


def _unfinished(folder: Path) -> str:
    """Say what became of a run whose record does not say that it ended."""
    match is_written(folder):
        case True:
            return "the run still goes on"
        case False:
            return (
                "the run never ended: no process of it is alive on this host; it was killed, or the machine "
                "went down"
            )
        case _:
            return "the run has not ended; whether a process of it is alive cannot be told here"


def _code(record: RunRecord) -> int:
    known = {code.value for code in ExitCode}
    if record.state != "complete" or record.exit_code not in known:
        return ExitCode.INCOMPLETE
    return record.exit_code


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _object(data: bytes) -> dict[str, Any]:
    """Parse one JSON object; an empty one for whatever else ``data`` is."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _unknown(path: Path) -> UsageError:
    return UsageError(
        f"{path} holds no hang bundle and no run record",
        cause=f"there is no {_BUNDLE} (of `watch` or a failed case), {_RESULTS} or {_EVENTS} (of a run)",
        next_step="give such a folder, or the file itself",
    )
