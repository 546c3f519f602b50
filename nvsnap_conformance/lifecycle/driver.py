"""Drives an engine through a lifecycle and records what was seen; judges nothing.

One driver runs every variant: the *control* arm (no C/R at all), *hooks-only* (prepare and rebuild with
nothing between) and *full* (the checkpoint of device and host between). A verb that fails ends the cycle;
what had been seen until then stays in the record, and the failure is a fact in it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.device import AFTER
from nvsnap_conformance.checkpoint.device_failure import DeviceFailure
from nvsnap_conformance.checkpoint.freeze import read_states
from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RankReply, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded, NvsnapError
from nvsnap_conformance.lifecycle import asleep
from nvsnap_conformance.lifecycle.trace import Event, Verb
from nvsnap_conformance.outcomes import Finding, Outcome, Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from nvsnap_conformance.checkpoint.protocol import (
        CheckpointResult,
        DeviceCheckpointer,
        HostCheckpointer,
        ProcessState,
    )
    from nvsnap_conformance.deadline import Deadline

DEVICE_VERBS = frozenset({Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK})

OBSERVER = HooksSpec("nvsnap_hooks.observer:Observer")

VERB_SECONDS = 60.0
"""Allowance of one verb, in seconds. Each takes well under a second on the measured engines, a dump of a
whole engine by CRIU up to 10 s."""


DEVICE_SECONDS = 180.0
"""Allowance of one verb of the device layer, in seconds. On an H200 the driver checkpoints 2 GB/s and
restores 6 GB/s, so a GPU that is full takes a bit over a minute."""


CONTEXT_BYTES = 128 << 20
"""What a CUDA context takes at least on a device, in bytes; on an H200 with driver 580 it is some 500 MiB."""

SLEEP_SECONDS = 180.0
"""Allowance of sleep and of wake, in seconds. Level 1 copies the weights to host memory and back, level 2
reads the model again; 141 GB, all that an H200 holds, take this long at 0.8 GB/s."""

DISCARDS_WEIGHTS = 2
"""The sleep level after which nothing holds the weights any more."""


class Variant(StrEnum):
    """Which verbs a cycle runs."""

    CONTROL = "control"
    HOOKS_ONLY = "hooks-only"
    FULL = "full"


@dataclass(frozen=True)
class CycleFailure:
    """The verb at which a cycle ended early, and why. ``timed_out`` tells a hang from a refusal.

    ``signature`` and ``outcome`` are set where the failure has a name of its own, beside that of its verb.
    """

    verb: Verb
    kind: str
    message: str
    timed_out: bool
    signature: Signature | None = None
    outcome: Outcome = Outcome.FAILED


@dataclass
class CycleRecord:
    """Everything seen in one cycle.

    ``snapshots`` maps a moment (``before``, ``asleep``, ``prepared``, ``after``) to the observer's replies,
    ``statuses`` the same to what the hooks' ``status`` answered; the control arm calls no hooks.
    ``stopped`` holds the states of all processes between dump and load, read back by the driver itself
    and not by the checkpointer. ``failed_calls`` are the device layer's calls, where it failed.
    """

    variant: Variant
    ranks: int
    events: list[Event] = field(default_factory=list)
    replies: dict[Verb, list[RankReply]] = field(default_factory=dict)
    snapshots: dict[str, list[RankReply]] = field(default_factory=dict)
    statuses: dict[str, list[RankReply]] = field(default_factory=dict)
    checkpoints: dict[Verb, CheckpointResult] = field(default_factory=dict)
    stopped: tuple[ProcessState, ...] = ()
    failure: CycleFailure | None = None
    failed_calls: tuple[dict[str, Any], ...] = ()

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
            "statuses": {moment: [reply_json(r) for r in rs] for moment, rs in self.statuses.items()},
            "failure": None
            if self.failure is None
            else {
                "verb": self.failure.verb.value,
                "kind": self.failure.kind,
                "message": self.failure.message,
                "signature": None if self.failure.signature is None else str(self.failure.signature),
            },
            "device": {
                verb.value: {"seconds": result.seconds, **result.details}
                for verb, result in self.checkpoints.items()
                if verb in DEVICE_VERBS
            },
            "device_calls_of_the_failure": list(self.failed_calls),
        }


def reply_json(reply: RankReply) -> dict[str, Any]:
    """Return a rank's reply as JSON values, without the traceback's text."""
    error = None if reply.error is None else {k: v for k, v in reply.error.items() if k != "traceback"}
    return {"rank": reply.rank, "in_step": reply.in_step, "value": reply.value, "error": error}


class VerbFailed(Exception):  # noqa: N818 - an observation of the cycle
    """A verb did not succeed on every rank: hooks answered an error or reported a failed state.

    ``signature`` is set where the failure has a name of its own.
    """

    signature: Signature | None = None


class FrontReleased(VerbFailed):
    """An engine that was quiesced schedules requests again before it was told to resume."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(f"the front no longer holds requests after {verb}, and nobody has resumed it")
        self.signature = Signature("FRONT", "RELEASED", verb.value)


