"""The clause registry: every requirement that the suite judges, read from one TOML file per area.

A clause is one sentence with a stable name, an RFC 2119 level and a source. ``profiles.toml`` beside the
areas names the profiles; a clause says itself in which profiles it stands and where a run must execute it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from nvsnap_conformance.capabilities import parse_need
from nvsnap_conformance.errors import RegistryError
from nvsnap_conformance.suggest import did_you_mean
from nvsnap_conformance.tomlfile import Flag, StrictModel, WorldSize, read_model

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER = Path(__file__).resolve().parent
_PROFILES_FILE = "profiles.toml"
_CLAUSE_ID = re.compile(r"[A-Z][A-Z0-9]*(-[A-Z][A-Z0-9]*)+")


class Level(StrEnum):
    """How binding a clause is, in the words of RFC 2119."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"


def _valid_id(value: str) -> str:
    if not _CLAUSE_ID.fullmatch(value):
        raise ValueError(f"{value!r} is no clause ID: capital words joined by '-', never numbers")
    return value


def _one_sentence(value: str) -> str:
    if not value.endswith(".") or ". " in value or "\n" in value:
        raise ValueError("a clause is one sentence on one line that ends with a full stop")
    return value


ClauseId = Annotated[str, AfterValidator(_valid_id)]


class Source(StrictModel):
    """Where a clause comes from: the project, its version, what to look at there, and a link."""

    project: str
    version: str | None = None
    reference: str = Field(min_length=1)
    url: str = Field(pattern=r"^https://")


