"""The recorded order of a lifecycle, and the state machine that it must obey.

A trace is a list of events, one for each rank (or the front, rank ``None``) and verb, with the begin and
the end on the host's monotonic clock (``CLOCK_MONOTONIC``, seconds; the same in every pid namespace of a
host). The rules are those that the field converged on: all ranks are prepared before any is dumped, all
are restored before the front serves (vLLM PR 58183, ai-dynamo/snapshot's workload contract).
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from nvsnap_conformance.outcomes import Finding, finding


class Verb(StrEnum):
    """The verbs of a lifecycle, in the order in which a full one runs them."""

    QUIESCE = "quiesce"
    SLEEP = "sleep"
    PREPARE = "prepare"
    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    DUMP = "dump"
    LOAD = "load"
    RESTORE = "restore"
    UNLOCK = "unlock"
    REBUILD = "rebuild"
    WAKE = "wake"
    RESUME = "resume"


ORDER: tuple[Verb, ...] = tuple(Verb)

PER_RANK: frozenset[Verb] = frozenset(
    {Verb.PREPARE, Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK, Verb.REBUILD}
)
"""Verbs that every rank performs; the others are the front's or the host's, once for all ranks."""

PAIRS: tuple[tuple[Verb, Verb], ...] = (
    (Verb.QUIESCE, Verb.RESUME),
    (Verb.SLEEP, Verb.WAKE),
    (Verb.PREPARE, Verb.REBUILD),
    (Verb.LOCK, Verb.UNLOCK),
    (Verb.CHECKPOINT, Verb.RESTORE),
    (Verb.DUMP, Verb.LOAD),
)


@dataclass(frozen=True)
class Event:
    """One verb of one rank (``None``: the front or the host), with its span in monotonic seconds."""

    verb: Verb
    rank: int | None
    began: float
    ended: float
    ok: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the event as JSON values."""
        return {**asdict(self), "verb": self.verb.value}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Event:
        """Read what :meth:`as_json` wrote; raise ``KeyError`` or ``ValueError`` for anything else."""
        return cls(Verb(raw["verb"]), raw["rank"], float(raw["began"]), float(raw["ended"]), bool(raw["ok"]))


def wanted(*, host: bool, device: bool, sleeps: bool) -> frozenset[Verb]:
    """Return the verbs of a full lifecycle over these layers, with an engine that sleeps or does not."""
    absent = set()
    if not host:
        absent |= {Verb.DUMP, Verb.LOAD}
    if not device:
        absent |= {Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK}
    if not sleeps:
        absent |= {Verb.SLEEP, Verb.WAKE}
    return frozenset(Verb) - absent


def check_order(events: list[Event], *, ranks: int, required: frozenset[Verb] = frozenset()) -> list[Finding]:
    """Check a recorded trace against the state machine; ``required`` are the verbs that it was to have.

    Findings: ``ORDER:INCOMPLETE`` (a verb that was to be there is not, a rank lacks one that another has, or
    one lacks its counterpart),
    ``ORDER:OVERTAKEN`` (a verb began on some rank before an earlier verb had ended on all),
    ``ORDER:REPEATED`` (a verb twice on one rank in one cycle), ``ORDER:FAILED`` (a verb ended in failure),
    ``ORDER:EMPTY``.
    """
    if not events:
        return [finding("the lifecycle left no trace: nothing was driven", "ORDER:EMPTY")]
    found: list[Finding] = []
    by_verb: dict[Verb, list[Event]] = {}
    for event in events:
        by_verb.setdefault(event.verb, []).append(event)
    for verb, own in by_verb.items():
        found += _check_verb(verb, own, ranks)
    found += [
        finding(f"{verb} was to be part of this lifecycle, and is not", "ORDER:INCOMPLETE", verb=verb.value)
        for verb in ORDER
        if verb in required and verb not in by_verb
    ]
    for opening, closing in PAIRS:
        if closing in required and opening in required:
            continue
        if opening in by_verb and closing not in by_verb:
            found.append(
                finding(f"{opening} was never followed by {closing}", "ORDER:INCOMPLETE", verb=closing.value)
            )
        if closing in by_verb and opening not in by_verb:
            found.append(
                finding(f"{closing} without {opening} before it", "ORDER:INCOMPLETE", verb=opening.value)
            )
    present = [verb for verb in ORDER if verb in by_verb]
    for earlier, later in itertools.pairwise(present):
        last_end = max(by_verb[earlier], key=lambda event: event.ended)
        first_begin = min(by_verb[later], key=lambda event: event.began)
        if first_begin.began < last_end.ended:
            seconds = last_end.ended - first_begin.began
            found.append(
                finding(
                    f"{later} began on {_who(first_begin)} {seconds:.6f} s before {earlier} had ended "
                    f"on {_who(last_end)}",
                    "ORDER:OVERTAKEN",
                    earlier=earlier.value,
                    later=later.value,
                )
            )
    return found


def _check_verb(verb: Verb, events: list[Event], ranks: int) -> list[Finding]:
    found = [
        finding(f"{verb} failed on {_who(event)}", "ORDER:FAILED", verb=verb.value, rank=event.rank)
        for event in events
        if not event.ok
    ]
    seen = [event.rank for event in events]
    expected: list[int | None] = list(range(ranks)) if verb in PER_RANK else [None]
    missing = [rank for rank in expected if rank not in seen]
    if missing:
        found.append(
            finding(
                f"{verb} is recorded for ranks {sorted(r for r in seen if r is not None)}, not for {missing}",
                "ORDER:INCOMPLETE",
                verb=verb.value,
                missing=missing,
            )
        )
    repeated = sorted({str(rank) for rank in seen if seen.count(rank) > 1})
    if repeated:
        found.append(finding(f"{verb} ran more than once on ranks {', '.join(repeated)}", "ORDER:REPEATED"))
    return found


def _who(event: Event) -> str:
    return "the front" if event.rank is None else f"rank {event.rank}"
