"""From samples to one view per rank, classes of ranks at the same place, and the space-time prefix tree.

A rank's class is a function of its own samples alone: adding a rank never changes another's class, and
neither the order of ranks nor that of rounds matters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from nvsnap_conformance.hang.collectives import GATHERING, Kind
from nvsnap_conformance.hang.model import Bundle, Frame, Member, Reading, Rung, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nvsnap_conformance.hang.position import Analyser, Key, Position


class Condition(StrEnum):
    """What a rank does over all rounds."""

    GONE = "gone"
    STOPPED = "stopped"
    UNREADABLE = "unreadable"
    MOVING = "moving"
    GATHERED = "waits for other ranks"
    WAITING = "waits"
    DEVICE = "waits for its device"
    IDLE = "idle"
    CONTROL = "waits for the ranks"
    PHASE = "in a long phase"
    ELSEWHERE = "stays elsewhere"


_OF_KIND = {
    Kind.HANDSHAKE: Condition.WAITING,
    Kind.WAIT: Condition.WAITING,
    Kind.DEVICE: Condition.DEVICE,
    Kind.IDLE: Condition.IDLE,
    Kind.CONTROL: Condition.CONTROL,
    Kind.PHASE: Condition.PHASE,
    **dict.fromkeys(GATHERING, Condition.GATHERED),
}


@dataclass(frozen=True, slots=True)
class Activity:
    """Rates between the first and the last reading, per second.

    ``queued`` is the seconds per second that its threads wait for a core (-1: not readable), ``states`` the
    main thread's state letter in every reading, ``runnable`` in which share of them a thread could run,
    ``tree_runnable`` in which share a descendant could.
    """

    cpu: float = 0.0
    tree_cpu: float = 0.0
    switches: float = 0.0
    faults: float = 0.0
    read_bytes: float = 0.0
    queued: float = -1.0
    states: str = ""
    runnable: float = 0.0
    tree_runnable: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """One process over all rounds.

    ``position`` is where it settled (the place of most rounds), ``rounds`` in how many of the
    ``readable`` rounds it was there, ``torn`` whether only unstopped reads say so, ``native`` whether its
    C and C++ frames were read there.
    """

    member: Member
    condition: Condition
    position: Position | None
    rounds: int
    readable: int
    torn: bool
    activity: Activity
    state: str
    kernel: str = ""
    problems: tuple[str, ...] = ()
    native: bool = False
    positions: tuple[Position, ...] = field(default=(), compare=False)
    threads: tuple[Position, ...] = field(default=(), compare=False)

    @property
    def label(self) -> str:
        """How the process is called in text."""
        return f"rank {self.member.rank}" if self.member.rank is not None else f"pid {self.member.pid}"

    @property
    def settled(self) -> bool:
        """Whether it stayed at one place in all readable rounds, of which there are at least two."""
        return self.condition not in {Condition.MOVING, Condition.UNREADABLE, Condition.GONE}

    def summary(self) -> str:
        """Return condition and place in one line."""
        where = self.describe()
        return where if where.startswith(self.condition.value) else f"{self.condition.value}: {where}"

    def describe(self) -> str:
        """Say in words where it is and in what state."""
        where = self.position.describe() if self.position else ""
        if self.condition is Condition.GONE:
            return "gone" + (f", last seen at {where}" if where else "")
        if self.condition is Condition.STOPPED:
            return f"{self.state}" + (f" at {where}" if where else "")
        if self.condition is Condition.UNREADABLE:
            if self.position is not None:
                return f"unreadable: seen once only, at {where}"
            reason = self.problems[-1] if self.problems else "no stack"
            return f"unreadable: {reason}"
        if self.condition is Condition.MOVING:
            return _on_the_move(self.positions)
        if not where:
            return f"in the kernel: {self.kernel}" if self.kernel else self.condition.value
        return where


def view(member: Member, samples: Sequence[Sample], analyser: Analyser) -> View:
    """Return the view of one process from its samples, one per round, in any order."""
    samples = sorted(samples, key=lambda s: s.at)
    readings = [(s.at, s.reading) for s in samples if s.reading is not None and s.rung is not Rung.GONE]
    activity = _activity(readings)
    problems = tuple(dict.fromkeys(p for s in samples for p in s.problems))
    if not samples:
        # Nobody saw it die: that is what a sample on the rung GONE says.
        problems = ("no sample of it is there",)
    last = readings[-1][1] if readings else None
    gone = any(s.rung is Rung.GONE for s in samples)
    state = _state_words(last, gone=gone)
    kernel = _kernel(last)
    seen = [(position, s.torn) for s in samples if (position := analyser.sample(s)) is not None]
    position, rounds, torn = _settled([p for p, _ in seen], [t for _, t in seen])
    if gone or (last and last.state in "ZX"):
        condition = Condition.GONE
    elif readings and all(r.state in "Tt" or r.tracer for _, r in readings):
        condition = Condition.STOPPED
    elif position is not None:
        condition = _condition(position, rounds, seen)
    elif (
        len(readings) > 1
        and all(r.state == "D" for _, r in readings)
        and len({_kernel(r) for _, r in readings}) == 1
    ):
        condition, rounds = Condition.ELSEWHERE, len(readings)
    else:
        condition = Condition.UNREADABLE
    return View(
        member,
        condition,
        position,
        rounds,
        len(seen),
        torn,
        activity,
        state,
        kernel,
        problems,
        position is not None and _read_natively(samples, position, analyser),
        tuple(dict.fromkeys(p for p, _ in seen)),
        _other_threads(samples, analyser),
    )


def views(bundle: Bundle, analyser: Analyser) -> list[View]:
    """Return the views of all members of ``bundle``, ranks first."""
    samples: dict[int, list[Sample]] = defaultdict(list)
    for taken in bundle.rounds:
        for sample in taken.samples:
            samples[sample.pid].append(sample)
    return [view(member, samples[member.pid], analyser) for member in bundle.members]


def _settled(positions: list[Position], torn: list[bool]) -> tuple[Position | None, int, bool]:
    """Return the place of most samples (the best read of it), its count, and whether all were torn."""
    if not positions:
        return None, 0, False
    counts = Counter(p.key for p in positions)
    most = max(counts.values())
    # Equally often: the order of rounds must not decide.
    key = min((k for k, n in counts.items() if n == most), key=_sortable)
    best = min(
        (p for p in positions if p.key == key),
        key=lambda p: (p.kind is None, p.kind is Kind.WAIT, p.kind or "", p.operation, str(p.leaf)),
    )
    return best, most, all(t for p, t in zip(positions, torn, strict=True) if p.key == key)


def _read_natively(samples: Sequence[Sample], position: Position, analyser: Analyser) -> bool:
    return any(
        sample.rung is Rung.NATIVE
        and (seen := analyser.sample(sample)) is not None
        and seen.key == position.key
        for sample in samples
    )


def _sortable(key: Key) -> tuple[int, str, str]:
    return len(key[0]), key[1], " ".join(map(str, key[0]))


def _condition(position: Position, rounds: int, seen: list[tuple[Position, bool]]) -> Condition:
    # A torn read may show a place that never was: it cannot outvote two reads that agree.
    strays = [torn for p, torn in seen if p.key != position.key]
    if rounds < 2 and len(seen) < 2:
        return Condition.UNREADABLE
    if strays and (rounds < 2 or not all(strays)):
        if position.kind is Kind.PHASE and all(p.kind is Kind.PHASE for p, _ in seen):
            return Condition.PHASE
        if all(p.kind is Kind.IDLE for p, _ in seen):
            return Condition.IDLE
        return Condition.MOVING
    return _OF_KIND.get(position.kind, Condition.ELSEWHERE) if position.kind else Condition.ELSEWHERE


def _activity(readings: list[tuple[float, Reading]]) -> Activity:
    states = "".join(r.state for _, r in readings)
    if len(readings) < 2:
        return Activity(states=states)
    (began, first), (ended, last) = readings[0], readings[-1]
    span = ended - began
    if span <= 0:
        return Activity(states=states)

    def rate(name: str) -> float:
        return max(0.0, float(getattr(last, name) - getattr(first, name)) / span)

    return Activity(
        rate("cpu_seconds"),
        rate("tree_cpu_seconds"),
        rate("switches"),
        rate("faults"),
        rate("read_bytes"),
        -1.0 if min(first.queued_seconds, last.queued_seconds) < 0 else rate("queued_seconds"),
        states,
        sum(r.runnable for _, r in readings) / len(readings),
        sum(r.tree_runnable > 0 for _, r in readings) / len(readings),
    )


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a tracer",
    "Z": "a zombie",
    "X": "dead",
}


def _state_words(reading: Reading | None, *, gone: bool) -> str:
    if reading is None:
        return "gone" if gone else "not known"
    if reading.tracer:
        return f"{_STATES.get(reading.state, reading.state)}, traced by pid {reading.tracer}"
    return _STATES.get(reading.state, reading.state)


def _kernel(reading: Reading | None) -> str:
    if reading is None:
        return ""
    if reading.kernel_stack:
        return reading.kernel_stack[0].partition("+")[0]
    return reading.wchan


def _other_threads(samples: Sequence[Sample], analyser: Analyser) -> tuple[Position, ...]:
    """Return where the threads beside the main one are, if they stayed there in every readable round."""
    per_round = []
    for sample in samples:
        if sample.threads:
            found = {}
            for thread in sample.threads:
                position = None if thread.main else analyser.thread(thread)
                if position is not None:
                    found[(thread.tid, position.key)] = position
            per_round.append(found)
    if len(per_round) < 2:
        return ()
    steady = set(per_round[0]).intersection(*per_round[1:])
    return tuple(per_round[-1][key] for key in sorted(steady, key=lambda k: (k[0], _sortable(k[1]))))


@dataclass(frozen=True, slots=True)
class Group:
    """Processes at the same place in the same condition."""

    condition: Condition
    position: Position | None
    views: tuple[View, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in it, ascending."""
        return tuple(sorted(v.member.rank for v in self.views if v.member.rank is not None))

    def describe(self) -> str:
        """Say in words where these processes are."""
        if self.condition is Condition.MOVING:
            return _on_the_move([p for v in self.views for p in v.positions])
        return self.views[0].describe()

    def summary(self) -> str:
        """Return condition and place in one line."""
        where = self.describe()
        return where if where.startswith(self.condition.value) else f"{self.condition.value}: {where}"


