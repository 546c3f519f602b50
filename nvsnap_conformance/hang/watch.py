"""Watching an engine: cheap polls while it goes on, stacks only when progress stops.

A stall triggers, stacks decide: a long step, a compilation or an idle engine is looked at and left alone,
each time for twice as long.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.hang.follow import follow
from nvsnap_conformance.hang.model import Bundle, Member, Role
from nvsnap_conformance.hang.progress import KernelCounters, Poll, Progress
from nvsnap_conformance.hang.sample import promptly
from nvsnap_conformance.hang.verdict import Verdict, VerdictKind
from nvsnap_conformance.outcomes import Outcome
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nvsnap_conformance.hang.collectives import FrameRegistry

LONGEST_STALL = 60.0
"""The longest pause between two looks at an engine that stands still without being stuck, in seconds."""

ENDING = 1.0
"""Seconds within which the ranks of an engine that ends go one after the other."""

LEAVING = 10.0
"""Seconds that an engine's root may outlive its last rank at the end; one that stays longer is half dead."""

ALLOWANCE = 10.0
"""Seconds that a look which has begun may take beyond the caller's time."""

_LOOK = 30.0
"""Seconds that a look may take where the caller's time does not end sooner."""

_KEPT_POLLS = 5


@dataclass(frozen=True)
class Stopped:
    """Why a watch ended: with a verdict that is a hang or a death, or because the engine or time ended.

    Where time ended while it could not be told whether something is stuck, ``told`` is false, and
    ``verdict`` that of the last look, if there was one.
    """

    reason: str
    verdict: Verdict | None = None
    bundle: Bundle | None = None
    folder: Path | None = None
    told: bool = True