class NotAsleep(VerbFailed):
    """An engine said that it sleeps, and its memory does not bear that out."""

    def __init__(self, found: Finding) -> None:
        super().__init__(found.message)
        self.signature = found.signature


class MemoryKept(VerbFailed):
    """A device checkpoint was reported, and the engine's memory is where it was."""

    def __init__(self, before: int, after: int, wanted: int) -> None:
        super().__init__(
            f"{before >> 20} MiB were in use on the engine's GPUs before the checkpoint, {after >> 20} MiB "
            f"are after it: at least {wanted >> 20} MiB less are expected"
        )
        self.signature = Signature("DEVICE", "MEMORY_KEPT", "checkpoint")


class LifecycleDriver:
    """Runs the verbs in order. A vendor's orchestrator, or a mutant of this one, overrides :meth:`run`."""

    def __init__(
        self,
        engine: EngineHandle,
        hooks: HooksSpec,
        host: HostCheckpointer | None,
        folder: Path,
        *,
        device: DeviceCheckpointer | None = None,
        between: Callable[[str], None] | None = None,
        sleep_level: int | None = None,
        device_memory: Callable[[], int | None] | None = None,
    ) -> None:
        """``between`` is called with ``prepared`` and ``rebuilt`` while the engine is held there.

        ``sleep_level`` (1 or 2) has a full cycle put the engine to sleep, ``None`` does not.

        ``device_memory`` returns the bytes in use on the engine's GPUs, ``None`` where nobody can tell. Where
        it is given, a checkpoint that leaves them in use has failed.

        The attribute ``while_away`` is called between checkpoint and restore, when nothing of it runs.
        """
        self.engine = engine
        self.hooks = hooks
        self.host = host
        self.device = device
        self._pids: dict[int, int] = {}
        self._inside: dict[int, int] = {}
        self.folder = folder
        self.sleep_level = sleep_level
        self.device_memory = device_memory or (lambda: None)
        self.between = between or (lambda _moment: None)
        self.while_away: Callable[[], None] = lambda: None
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
        level = self.sleep_level if variant is Variant.FULL else None
        self.quiesce(deadline)
        if level is not None:
            self.sleep(level, deadline)
        self.prepare(deadline)
        self.snapshot("prepared", deadline)
        self.between("prepared")
        if variant is Variant.FULL:
            self.checkpoint_and_restore(deadline)
        self.rebuild(deadline)
        self.between("rebuilt")
        if level is not None:
            self.wake(level, deadline)
        self.resume(deadline)

    def checkpoint_and_restore(self, deadline: Deadline) -> None:
        """Run the layers that the target has: the device's verbs around the host's."""
        if self.device is None:
            self.dump(deadline)
            self.while_away()
            self.load(deadline)
            return
        try:
            self.on_device(Verb.LOCK, deadline)
            before = self.device_memory()
            self.on_device(Verb.CHECKPOINT, deadline)
            self._require_taken(before)
            if self.host is not None:
                self.dump(deadline)
            self.while_away()
            if self.host is not None:
                self.load(deadline)
            self.on_device(Verb.RESTORE, deadline)
            self.on_device(Verb.UNLOCK, deadline)
        except _Stopped:
            # Whoever failed, no process is left locked.
            self.device.abandon()
            raise

    def on_device(self, verb: Verb, deadline: Deadline) -> None:
        """Run one verb of the device layer on all processes of the engine."""
        device = self.device
        assert device is not None  # the caller's condition
        with self._stop_on_failure(verb):
            pids = self._device_pids(verb, deadline)
            call = {
                Verb.LOCK: device.lock,
                Verb.CHECKPOINT: device.checkpoint,
                Verb.RESTORE: device.restore,
                Verb.UNLOCK: device.unlock,
            }[verb]
            try:
                result = call(pids, deadline.sooner(DEVICE_SECONDS))
            except DeviceFailure as failure:
                self.record.failed_calls = failure.calls
                told = [call for call in failure.calls if not call.get("roll_back")]
                self._device_events(verb, [call for call in told if call.get("verb") == verb.value])
                raise
            self.record.checkpoints[verb] = result
            self._device_events(verb, result.details["calls"])

    def _require_taken(self, before: int | None) -> None:
        """Fail the checkpoint where it left on the devices what a rank's context alone takes."""
        after = self.device_memory()
        wanted = CONTEXT_BYTES * self.record.ranks
        if before is not None and after is not None and before - after < wanted:
            with self._stop_on_failure(Verb.CHECKPOINT):
                raise MemoryKept(before, after, wanted)

    def _device_pids(self, verb: Verb, deadline: Deadline) -> list[int]:
        """Return the pids of the engine's processes, and know those of the ranks.

        The ranks are asked before the lock, after which they answer nothing. A host layer that makes new
        processes keeps their pids inside.
        """
        process = self.engine.process
        if verb is Verb.LOCK:
            ranks = self.engine.ranks(deadline)
            self._pids = {rank.process.pid: rank.rank for rank in ranks}
            self._inside = {rank.rank: process.namespace_pid(rank.process) for rank in ranks}
        elif verb is Verb.RESTORE and self.host is not None and self.host.replaces_processes:
            found = {rank: process.host_pid(inside) for rank, inside in self._inside.items()}
            self._pids = {pid: rank for rank, pid in found.items() if pid is not None}
        return [member.pid for member in process.tree()]

    def _device_events(self, verb: Verb, calls: Sequence[dict[str, Any]]) -> None:
        for call in calls:
            rank = self._pids.get(call["pid"])
            ok = call.get("code", 0) == 0 and call.get("state", AFTER[verb.value]) == AFTER[verb.value]
            if rank is not None:  # a front or a core with a context of its own is no rank
                self.record.events.append(Event(verb, rank, call["began"], call["ended"], ok))

    def snapshot(self, moment: str, deadline: Deadline) -> None:
        """Ask the observer on every rank what it really holds, and the hooks in which state they are."""
        self.record.snapshots[moment] = self._asked("snapshot", OBSERVER, deadline)
        if self.record.variant is not Variant.CONTROL:
            self.record.statuses[moment] = self._asked("status", self.hooks, deadline)

    def _asked(self, method: str, hooks: HooksSpec, deadline: Deadline) -> list[RankReply]:
        try:
            return self.engine.rpc(method, hooks=hooks, deadline=deadline.sooner(VERB_SECONDS))
        except (RequestFailed, NvsnapError):
            # No answer is a fact: the checks find it missing and say so.
            return []

    def quiesce(self, deadline: Deadline) -> None:
        """Hold new requests at the front and let the running ones finish."""
        with self._front(Verb.QUIESCE):
            self.engine.quiesce(deadline.sooner(VERB_SECONDS))

    def sleep(self, level: int, deadline: Deadline) -> None:
        """Have the engine give its weights and caches up, while it goes on holding requests."""
        with self._front(Verb.SLEEP):
            self.engine.sleep(level, deadline.sooner(SLEEP_SECONDS))
            self._require_held(Verb.SLEEP, deadline)
            # What the hooks' state is then is no clause's.
            self.record.snapshots["asleep"] = self._asked("snapshot", OBSERVER, deadline)
            if slept := asleep.problem(self.record.snapshots, self.record.ranks):
                raise NotAsleep(slept)

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

    def wake(self, level: int, deadline: Deadline) -> None:
        """Bring the weights back, loaded again where nothing held them, before anything is answered."""
        with self._front(Verb.WAKE):
            self.engine.wake(deadline.sooner(SLEEP_SECONDS), reload=level == DISCARDS_WEIGHTS)
            # An engine that resumes by itself serves what no orchestrator has declared ready.
            self._require_held(Verb.WAKE, deadline)

    def _require_held(self, verb: Verb, deadline: Deadline) -> None:
        if not self.engine.paused(deadline.sooner(VERB_SECONDS)):
            raise FrontReleased(verb)

    def resume(self, deadline: Deadline) -> None:
        """Serve again."""
        with self._front(Verb.RESUME):
            self.engine.resume(deadline.sooner(VERB_SECONDS))

    def _host(self) -> HostCheckpointer:
        if self.host is None:
            raise NvsnapError(
                "the full lifecycle needs a checkpointer",
                cause='the target says host = "none", and device = "none"',
                next_step="set [checkpoint] host or device in the target, or run the hooks-only variant",
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
            told = error if isinstance(error, DeviceFailure) else None
            named = error.signature if isinstance(error, DeviceFailure | VerbFailed) else None
            self.record.failure = CycleFailure(
                verb,
                type(error).__name__,
                str(error),
                isinstance(error, DeadlineExceeded),
                signature=named,
                outcome=told.outcome if told else Outcome.FAILED,
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