def _on_the_move(positions: Iterable[Position]) -> str:
    places = {p.describe() for p in positions}
    over = f" over {len(places)} places" if len(places) > 1 else " at one place, again and again"
    return f"moving{over}, e.g. {min(places)}"


def classes(found: Iterable[View]) -> list[Group]:
    """Return the equivalence classes of ``found`` by condition and place, the largest first."""
    by_class: dict[tuple[Condition, object], list[View]] = defaultdict(list)
    for one in found:
        if one.condition is Condition.MOVING:
            key: object = None  # where a moving rank is does not make a class
        else:
            key = one.position.key if one.position else one.kernel
        by_class[one.condition, key].append(one)
    for members in by_class.values():
        members.sort(key=lambda v: (v.member.rank or 0, v.member.pid))
    groups = [
        Group(condition, members[0].position, tuple(members)) for (condition, _), members in by_class.items()
    ]
    return sorted(groups, key=lambda g: (-len(g.views), g.ranks, g.condition))


@dataclass(slots=True)
class Node:
    """A node of the space-time prefix tree: a call, and which (rank, round) pairs went through it."""

    frame: Frame | None
    children: dict[Frame | str, Node] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    """Rank -> bit mask of the rounds in which it was here."""
    operation: str = ""


def prefix_tree(found: Iterable[tuple[int, int, Position]]) -> Node:
    """Merge ``(rank, round, position)`` triples into one tree.

    Alike positions are walked once, so the cost grows with distinct places and with ranks, not with
    their product.
    """
    alike: dict[Key, tuple[Position, dict[int, int]]] = {}
    for rank, index, position in found:
        _, seen = alike.setdefault(position.key, (position, {}))
        seen[rank] = seen.get(rank, 0) | (1 << index)
    root = Node(None)
    for position, seen in alike.values():
        node = root
        _add(node, seen)
        for frame in position.path:
            node = node.children.setdefault(frame, Node(frame))
            _add(node, seen)
        if position.operation:
            node = node.children.setdefault(position.operation, Node(None, operation=position.operation))
            _add(node, seen)
    return root


def _add(node: Node, seen: dict[int, int]) -> None:
    for rank, mask in seen.items():
        node.seen[rank] = node.seen.get(rank, 0) | mask


def split(one: Position, other: Position) -> tuple[Frame, Frame] | None:
    """Return where two paths part: the last call that both made, once per path (the lines may differ).

    ``None`` where they share nothing.
    """
    last: tuple[Frame, Frame] | None = None
    for left, right in zip(one.path, other.path, strict=False):
        if (left.name, left.file) != (right.name, right.file):
            break
        last = (left, right)
        if left.line != right.line:
            break
    return last


def span(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: ``0-5, 7``."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(set(numbers)), None]:
        if previous is not None and number != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = None
        if start is None:
            start = number
        previous = number
    return ", ".join(parts)
