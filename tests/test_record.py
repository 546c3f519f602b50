"""The run record: a stream that survives a kill, results that are always whole, a published schema."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from nvsnap_conformance.outcomes import Outcome
from nvsnap_conformance.report.degraded import degradations
from nvsnap_conformance.report.model import CaseRecord, RunRecord
from nvsnap_conformance.report.record import EventStream, read_events, read_results, write_results

SCHEMA = Path(__file__).parents[1] / "docs" / "results.schema.json"


def record(**changes: object) -> RunRecord:
    case = CaseRecord(
        nodeid="suites/x.py::test_y",
        arm="vllm-cpu-tp2",
        mutant=None,
        clauses=["LIFE-ORDER"],
        outcome=Outcome.FAILED,
        signature="ORDER:OVERTAKEN",
        message="rank 1 was late",
        expectation=None,
        seconds=1.5,
        bundle=None,
    )
    fields: dict[str, object] = {
        "suite_version": "0.1.0",
        "state": "running",
        "started": datetime.now(UTC),
        "ended": None,
        "command": ["nvsnap-conformance", "run"],
        "targets": ["vllm-cpu"],
        "profiles": ["hooks"],
        "machine": {"cores": 2},
        "engines": [],
        "cases": [case],
        "clauses": [],
        "mutants": [],
        "missing": [],
        "degraded": [],
        "verdict": "running",
        "exit_code": None,
    }
    return RunRecord.model_validate(fields | changes)


def test_published_schema_is_the_model_s_and_takes_a_record(tmp_path: Path) -> None:
    published = json.loads(SCHEMA.read_text())
    assert published == RunRecord.model_json_schema(), "run `python -m nvsnap_conformance.report.schema`"
    path = write_results(tmp_path, record())
    jsonschema.validate(json.loads(path.read_text()), published)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(path.read_text()) | {"state": "fine"}, published)


def test_results_are_private_and_read_back(tmp_path: Path) -> None:
    path = write_results(tmp_path / "new" / "folder", record())
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_results(path) == record(started=read_results(path).started)
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_a_record_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = write_results(tmp_path, record())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"surprise": 1}))
    with pytest.raises(ValidationError, match="surprise"):
        read_results(path)


WRITER = """
import os, signal, sys
from pathlib import Path
from nvsnap_conformance.report.record import EventStream
stream = EventStream(Path(sys.argv[1]))
for number in range(100):
    stream.emit("case", number=number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_events_written_before_a_kill_are_kept(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    events = read_events(tmp_path / "events.jsonl")
    assert [event["number"] for event in events] == list(range(100))
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    stream = EventStream(tmp_path)
    stream.emit("case", number=1)
    stream.close()
    with stream.path.open("a") as file:
        file.write('{"kind": "case", "num')
    assert [event["number"] for event in read_events(stream.path)] == [1]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ()),
        ({"NCCL_NVLS_ENABLE": "1", "NCCL_P2P_DISABLE": "0"}, ()),
        ({"NCCL_NVLS_ENABLE": "0"}, ("NVLS off",)),
        (
            {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "custom_all_reduce": "off"},
            ("P2P off", "SHM off", "custom all-reduce off"),
        ),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, ("multicast off",)),
        ({"NCCL_NVLS_DISABLE": "1"}, ()),  # no NCCL variable: it switches nothing off
        ({"backend": "gloo", "NCCL_NVLS_ENABLE": "0"}, ("no GPU",)),
    ],
)
def test_degradations(environment: dict[str, str], expected: tuple[str, ...]) -> None:
    assert degradations(environment) == expected
