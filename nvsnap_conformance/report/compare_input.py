"""Reads what ``compare`` takes: a run record (a folder or its results.json), or expected outcomes (TOML)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.experiments.record import ArmOutcome, Factors
from nvsnap_conformance.outcomes import Outcome, Signature
from nvsnap_conformance.report.compare import ArmFacts, ClauseFacts, Facts, facts_of
from nvsnap_conformance.report.record import read_results
from nvsnap_conformance.tomlfile import StrictModel, WorldSize, read_model

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.report.model import RunRecord

_RESULTS = "results.json"


class RecordError(UsageError):
    """A run record, or a file of expected outcomes, cannot be read as one."""


class ExpectedClause(StrictModel):
    """A clause's expected outcome on an arm; ``signatures`` only where they are expected as well."""

    clause: str = Field(min_length=1)
    arm: str = Field(min_length=1)
    outcome: Outcome
    signatures: tuple[str, ...] | None = None

    @field_validator("signatures")
    @classmethod
    def _readable(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for text in value or ():
            Signature.parse(text)
        return value


class ExpectedArm(StrictModel):
    """The expected outcome of an experiment's arm. An absent key is not compared."""

    name: str = Field(min_length=1)
    outcome: ArmOutcome
    phase: str | None = None
    error: str | None = None
    factors: Factors | None = None
    note: str = ""


class ExpectedConditions(StrictModel):
    """Under what the outcomes are expected. An absent key is not compared."""

    engine: str | None = None
    driver: str | None = None
    gpus: str | None = None
    tensor_parallel: WorldSize | None = None
    checkpointer: str | None = None


class Expected(StrictModel):
    """A file of expected outcomes.

    ``source`` says where they come from. ``covers = "all"`` makes whatever the file does not list a
    disagreement; ``"listed"`` (the default) compares what it lists and nothing else.
    """

    format: Literal["nvsnap-expected/1"]
    source: str = Field(min_length=1)
    covers: Literal["listed", "all"] = "listed"
    conditions: ExpectedConditions = ExpectedConditions()
    clause: tuple[ExpectedClause, ...] = ()
    arm: tuple[ExpectedArm, ...] = ()

    @model_validator(mode="after")
    def _something_once(self) -> Expected:
        if not self.clause and not self.arm:
            raise ValueError("it expects nothing: give [[arm]] or [[clause]] entries")
        names = [arm.name for arm in self.arm]
        keys = [(clause.clause, clause.arm) for clause in self.clause]
        for twice in [n for n in names if names.count(n) > 1] + [k for k in keys if keys.count(k) > 1]:
            raise ValueError(f"{twice} is expected twice")
        return self

    def facts(self, *, source: str) -> Facts:
        """Return what the file claims."""
        return Facts(
            source=source,
            clauses={
                (c.clause, c.arm): ClauseFacts(
                    c.outcome.value, None if c.signatures is None else frozenset(c.signatures)
                )
                for c in self.clause
            },
            arms={
                a.name: ArmFacts(
                    a.outcome.value,
                    a.phase,
                    a.error,
                    None if a.factors is None else str(a.factors),
                    frozenset(name for name in ("phase", "error", "factors") if getattr(a, name) is not None),
                )
                for a in self.arm
            },
            conditions={
                name: str(value) for name, value in self.conditions.model_dump().items() if value is not None
            },
            partial=self.covers == "listed",
        )


def read_expected(path: Path) -> Expected:
    """Read a file of expected outcomes; raise :class:`RecordError` with file and key where it is none."""
    return read_model(path, Expected, error=RecordError, what="the file of expected outcomes")


def read_side(path: Path) -> Facts:
    """Read one side of a comparison; raise :class:`RecordError` for what is neither kind of file."""
    if path.suffix == ".toml":
        return read_expected(path).facts(source=str(path))
    return facts_of(read_record(path), source=str(path))


def read_record(path: Path) -> RunRecord:
    """Read a run record from its folder or file; raise :class:`RecordError` where there is none."""
    file = path / _RESULTS if path.is_dir() else path
    try:
        return read_results(file)
    except FileNotFoundError:
        raise RecordError(
            f"there is no run record at {path}",
            cause=f"the folder holds no {_RESULTS}" if path.is_dir() else "the path is wrong",
            next_step="name the folder that `run --out` or `experiment --out` wrote",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RecordError(
            f"{file} is no run record of this version: {place}: {first['msg']}",
            cause="it was written by another version, cut short, or is another file",
            next_step="docs/results.schema.json has the form",
        ) from None
