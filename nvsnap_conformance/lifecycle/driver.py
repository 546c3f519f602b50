"""Drives an engine through a lifecycle and records what was seen; judges nothing.

One driver runs every variant: the *control* arm (no C/R at all), *hooks-only* (prepare and rebuild with
nothing between) and *full* (the host checkpoint between). A verb that fails ends the cycle; what had been
seen until then stays in the record, and the failure is a fact in it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.freeze import read_states
from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RankReply, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded, NvsnapError
from nvsnap_conformance.lifecycle.trace import Event, Verb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvsnap_conformance.checkpoint.protocol import CheckpointResult, HostCheckpointer, ProcessState
    from nvsnap_conformance.deadline import Deadline

OBSERVER = HooksSpec("nvsnap_hooks.observer:Observer")

VERB_SECONDS = 60.0
"""Allowance of one verb, in seconds. Each takes well under a second on the measured engines, a dump of a
whole engine by CRIU up to 10 s."""


class Variant(StrEnum):
    """Which verbs a cycle runs."""

    CONTROL = "control"
    HOOKS_ONLY = "hooks-only"
    FULL = "full"


@dataclass(frozen=True)
class CycleFailure:
    """The verb at which a cycle ended early, and why. ``timed_out`` tells a hang from a refusal."""

    verb: Verb
    kind: str
    message: str
    timed_out: bool


@dataclass
class CycleRecord:
    """Everything seen in one cycle.

    ``snapshots`` maps a moment (``before``, ``prepared``, ``after``) to the observer's replies.
    ``stopped`` holds the states of all processes between dump and load, read back by the driver itself
    and not by the checkpointer.
    """

    variant: Variant
    ranks: int
    events: list[Event] = field(default_factory=list)
    replies: dict[Verb, list[RankReply]] = field(default_factory=dict)
    snapshots: dict[str, list[RankReply]] = field(default_factory=dict)
    checkpoints: dict[Verb, CheckpointResult] = field(default_factory=dict)
    stopped: tuple[ProcessState, ...] = ()
    failure: CycleFailure | None = None

    def seconds(self) -> dict[str, float]:
        """Return the wall time of each verb, in seconds, over all ranks."""
        spans: dict[str, tuple[float, float]] = {}
        for event in self.events:
            began, ended = spans.get(event.verb.value, (event.began, event.ended))
            spans[event.verb.value] = (min(began, event.began), max(ended, event.ended))
        return {verb: round(ended - began, 6) for verb, (began, ended) in spans.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the cycle as JSON values, for the run record."""
        return {
            "variant": self.variant.value,
            "ranks": self.ranks,
            "events": [event.as_json() for event in self.events],
            "seconds": self.seconds(),
            "replies": {verb.value: [reply_json(r) for r in rs] for verb, rs in self.replies.items()},
            "failure": None
            if self.failure is None
            else {
                "verb": self.failure.verb.value,
                "kind": self.failure.kind,
                "message": self.failure.message,
            },
        }


def reply_json(reply: RankReply) -> dict[str, Any]:
    """Return a rank's reply as JSON values, without the traceback's text."""
    error = None if reply.error is None else {k: v for k, v in reply.error.items() if k != "traceback"}
    return {"rank": reply.rank, "in_step": reply.in_step, "value": reply.value, "error": error}


class VerbFailed(Exception):  # noqa: N818 - an observation of the cycle
    """A verb did not succeed on every rank: hooks answered an error or reported a failed state."""


