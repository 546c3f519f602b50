"""Reads what ``compare`` takes: a run record, the page of an experiment, or expected outcomes (TOML)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.experiments.record import ArmOutcome, Conditions, Factors
from nvsnap_conformance.files import read_text
from nvsnap_conformance.outcomes import Outcome, Signature
from nvsnap_conformance.report.compare import ArmFacts, ClauseFacts, Facts, conditions_of, facts_of
from nvsnap_conformance.report.record import read_results
from nvsnap_conformance.tomlfile import Flag, StrictModel, WorldSize, read_model

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.report.model import RunRecord

_RESULTS = "results.json"
_COMPLETE = "complete"
_PAGE = "nvsnap-experiment-answer/"


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
    """Under what the outcomes are expected. An absent key is not compared, nor is a library without one."""

    engine: str | None = None
    driver: str | None = None
    gpus: str | None = None
    tensor_parallel: WorldSize | None = None
    checkpointer: str | None = None
    stand_in: Flag | None = None
    libraries: dict[str, str] = Field(default_factory=dict)
    degraded: tuple[str, ...] | None = None

    def by_name(self) -> dict[str, str]:
        """Return the conditions of an experiment that are given, by the names that a record has for them."""
        given = self.model_dump(exclude={"libraries", "degraded", "stand_in"}, exclude_none=True)
        if self.stand_in is not None:
            given["stand_in"] = str(self.stand_in).lower()
        given |= {f"library {name}": version for name, version in self.libraries.items()}
        return {name: str(value) for name, value in given.items()}


class Expected(StrictModel):
    """A file of expected outcomes.

    ``source`` says where they come from. ``covers = "all"`` makes an arm or a clause that the file does not
    list a disagreement; ``"listed"`` (the default) compares what it lists and nothing else. Outcomes are
    those of a run that came to its end, so that any other one is a disagreement.
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
            conditions=self.conditions.by_name(),
            degraded=None if self.conditions.degraded is None else frozenset(self.conditions.degraded),
            state=_COMPLETE,
            partial=self.covers == "listed",
            given=True,
        )


class _PagePart(BaseModel):
    """A part of an experiment's page that is compared; what else it holds is not."""

    model_config = ConfigDict(extra="ignore")


class PageArm(_PagePart):
    """An arm as a page has it."""

    name: str
    outcome: ArmOutcome
    phase: str | None
    error: str | None
    factors: Factors


class PageConditions(Conditions):
    """The conditions as a page has them, with what was degraded in the run."""

    model_config = ConfigDict(extra="ignore")

    degraded: list[str]


class Page(_PagePart):
    """The page of an experiment in its form for programs (``teardown.json``)."""

    format: Literal["nvsnap-experiment-answer/1"]
    conditions: PageConditions
    undecided: list[str]
    arms: list[PageArm]

    def facts(self, *, source: str) -> Facts:
        """Return what the page claims."""
        return Facts(
            source=source,
            arms={
                arm.name: ArmFacts(arm.outcome.value, arm.phase, arm.error, str(arm.factors))
                for arm in self.arms
            },
            conditions=conditions_of(self.conditions),
            degraded=frozenset(self.conditions.degraded),
            state="aborted" if self.undecided else _COMPLETE,
        )


def read_expected(path: Path) -> Expected:
    """Read a file of expected outcomes; raise :class:`RecordError` with file and key where it is none."""
    return read_model(path, Expected, error=RecordError, what="the file of expected outcomes")


def read_side(path: Path) -> Facts:
    """Read one side of a comparison; raise :class:`RecordError` for what is no kind of file for it."""
    if path.suffix == ".toml":
        return read_expected(path).facts(source=str(path))
    page = _page(path)
    return facts_of(read_record(path), source=str(path)) if page is None else page.facts(source=str(path))


def _page(path: Path) -> Page | None:
    """Return the experiment's page at ``path``; ``None`` where there is something else, or nothing."""
    if not path.is_file():
        return None
    try:
        raw = json.loads(read_text(path))
    except (OSError, ValueError):  # told as what is wrong with a record
        return None
    if not isinstance(raw, dict) or not str(raw.get("format", "")).startswith(_PAGE):
        return None
    try:
        return Page.model_validate(raw)
    except ValidationError as error:
        raise _no_record(
            path, error, "experiment's page", "`experiment` writes one beside its record"
        ) from None


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
        raise _no_record(file, error, "run record", "docs/results.schema.json has the form") from None


def _no_record(file: Path, error: ValidationError, what: str, next_step: str) -> RecordError:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "the file"
    return RecordError(
        f"{file} is no {what} of this version: {place}: {first['msg']}",
        cause="it was written by another version, cut short, or is another file",
        next_step=next_step,
    )
