"""Signs of work and of standing still, beyond where a stack is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.hang.collectives import Kind
from nvsnap_conformance.hang.merge import Condition

if TYPE_CHECKING:
    from nvsnap_conformance.hang.merge import View

WAKING = 0.02
"""CPU seconds per second below which a thread does nothing: what a wait with a poll in it may take, and far
less than what a working rank gets on a crowded machine."""

LEAST_SECONDS = 0.5
"""Seconds between the first and the last look below which standing still says nothing: a step of an engine on
a crowded machine stands at one line for as long."""

LIVELY_SWITCHES = 20.0
"""Voluntary context switches per second of a main thread above which, if it takes CPU too, it goes from one
collective to the next. Measured at eight ranks on two crowded cores: 60 and more in a loop of collectives,
4 in a stuck one (the looks themselves). A poll every millisecond has 1000 and takes next to no CPU."""

SURE_ROUNDS = 6
"""Rounds at one place after which a rank that burns CPU there is taken to be stuck."""


def lively(view: View) -> bool:
    """Whether a rank in a collective or before its device is woken and works, again and again."""
    waits = view.condition in (Condition.GATHERED, Condition.DEVICE)
    return waits and view.activity.switches > LIVELY_SWITCHES and view.activity.cpu > WAKING


def starved(view: View) -> bool:
    """Whether a rank would run and gets no core: it waits on a run queue, and most looks find it there.

    A rank that sleeps and is woken now and then waits for a core as well on a crowded machine, but the
    looks find it asleep. Where the kernel does not tell the wait, only the state in every look counts.
    """
    activity = view.activity
    if activity.queued < 0:
        return activity.runnable == 1
    return activity.queued > WAKING and activity.runnable > 0.5


def busy(view: View) -> bool:
    """Whether a rank burns CPU, or would if it got a core, at a place that is no known wait."""
    return view.condition is Condition.ELSEWHERE and (view.activity.cpu > WAKING or starved(view))


def doubtful(view: View) -> bool:
    """Whether a rank that stays at one place may be at work there all the same.

    Work in one line of code looks like an endless loop: native frames and more rounds tell them apart. A
    long phase may wait for a disk, a download or another rank's lock without a sign of work.
    """
    if view.condition is Condition.PHASE:
        return True
    if busy(view) and view.activity.cpu <= WAKING:
        return True  # it got no core, so that it stayed at its place tells nothing, however often
    return busy(view) and not (view.native and view.rounds >= SURE_ROUNDS)


def comes(view: View) -> bool:
    """Whether a rank that others wait for is still on its way."""
    if view.condition is Condition.MOVING:
        return True
    if view.condition is Condition.PHASE:
        return works(view) or view.activity.tree_cpu > WAKING or len(view.positions) > 1
    if view.condition is Condition.ELSEWHERE:
        computes = view.position is not None and view.position.kind is Kind.COMPUTE
        return (computes and busy(view)) or works(view)
    # Whoever waits for children that work is at work.
    return view.condition is Condition.WAITING and children_work(view)


def works(view: View) -> bool:
    """Whether counters that no waiting moves show work: memory touched, bytes read, children that run."""
    activity = view.activity
    return activity.faults > 200 or activity.read_bytes > 1 << 20 or children_work(view)


def children_work(view: View) -> bool:
    """Whether a rank's descendants work: they burn CPU, or most looks find one that would with a core."""
    activity = view.activity
    return activity.tree_cpu - activity.cpu > WAKING or activity.tree_runnable > 0.5