class LifecycleDriver:
    """Runs the verbs in order. A vendor's orchestrator, or a mutant of this one, overrides :meth:`run`."""

    def __init__(
        self,
        engine: EngineHandle,
        hooks: HooksSpec,
        host: HostCheckpointer | None,
        folder: Path,
        *,
        between: Callable[[str], None] | None = None,
    ) -> None:
        """``between`` is called with ``prepared`` and ``rebuilt`` while the engine is held there."""
        self.engine = engine
        self.hooks = hooks
        self.host = host
        self.folder = folder
        self.between = between or (lambda _moment: None)
        self.record = CycleRecord(Variant.CONTROL, engine.config.tensor_parallel)

    def run(self, variant: Variant, deadline: Deadline) -> CycleRecord:
        """Run one cycle and return its record; engine failures end up in it, never as an exception."""
        self.record = CycleRecord(variant, self.engine.config.tensor_parallel)
        self.snapshot("before", deadline)
        if variant is Variant.CONTROL:
            return self.record
        try:
            self.verbs(variant, deadline)
        except _Stopped:
            return self.record
        self.snapshot("after", deadline)
        return self.record

    def verbs(self, variant: Variant, deadline: Deadline) -> None:
        """Run the verbs in their order."""
        self.quiesce(deadline)
        self.prepare(deadline)
        self.snapshot("prepared", deadline)
        self.between("prepared")
        if variant is Variant.FULL:
            self.dump(deadline)
            self.load(deadline)
        self.rebuild(deadline)
        self.between("rebuilt")
        self.resume(deadline)

    def snapshot(self, moment: str, deadline: Deadline) -> None:
        """Ask the observer on every rank what it really holds."""
        try:
            self.record.snapshots[moment] = self.engine.rpc(
                "snapshot", hooks=OBSERVER, deadline=deadline.sooner(VERB_SECONDS)
            )
        except (RequestFailed, NvsnapError):
            # No snapshot is a fact: the checks find it missing and say so.
            self.record.snapshots[moment] = []

    def quiesce(self, deadline: Deadline) -> None:
        """Hold new requests at the front and let the running ones finish."""
        with self._front(Verb.QUIESCE):
            self.engine.quiesce(deadline.sooner(VERB_SECONDS))

    def prepare(self, deadline: Deadline) -> None:
        """Release the cross-rank state on every rank."""
        self._on_ranks(Verb.PREPARE, "prepare", deadline)

    def dump(self, deadline: Deadline) -> None:
        """Checkpoint the processes, then read every thread's state back."""
        host = self._host()
        with self._front(Verb.DUMP):
            result = host.dump(self.engine.process, self.folder, deadline.sooner(VERB_SECONDS))
            self.record.checkpoints[Verb.DUMP] = result
        self.record.stopped = (
            result.states if host.replaces_processes else read_states(self.engine.process.tree())
        )

    def load(self, deadline: Deadline) -> None:
        """Bring the processes back."""
        host = self._host()
        with self._front(Verb.LOAD):
            self.record.checkpoints[Verb.LOAD] = host.load(
                self.engine.process, self.folder, deadline.sooner(VERB_SECONDS)
            )

    def rebuild(self, deadline: Deadline) -> None:
        """Rebuild on every rank what :meth:`prepare` released (the hooks' ``restore``)."""
        self._on_ranks(Verb.REBUILD, "restore", deadline)

    def resume(self, deadline: Deadline) -> None:
        """Serve again."""
        with self._front(Verb.RESUME):
            self.engine.resume(deadline.sooner(VERB_SECONDS))

    def _host(self) -> HostCheckpointer:
        if self.host is None:
            raise NvsnapError(
                "the full lifecycle needs a host checkpointer",
                cause='the target says host = "none"',
                next_step="set [checkpoint] host in the target, or run the hooks-only variant",
            )
        return self.host

    @contextmanager
    def _front(self, verb: Verb) -> Iterator[None]:
        began = time.monotonic()
        ok = False
        try:
            with self._stop_on_failure(verb):
                yield
                ok = True
        finally:
            self.record.events.append(Event(verb, None, began, time.monotonic(), ok))

    def _on_ranks(self, verb: Verb, method: str, deadline: Deadline) -> None:
        began = time.monotonic()
        with self._stop_on_failure(verb):
            replies = self.engine.rpc(method, hooks=self.hooks, deadline=deadline.sooner(VERB_SECONDS))
            self.record.replies[verb] = replies
            ended = time.monotonic()
            offset = self.engine.process.clock_offset
            for reply in replies:
                if reply.rank is not None:
                    span = _clock(reply, offset) or (began, ended)
                    self.record.events.append(Event(verb, reply.rank, *span, ok=not _problem(reply)))
            reasons = [f"rank {r.rank}: {_problem(r)}" for r in replies if _problem(r)]
            if reasons:
                raise VerbFailed("; ".join(reasons))

    @contextmanager
    def _stop_on_failure(self, verb: Verb) -> Iterator[None]:
        try:
            yield
        except (VerbFailed, RequestFailed, NvsnapError) as error:
            self.record.failure = CycleFailure(
                verb, type(error).__name__, str(error), isinstance(error, DeadlineExceeded)
            )
            raise _Stopped from error


class _Stopped(Exception):  # noqa: N818 - control flow inside the driver
    """A verb failed; the record says which."""


def _problem(reply: RankReply) -> str:
    """Return why a hook's reply is a failure: an error value, or a report whose state says so."""
    if reply.error is not None:
        return f"{reply.error.get('type')}: {reply.error.get('message')}"
    if isinstance(reply.value, dict) and reply.value.get("state") == "failed":
        return f"state failed: {reply.value.get('problem')}"
    return ""


def _clock(reply: RankReply, offset: float) -> tuple[float, float] | None:
    """Return the span by the rank's own monotonic clock where the reply carries one, in the suite's time."""
    clock = reply.raw.get("clock") if isinstance(reply.raw, dict) else None
    if isinstance(clock, list) and len(clock) == 2:
        return float(clock[0]) - offset, float(clock[1]) - offset
    return None
