"""Where a thread is: its stack, normalised and read through the registry of frames.

Two ranks are at the same place when the same calls, line by line, led them to the same operation. What an
operation does inside of its own library does not count: there a root and a leaf legitimately differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nvsnap_conformance.hang.collectives import CONTEXTS, GATHERING, Entry, FrameRegistry, Kind, bare_name
from nvsnap_conformance.hang.model import Frame, Sample, Thread

if TYPE_CHECKING:
    from collections.abc import Sequence

Key = tuple[tuple[Frame, ...], str]

STRONG = GATHERING | {Kind.HANDSHAKE}
"""Waits that weigh more than a phase around them."""


@dataclass(frozen=True, slots=True)
class Position:
    """One thread's place.

    ``key`` is what makes two positions the same place: the Python frames down to the call of the
    operation, and its name. Native frames are no part of it, since they are read in one round only; they
    may tell ``kind`` and ``entry``. ``kind`` is ``None`` for code that the registry does not know; ``work``
    is the innermost entry that says what is being worked on.
    """

    key: Key
    leaf: Frame
    kind: Kind | None = None
    entry: Entry | None = None
    operation: str = ""
    arms: tuple[Entry, ...] = ()
    group: str = ""
    thread: str = ""
    work: Entry | None = None

    @property
    def path(self) -> tuple[Frame, ...]:
        """The Python frames down to the call of the operation, outermost first."""
        return self.key[0]

    @property
    def wait(self) -> tuple[str, str, tuple[str, ...]]:
        """What is waited for, wherever it was called: family, operation, and the branches taken."""
        family = self.entry.family if self.entry else ""
        return family, self.operation, tuple(arm.id for arm in self.arms if arm.branches)

    @property
    def branches(self) -> dict[str, Entry]:
        """The exclusive branches that this place lies in: name of the choice -> the arm taken."""
        return {arm.branches: arm for arm in self.arms if arm.branches}

    @property
    def caller(self) -> Frame:
        """The frame that called the operation: what a reader wants to see."""
        return self.path[-1] if self.path else self.leaf

    def describe(self) -> str:
        """Say in words what is done here and where."""
        names = [arm.operation for arm in self.arms if arm.operation]
        if not self.entry:
            what = f"{bare_name(self.leaf.name)}()"
        elif self.operation == self.entry.family:
            what = self.operation
        else:
            what = f"{self.operation} ({self.entry.family})"
        # Outermost first, each once: "mnnvl workspace > handle exchange > all_gather_object".
        chain = " > ".join([*dict.fromkeys(names), what])
        return f"{chain} at {self.caller.file}:{self.caller.line}"


class Analyser:
    """Reads stacks through one registry and remembers what it has read: alike ranks cost one reading."""

    def __init__(self, registry: FrameRegistry) -> None:
        self._registry = registry
        self._known: dict[tuple[Frame, ...], Position | None] = {}

    def sample(self, sample: Sample) -> Position | None:
        """Return the position of the thread that matters in ``sample``, ``None`` where there is no stack.

        That is the main thread, unless it only waits while another one is in a collective or waits for
        the device on its behalf.
        """
        found = [(t, p) for t in sample.threads if (p := self.thread(t)) is not None]
        if not found:
            return None
        main = next((p for t, p in found if t.main), None)
        if main is None:
            main = next((p for t, p in found if t.name == "MainThread"), None)
        if main is None:
            main = max((p for _, p in found), key=lambda p: len(p.path))
        if main.kind in (Kind.WAIT, Kind.IDLE):
            for kinds in (GATHERING, frozenset({Kind.HANDSHAKE, Kind.DEVICE})):
                others = [p for t, p in found if not t.main and p.kind in kinds]
                if others:
                    return min(others, key=lambda p: (p.thread, str(p.leaf)))
        return main

    def thread(self, thread: Thread) -> Position | None:
        """Return the position of one thread, ``None`` for one without Python frames."""
        try:
            position = self._known[thread.frames]
        except KeyError:
            position = self._known[thread.frames] = self._read(thread.frames)
        if position is None or thread.main:
            return position
        return replace(position, thread=thread.name)

    def _read(self, stack: Sequence[Frame]) -> Position | None:
        python = [frame for frame in stack if not frame.native]
        if not python:
            return None
        entries = [self._registry.match(frame) for frame in python]
        search = _Search(entries)
        entry, kind = search.settle(search.chosen)
        start, operation = len(python), ""
        if entry is not None:
            operation = entry.operation or bare_name(python[search.index].name)
            if kind in (Kind.IDLE, Kind.CONTROL):
                # How the loop waits (yielding first, then polling) is its own business.
                start = search.index + 1
            elif kind not in (Kind.PHASE, Kind.COMPUTE):
                start, operation = _operation(python, entries, search.index, entry)
        key = (tuple(python[:start]), operation)
        if search.chosen is None:
            native = self._native(stack)
            # A plain wait in native code says no more than one in Python does.
            if native is not None and not (native.kind is Kind.WAIT and entry is not None):
                found, kind = search.settle(native)
                if found is not entry and found is not None:
                    entry, operation = found, found.operation
        return Position(key, python[-1], kind, entry, operation, search.arms, search.group, work=search.work)

    def _native(self, stack: Sequence[Frame]) -> Entry | None:
        """Return what the C and C++ frames below the last Python frame say, innermost first.

        A plain wait only if no frame says more: every wait ends in one.
        """
        plain = None
        for frame in reversed(stack):
            if not frame.native:
                break
            entry = self._registry.match(frame)
            if entry is not None and entry.kind is not Kind.WAIT:
                return entry
            plain = plain or entry
        return plain


class _Search:
    """From the innermost frame outwards: which entry says what is waited for."""

    def __init__(self, entries: Sequence[Entry | None]) -> None:
        self.chosen: Entry | None = None
        self.plain: Entry | None = None
        self.phase: Entry | None = None
        self.work: Entry | None = None
        self.index = len(entries) - 1
        self.group = ""
        arms: list[Entry] = []
        closed = False
        cover: tuple[int, Entry] | None = None
        for index in range(len(entries) - 1, -1, -1):
            entry = entries[index]
            if entry is None:
                continue
            if entry.group and not self.group:
                self.group = entry.group
            if entry.kind is Kind.WORK:
                self.work = self.work or entry
                closed = True
            elif entry.kind is Kind.ARM:
                arms.append(entry)
            elif entry.kind is Kind.PHASE:
                self.phase = self.phase or entry
            elif entry.covers:
                cover = (index, entry)
            elif self.chosen is not None or closed:
                continue
            elif entry.kind is Kind.WAIT:
                if self.plain is None:
                    self.plain, self.index = entry, index
            elif entry.kind in CONTEXTS:
                # A context qualifies a plain wait below it, or its own frame when that is the innermost.
                if self.plain is not None or index == len(entries) - 1:
                    self.chosen, self.index = entry, index
            else:
                self.chosen, self.index = entry, index
        self.arms = tuple(dict.fromkeys(reversed(arms)))
        if cover:
            self.index, self.chosen = cover

    def settle(self, chosen: Entry | None) -> tuple[Entry | None, Kind | None]:
        """Return the entry that counts and its kind: a phase outweighs all but waits for other ranks."""
        entry = chosen or self.plain
        if self.phase is not None and (entry is None or entry.kind not in STRONG):
            return self.phase, Kind.PHASE
        return entry, entry.kind if entry else None


def _operation(
    python: Sequence[Frame], entries: Sequence[Entry | None], index: int, entry: Entry
) -> tuple[int, str]:
    """Return where the operation's library begins in the stack, and the name of what was called in it."""
    # Only an entry that names files belongs to a library; another one's neighbours are its callers.
    folder = python[index].file.rpartition("/")[0] if entry.files else ""
    start = called = index
    while start > 0:
        known = entries[start - 1]
        alike = known is not None and known.family == entry.family and known.kind == entry.kind
        if not alike and (
            known is not None or python[start - 1].file.rpartition("/")[0] != folder or not folder
        ):
            break
        start -= 1
        if alike:
            called = start
    return start, entry.operation or bare_name(python[called].name)
