"""The registry of frames that say what a process waits for: ``collectives.toml``, read once."""

from __future__ import annotations

import fnmatch
import functools
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.tomlfile import read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvsnap_conformance.hang.model import Frame

_SHIPPED = Path(__file__).with_name("collectives.toml")
_GLOB = re.compile(r"[*?\[]")


class Kind(StrEnum):
    """What a frame of an entry is; see the head of ``collectives.toml``."""

    COLLECTIVE = "collective"
    P2P = "p2p"
    RENDEZVOUS = "rendezvous"
    HANDSHAKE = "handshake"
    DEVICE = "device"
    ARM = "arm"
    PHASE = "phase"
    COMPUTE = "compute"
    IDLE = "idle"
    CONTROL = "control"
    WORK = "work"
    WAIT = "wait"


GATHERING = frozenset({Kind.COLLECTIVE, Kind.RENDEZVOUS, Kind.P2P})
"""Kinds of waits that end when other ranks arrive."""

CONTEXTS = frozenset({Kind.IDLE, Kind.CONTROL, Kind.WORK})
"""Kinds that say in whose name a plain wait below them waits."""


class Entry(BaseModel):
    """One entry of the registry."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9_]+(\.[a-z0-9_]+)+$")
    family: str
    kind: Kind
    functions: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    operation: str = ""
    group: str = ""
    covers: bool = False
    branches: str = ""

    @model_validator(mode="after")
    def _matches_something(self) -> Entry:
        if not self.functions and not self.native:
            raise ValueError(f"entry {self.id} matches no frame: give functions or native")
        if "*" in self.functions and not self.files:
            raise ValueError(f"entry {self.id} matches every frame: give files")
        return self


class FrameRegistry:
    """Entries, indexed so that a frame costs one lookup, and remembered per distinct frame."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self._exact: dict[str, list[Entry]] = {}
        self._globs: list[tuple[re.Pattern[str], Entry]] = []
        self._native: list[tuple[re.Pattern[str], Entry]] = []
        for entry in self.entries:
            for name in entry.functions:
                if _GLOB.search(name):
                    self._globs.append((re.compile(fnmatch.translate(name)), entry))
                else:
                    self._exact.setdefault(name, []).append(entry)
            for name in entry.native:
                self._native.append((re.compile(fnmatch.translate(name)), entry))
        self._known: dict[tuple[str, str, bool], Entry | None] = {}

    def match(self, frame: Frame) -> Entry | None:
        """Return the entry of ``frame``, the first in the file's order, ``None`` where there is none."""
        key = (frame.name, frame.file, frame.native)
        try:
            return self._known[key]
        except KeyError:
            found = self._known[key] = self._find(frame)
            return found

    def _find(self, frame: Frame) -> Entry | None:
        if frame.native:
            # Native names come with a parameter list, or with a symbol version.
            name = frame.name.partition("(")[0].partition("@")[0]
            return next((entry for pattern, entry in self._native if pattern.match(name)), None)
        name = bare_name(frame.name)
        candidates = [e for e in self._exact.get(name, ()) if _file_matches(e, frame.file)]
        candidates += [
            e for pattern, e in self._globs if pattern.match(name) and _file_matches(e, frame.file)
        ]
        return min(candidates, key=self.entries.index, default=None)


def bare_name(name: str) -> str:
    """Return the last component of a qualified name: ``A.f.<locals>.g`` gives ``g``."""
    return name.rpartition(".")[2]


def _file_matches(entry: Entry, file: str) -> bool:
    if not entry.files:
        return True
    for end in entry.files:
        if _GLOB.search(end):
            if fnmatch.fnmatchcase("/" + file, "*/" + end):
                return True
        elif file == end or file.endswith("/" + end):
            return True
    return False


def load(*paths: Path) -> FrameRegistry:
    """Return the shipped registry, with the entries of ``paths`` in front of it.

    Raises :class:`UsageError` naming file and entry for a file that is malformed.
    """
    return _load(paths)


@functools.cache
def _load(paths: tuple[Path, ...]) -> FrameRegistry:
    entries: dict[str, Entry] = {}
    for path in (*paths, _SHIPPED):
        for entry in _read(path):
            if entry.id in entries:
                if path is _SHIPPED:
                    continue  # a user's entry replaces the shipped one
                raise UsageError(f"{path}: entry {entry.id} is there twice")
            entries[entry.id] = entry
    return FrameRegistry(entries.values())


def _read(path: Path) -> list[Entry]:
    data = read_toml(path, error=UsageError, what="frame registry")
    unknown = set(data) - {"version", "frame"}
    version, tables = data.get("version"), data.get("frame", [])
    if unknown or type(version) is not int or version != 1 or not isinstance(tables, list):
        if unknown:
            why = f"unknown key {', '.join(sorted(unknown))}"
        elif isinstance(tables, list):
            why = "version is missing" if version is None else f"version is {version!r}"
        else:
            why = "frame is no list of tables"
        raise UsageError(
            f"{path} is no frame registry of version 1: {why}",
            next_step="it has `version = 1` and [[frame]] tables",
        )
    entries, seen = [], set()
    for position, table in enumerate(tables):
        try:
            entry = Entry.model_validate(table)
        except ValidationError as error:
            name = table.get("id", f"number {position + 1}") if isinstance(table, dict) else position + 1
            detail = error.errors()[0]
            where = ".".join(map(str, detail["loc"])) or "entry"
            raise UsageError(f"{path}: frame {name}: {where}: {detail['msg']}") from error
        if entry.id in seen:
            raise UsageError(f"{path}: entry {entry.id} is there twice")
        seen.add(entry.id)
        entries.append(entry)
    return entries