class ClauseEntry(StrictModel):
    """A clause as its area's file writes it.

    ``min_world_size`` is the smallest number of ranks at which it means anything, ``needs`` are
    capability expressions (``ptrace``, ``gpus>=2``), ``prerequisites`` the clauses without which its
    result says nothing. ``must_run`` names those of its profiles whose runs are incomplete without it.
    ``needs_engine`` is false for a clause whose cases bring their own processes.
    """

    id: ClauseId
    level: Level
    sentence: Annotated[str, AfterValidator(_one_sentence)]
    source: Source
    min_world_size: WorldSize = 1
    needs: tuple[str, ...] = ()
    prerequisites: tuple[ClauseId, ...] = ()
    profiles: tuple[str, ...] = Field(min_length=1)
    must_run: tuple[str, ...] = ()
    needs_engine: Flag = True

    @field_validator("needs")
    @classmethod
    def _readable_needs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for need in value:
            parse_need(need)
        return value

    @field_validator("must_run")
    @classmethod
    def _must_run_in_own_profiles(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        foreign = set(value) - set(info.data.get("profiles", value))
        if foreign:
            raise ValueError(f"{sorted(foreign)} are not among the clause's profiles")
        return value

    def must_run_in(self, profile: str) -> bool:
        """Whether a run of ``profile`` that did not execute this clause is incomplete."""
        return profile in self.must_run


class Clause(ClauseEntry):
    """One named requirement; ``area`` is the name of the file that declares it."""

    area: str


class _AreaFile(StrictModel):
    clause: tuple[ClauseEntry, ...] = Field(min_length=1)


class _ProfileEntry(StrictModel):
    name: str
    summary: str


class _ProfilesFile(StrictModel):
    profile: tuple[_ProfileEntry, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Profile:
    """A named set of clauses, prerequisites before dependants; ``must_run`` is a subset of it."""

    name: str
    summary: str
    clauses: tuple[str, ...]
    must_run: frozenset[str]


@dataclass(frozen=True)
class Registry:
    """All clauses by ID and all profiles by name, cross-checked."""

    clauses: Mapping[str, Clause]
    profiles: Mapping[str, Profile]

    def clause(self, clause_id: str) -> Clause:
        """Return the clause with ``clause_id``; raise :class:`RegistryError` for an unknown one."""
        try:
            return self.clauses[clause_id]
        except KeyError:
            raise RegistryError(
                f"no clause is called {clause_id!r}", next_step=did_you_mean(clause_id, self.clauses)
            ) from None

    def profile(self, name: str) -> Profile:
        """Return the profile called ``name``; raise :class:`RegistryError` for an unknown one."""
        try:
            return self.profiles[name]
        except KeyError:
            raise RegistryError(
                f"no profile is called {name!r}", next_step=did_you_mean(name, self.profiles)
            ) from None

    def order(self) -> tuple[Clause, ...]:
        """Return all clauses, prerequisites before dependants, otherwise as the files have them."""
        return tuple(self.clauses.values())

    def prerequisites_of(self, clause_id: str) -> tuple[str, ...]:
        """Return the direct and indirect prerequisites of a clause, in the registry's order."""
        found: set[str] = set()
        pending = list(self.clause(clause_id).prerequisites)
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending.extend(self.clause(name).prerequisites)
        return tuple(name for name in self.clauses if name in found)


@functools.cache
def load_registry() -> Registry:
    """Return the shipped registry, read once per process."""
    return read_registry(_FOLDER)


def read_registry(folder: Path) -> Registry:
    """Read ``profiles.toml`` and every area file of ``folder``.

    Raises :class:`RegistryError` naming file and key for a malformed file, a duplicate ID, an unknown
    profile or prerequisite, a cycle, or a profile without clauses.
    """
    profiles_path = folder / _PROFILES_FILE
    declared = read_model(profiles_path, _ProfilesFile, error=RegistryError, what="the profiles file").profile
    clauses: dict[str, Clause] = {}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.toml")):
        if path.name == _PROFILES_FILE:
            continue
        for entry in read_model(path, _AreaFile, error=RegistryError, what="the clause file").clause:
            if entry.id in clauses:
                raise RegistryError(f"{path}: clause {entry.id} is already declared in {files[entry.id]}")
            clauses[entry.id] = Clause(area=path.stem, **entry.model_dump())
            files[entry.id] = path
    names = [entry.name for entry in declared]
    _check_references(clauses, files, names)
    ordered = _topological(clauses, folder)
    profiles = {entry.name: _profile(entry, ordered, profiles_path) for entry in declared}
    return Registry(ordered, profiles)


def _profile(entry: _ProfileEntry, clauses: Mapping[str, Clause], path: Path) -> Profile:
    members = tuple(c.id for c in clauses.values() if entry.name in c.profiles)
    if not members:
        raise RegistryError(
            f"{path}: profile {entry.name!r} has no clause", next_step="remove it, or fill it"
        )
    must_run = frozenset(name for name in members if clauses[name].must_run_in(entry.name))
    return Profile(entry.name, entry.summary, members, must_run)


def _check_references(clauses: Mapping[str, Clause], files: Mapping[str, Path], profiles: list[str]) -> None:
    for clause in clauses.values():
        place = f"{files[clause.id]}: {clause.id}"
        for name in clause.profiles:
            if name not in profiles:
                raise RegistryError(
                    f"{place}: key 'profiles' names the unknown profile {name!r}",
                    next_step=did_you_mean(name, profiles),
                )
        for name in clause.prerequisites:
            if name not in clauses:
                raise RegistryError(
                    f"{place}: key 'prerequisites' names the unknown clause {name!r}",
                    next_step=did_you_mean(name, clauses),
                )


def _topological(clauses: Mapping[str, Clause], folder: Path) -> dict[str, Clause]:
    """Return ``clauses`` in the files' order, but each after its prerequisites."""
    try:
        TopologicalSorter({clause.id: clause.prerequisites for clause in clauses.values()}).prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise RegistryError(f"{folder}: key 'prerequisites': the clauses form a cycle: {cycle}") from None
    ordered: dict[str, Clause] = {}

    def place(name: str) -> None:
        if name not in ordered:
            for prerequisite in clauses[name].prerequisites:
                place(prerequisite)
            ordered[name] = clauses[name]

    for name in clauses:
        place(name)
    return ordered