class Watch:
    """Watches the ranks among ``members`` until something is stuck, they end, or the time is over.

    ``metrics`` is asked first; while it does not answer (an engine that starts), the kernel's counters
    are. ``stall`` is how long progress must stand still before stacks are read, ``poll`` the pause
    between two polls, both in seconds. ``refresh`` is asked anew who the ranks are before a look: an
    engine that starts names them late. With ``root`` the engine has ended only when that process has.
    ``evidence`` is asked before a look for what lies beside the stacks.
    """

    def __init__(
        self,
        members: Sequence[Member],
        folder: Path,
        *,
        metrics: Progress | None = None,
        stall: float = 1.5,
        poll: float = 0.5,
        registry: FrameRegistry | None = None,
        refresh: Callable[[], Sequence[Member]] | None = None,
        root: ProcessId | None = None,
        evidence: Callable[[], Mapping[str, Any]] = dict,
        with_locals: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._members = list(members)
        self._folder = folder
        self._metrics = metrics
        self._kernel = KernelCounters(members)
        self._stall = stall
        self._poll = poll
        self._registry = registry
        self._refresh = refresh
        self._root = root
        self._evidence = evidence
        self._with_locals = with_locals
        self._say = say
        self._polls: list[Poll] = []
        self._source = ""
        self._moved = time.monotonic()
        self._patience = stall
        self._poller = select.poll()
        self._pinned: dict[int, Member] = {}
        self._dead_before = False
        self._well = False  # progress was seen, or a look found that nothing is stuck
        self._doubt: Stopped | None = None
        self.looks = 0
        """How often stacks were read."""

    def run(self, deadline: Deadline) -> Stopped:
        """Watch until ``deadline``, and :data:`ALLOWANCE` longer for a look; returns why it ended.

        Raises :class:`EnvironmentFailure` where a rank cannot be kept in view.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(promptly())
            self._open(stack)
            while True:
                lost = self._lost(min(self._poll, deadline.remaining()))
                if lost and len(lost) == len(self._ranks()) and self._has_ended():
                    return Stopped("the engine has ended")
                if lost:
                    return self._look(deadline, f"rank {lost[0].rank} has no living process", dead=True)
                if self._standing():
                    stopped = self._look(deadline, self._why())
                    if stopped.verdict is not None and _ends(stopped.verdict):
                        return stopped
                    self._doubt = stopped if _in_doubt(stopped.verdict) else None
                    self._well = self._doubt is None
                    self._moved = time.monotonic()
                    self._patience = min(self._patience * 2, LONGEST_STALL)
                if deadline.expired:
                    return self._over(f"watched for {deadline.budget:.0f} s")

    def _over(self, watched: str) -> Stopped:
        if self._doubt is not None:
            reason = f"{watched}, and whether something is stuck cannot be told"
            return replace(self._doubt, reason=reason, told=False)
        if not self._well:
            return Stopped(f"{watched}, too short to see progress or to call it stuck", told=False)
        return Stopped(f"{watched}, nothing was stuck")

    def _has_ended(self) -> bool:
        """Whether the engine ended with its ranks, all of which are gone, and is not half dead."""
        if self._root is None:
            return not self._dead_before
        root = self._root
        with contextlib.suppress(DeadlineExceeded):
            wait_for("the engine's root to end", lambda: not root.alive, Deadline.after(LEAVING))
        return not root.alive

    def _ranks(self) -> list[Member]:
        return [m for m in self._members if m.role is Role.RANK]

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Pin every rank with a pidfd: it becomes readable when the process ends, at no cost before."""
        self._gone: list[Member] = []
        for member in self._ranks():
            try:
                descriptor = os.pidfd_open(member.pid)
            except ProcessLookupError:
                self._gone.append(member)
                continue
            except OSError as error:
                raise EnvironmentFailure(
                    f"cannot keep pid {member.pid} in view: {error.strerror}",
                    cause="it is a thread, or the limit of open files is reached",
                    next_step="give processes, and raise the limit: ulimit -n",
                ) from error
            stack.callback(os.close, descriptor)
            identity = ProcessId(member.pid, member.create_time)
            if identity.process() is None:
                self._gone.append(member)
                continue
            # One that is dead already did not end with an engine that was watched.
            self._dead_before = self._dead_before or not identity.alive
            self._pinned[descriptor] = member
            self._poller.register(descriptor, select.POLLIN)

    def _lost(self, seconds: float) -> list[Member]:
        """Wait for at most ``seconds``; return the ranks that have ended by then."""
        for descriptor, _ in self._poller.poll(seconds * 1000):
            self._poller.unregister(descriptor)
            self._gone.append(self._pinned[descriptor])
        if self._gone and len(self._gone) < len(self._ranks()):
            # An engine that ends takes its ranks along within a moment: that is no lost rank.
            until = Deadline.after(ENDING)
            while not until.expired and len(self._gone) < len(self._ranks()):
                for descriptor, _ in self._poller.poll(until.remaining() * 1000):
                    self._poller.unregister(descriptor)
                    self._gone.append(self._pinned[descriptor])
        return self._gone

    def _standing(self) -> bool:
        """Poll once; return whether progress has stood still for as long as the patience lasts."""
        source: Progress = self._kernel
        poll = self._metrics.poll() if self._metrics is not None else None
        if poll is not None and self._metrics is not None:
            source = self._metrics
        else:
            poll = self._kernel.poll()
        if poll is None:
            return False
        if source.name != self._source:
            self._source, self._polls = source.name, []
            self._moved = time.monotonic()
        before = self._polls[-1] if self._polls else None
        self._polls = [*self._polls, poll][-_KEPT_POLLS:]
        well = poll.pending is False or (before is not None and self._went_on(before, poll))
        if well:
            self._well, self._doubt = True, None
        if before is None or well:
            self._moved = time.monotonic()
            self._patience = self._stall
        return time.monotonic() - self._moved >= self._patience

    def _went_on(self, before: Poll, now: Poll) -> bool:
        if self._source == self._kernel.name:
            # The kernel's counter grows by less than one per second and rank while they stand still.
            return now.counter - before.counter >= max(0.05, now.at - before.at)
        return now.counter != before.counter

    def _why(self) -> str:
        return f"no progress for {time.monotonic() - self._moved:.1f} s by {self._source}"

    def _look(self, deadline: Deadline, reason: str, *, dead: bool = False) -> Stopped:
        self.looks += 1
        self._say(f"{reason}: reading stacks")
        polls = [{"at": p.at, "counter": p.counter, "pending": p.pending} for p in self._polls]
        counted = self._metrics is not None and self._source == self._metrics.name
        evidence = dict(self._evidence())
        if counted:
            evidence["progress"] = polls
        resumable = counted and not dead  # what the others do does not bring a rank back
        if self._refresh is not None:
            named = list(self._refresh())
            if {m.pid for m in named if m.role is Role.RANK} == {m.pid for m in self._ranks()}:
                self._members = named
        bundle, verdict = follow(
            self._members,
            folder=self._folder,
            deadline=Deadline.after(min(_LOOK, deadline.remaining() + ALLOWANCE)),
            reason=reason,
            evidence=evidence,
            resumed=self._resumed if resumable else None,
            registry=self._registry,
            with_locals=self._with_locals,
        )
        if resumable and self._resumed():
            self._say("progress goes on: the step was long, and it is over")
            return Stopped(reason)
        self._say(verdict.paragraph())
        return Stopped(reason, verdict, bundle, self._folder)

    def _resumed(self) -> bool:
        poll = self._metrics.poll() if self._metrics is not None else None
        return poll is not None and bool(self._polls) and poll.counter != self._polls[-1].counter


def _ends(verdict: Verdict) -> bool:
    return verdict.is_hang or verdict.kind is VerdictKind.DEAD_RANK


def _in_doubt(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.outcome is Outcome.UNKNOWN
