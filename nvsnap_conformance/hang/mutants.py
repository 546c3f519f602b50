"""Known-bad samplers and judges."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.engines.protocol import Rank
from nvsnap_conformance.hang.bundle import collect_bundle
from nvsnap_conformance.hang.model import Rung
from nvsnap_conformance.hang.verdict import Confidence, Verdict, VerdictKind, judge

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.hang.model import Bundle, Reading, Round
    from nvsnap_conformance.processes import ProcessId


def collect_parent_only(
    root: ProcessId, *, ranks: list[Rank], folder: Path, deadline: Deadline, **options: Any
) -> Bundle:
    """Sample the front only, as ``py-spy dump --json --subprocesses`` (0.4.3) does: it prints the parent.

    SGLang's watchdog has the same fault by design: it dumps its own process, never the idle culprit.
    """
    front = Rank(rank=0, process=root, gpu=None, source="assumed")
    return collect_bundle(None, ranks=[front][: len(ranks)], folder=folder, deadline=deadline, **options)


def judge_by_minority(bundle: Bundle) -> Verdict:
    """Call the smallest class of ranks missing, whatever it does; a class of all is a class too."""
    verdict = judge(bundle)
    smallest = min(verdict.groups, key=lambda group: len(group.views))
    return replace(
        verdict, kind=VerdictKind.MISSING_ARRIVAL, missing=smallest.ranks, confidence=Confidence.HIGH
    )


def judge_by_cpu_time(bundle: Bundle) -> Verdict:
    """Call an engine with a rank that burns CPU progressing, as a watchdog over process CPU does."""
    verdict = judge(bundle)
    if any(view.activity.cpu > 0.1 for group in verdict.groups for view in group.views):
        return replace(verdict, kind=VerdictKind.PROGRESSING, missing=())
    return verdict


def judge_by_one_sample(bundle: Bundle) -> Verdict:
    """Judge by the last round as if it had been seen in every one: where nothing moves, all is stuck."""
    return judge(replace(bundle, rounds=tuple(_seen_again(bundle.rounds[-1], n) for n in range(5))))


def _seen_again(taken: Round, number: int) -> Round:
    """Return ``taken`` as if it had been seen again ``number`` seconds later, and nothing ran meanwhile."""
    samples = tuple(
        replace(sample, at=sample.at + number, reading=_standing(sample.reading)) for sample in taken.samples
    )
    return replace(taken, index=number, samples=samples)


def _standing(reading: Reading | None) -> Reading | None:
    """Return ``reading`` without what shows, in one look already, that a thread runs."""
    if reading is None:
        return None
    state = "S" if reading.state == "R" else reading.state
    return replace(reading, state=state, thread_states="", queued_seconds=-1.0, tree_runnable=0)


def judge_without_the_dead(bundle: Bundle) -> Verdict:
    """Judge the living ranks only, as one does who takes the list of processes at the time of the hang."""
    gone = {sample.pid for taken in bundle.rounds for sample in taken.samples if sample.rung is Rung.GONE}
    members = tuple(member for member in bundle.members if member.pid not in gone)
    return judge(replace(bundle, members=members, world_size=None))


def judge_without_the_stopped(bundle: Bundle) -> Verdict:
    """Judge the ranks that py-spy can attach to: a blocking dump of a stopped process fails (0.4.3)."""
    stopped = {
        sample.pid
        for taken in bundle.rounds
        for sample in taken.samples
        if sample.reading is not None and sample.reading.state == "T"
    }
    members = tuple(member for member in bundle.members if member.pid not in stopped)
    return judge(replace(bundle, members=members, world_size=None))
