"""What every device checkpointer does alike: one verb on all processes, judged by what is read back.

A round is one verb on all processes that take part. A reply is a success only where the state read back is
the one that the verb leads to; what fails on any process is undone on all, and where that cannot be, the
engine is killed whole. The order is the one on which processes that share state depend (vLLM PR 58183): all
locked before any is checkpointed, all restored before any is unlocked, in a roll-back too.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict, dataclass
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.device_failure import HANG, DeviceFailure, Fate
from nvsnap_conformance.checkpoint.protocol import CheckpointResult
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RUNNING, LOCKED, CHECKPOINTED = "RUNNING", "LOCKED", "CHECKPOINTED"

AFTER = {"lock": LOCKED, "checkpoint": CHECKPOINTED, "restore": LOCKED, "unlock": RUNNING}
"""The state that each verb leads to (cuda.h, CUprocessState)."""

PASSING = frozenset({"CHECKPOINTING", "RESTORING"})
"""States that a process leaves by itself: the driver is at work, also where nobody waits for it any more."""

NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: the process has not initialised CUDA, so there is nothing to take away."""

LOST = "LOST"
"""The code of a process that took part and is not there any more."""

ROLL_BACK_SECONDS = 30.0
KILL_SECONDS = 20.0

ROLL_BACK_SHARE = 0.25
"""The part of a verb's deadline that is kept for a roll-back."""


@dataclass(frozen=True)
class Reply:
    """What one call on one process came to.

    ``result`` and ``code`` are the layer's own (the driver's error, an exit code; 0 is success), ``state`` is
    what was read back after the call (``None``: it could not be read, and ``state_result`` says why).
    ``began`` and ``ended`` are on the monotonic clock. ``hung``: no answer before the deadline, and who made
    the call was killed. ``died``: the last words of a helper that ended by itself.
    """

    pid: int
    verb: str
    began: float
    ended: float
    result: str = ""
    code: int | None = None
    state: str | None = None
    state_result: str = ""
    thread: int | None = None
    hung: bool = False
    died: str | None = None

    @property
    def seconds(self) -> float:
        """How long the call took, in seconds."""
        return self.ended - self.began

    @property
    def summary(self) -> str:
        """The result in one phrase."""
        if self.hung:
            return f"no answer within {self.seconds:.1f} s"
        return self.result or f"the helper died: {self.died}"

    def as_json(self) -> dict[str, Any]:
        """Return the reply as JSON values."""
        return asdict(self)


class RoundsCheckpointer(ABC):
    """Runs the rounds. A layer says how a call is made, and how a state is read.

    ``kind`` is the first part of the signature of its failures.
    """

    name: str
    kind: str

    def __init__(self) -> None:
        self._taking_part: list[int] = []
        self._given: list[ProcessId] = []
        self._calls: list[dict[str, Any]] = []
        self._failed_calls: set[tuple[int, str]] = set()
        self._undoing = False

    # What a layer brings --------------------------------------------------------------------------

    @abstractmethod
    def survey(self, pids: Sequence[int], deadline: Deadline) -> tuple[dict[int, str], dict[int, str]]:
        """Return the state of each process that has GPU state, and why each of the others has none."""

    @abstractmethod
    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Make one call on all ``pids`` at once and return each reply once all are in, or out of time."""

    @abstractmethod
    def read_states(self, pids: Sequence[int], deadline: Deadline) -> Mapping[int, str | None]:
        """Read every state, also after a call that hung; ``None`` where there is no answer."""

    def details(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[str, Any]:  # noqa: ARG002
        """Return what is worth recording before a verb."""
        return {}

    def may_repeat(self, verb: str) -> bool:  # noqa: ARG002
        """Return whether a verb that has failed may be tried once more in the roll-back."""
        return False

    @abstractmethod
    def drop(self) -> None:
        """End whatever was started to make the calls."""

    # The verbs ------------------------------------------------------------------------------------

    def lock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Lock every process that has GPU state; the others are named in ``details["without_context"]``.

        Raises :class:`DeviceFailure`; :class:`EnvironmentFailure` where the layer's tools are not there, and
        where no process has GPU state, before anything is touched.
        """
        began = time.monotonic()
        self.close()
        self._given = _identities(pids)
        states, without = self.survey(pids, deadline)
        if not states:
            self.close()
            raise EnvironmentFailure(
                "no process of the engine has a CUDA context, so there is no GPU state to checkpoint",
                cause=f"what is said of each: {without}",
                next_step='run an engine on a GPU, or set [checkpoint] device = "none"',
            )
        self._taking_part = sorted(states)
        return self._round("lock", began, deadline, {"without_context": without})

    def checkpoint(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Move the GPU state of every locked process into its memory; ``pids`` are those given to lock."""
        self._require("checkpoint", pids)
        began = time.monotonic()
        told = self.details("checkpoint", self._taking_part, deadline)
        return self._round("checkpoint", began, deadline, told)

    def restore(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Move it back. After a host layer that made new processes, ``pids`` are theirs."""
        began = time.monotonic()
        if not set(self._taking_part) <= set(pids):
            self._given = _identities(pids)
            expected = len(self._taking_part)
            self.drop()
            states, without = self.survey(pids, deadline)
            self._taking_part = sorted(pid for pid, state in states.items() if state == CHECKPOINTED)
            if len(self._taking_part) != expected:
                raise self._failed(
                    "restore",
                    f"{expected} processes were checkpointed, {len(self._taking_part)} came back: "
                    f"states {states}, and without a context {sorted(without)}",
                    LOST,
                )
        return self._round("restore", began, deadline, {})

    def unlock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Let every process run on."""
        self._require("unlock", pids)
        result = self._round("unlock", time.monotonic(), deadline, {})
        self.close()
        return result

    def abandon(self) -> Fate | None:
        """Roll back what was begun, after a failure of somebody else's; ``None`` where nothing was."""
        if not self._taking_part:
            return None
        fate = self.roll_back()
        self.close()
        return fate

    def close(self) -> None:
        """End what makes the calls and forget the processes; nothing is done to these."""
        self.drop()
        self._taking_part = []
        self._calls = []
        self._failed_calls = set()

    # One round ------------------------------------------------------------------------------------

    def _round(
        self, verb: str, began: float, deadline: Deadline, details: dict[str, Any]
    ) -> CheckpointResult:
        try:
            replies = self.call(verb, self._taking_part, deadline.reserve(ROLL_BACK_SHARE))
        except EnvironmentFailure as failure:  # the verb's program is not there, after the one before was
            raise self._failed(verb, failure.what, "START") from failure
        if verb == "lock":
            replies = self._without_late(replies, details["without_context"])
        bad = {pid: why for pid, reply in replies.items() if (why := self.problem(verb, reply)) is not None}
        if bad:
            self._failed_calls |= {(pid, verb) for pid in bad}
            code, _ = min(bad.values(), key=lambda told: told[0] != HANG)
            texts = "; ".join(f"process {pid}: {text}" for pid, (_, text) in sorted(bad.items()))
            raise self._failed(verb, texts, code)
        told = {
            "calls": [reply.as_json() for reply in replies.values()],
            "states": {pid: reply.state for pid, reply in replies.items()},
        }
        return CheckpointResult(verb, time.monotonic() - began, (), {**told, **details})

    def call(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Make one call on all ``pids``, and keep the replies for the record."""
        replies = self.make_calls(verb, pids, deadline)
        self._calls += [{**reply.as_json(), "roll_back": self._undoing} for reply in replies.values()]
        return replies

    def problem(self, verb: str, reply: Reply) -> tuple[str, str] | None:
        """Return the signature's code and a text where a reply is no success, else ``None``."""
        if reply.hung:
            return HANG, f"{verb} did not return within {reply.seconds:.1f} s; who called was killed"
        if reply.died is not None:
            return "HELPER", f"the helper process died during {verb}: {reply.died}"
        if reply.code != 0:
            state = reply.state or reply.state_result or "not read"
            return str(reply.code), f"{verb} answered {reply.result}, state {state}"
        if reply.state != AFTER[verb]:
            seen = f"but the state is {reply.state}, not {AFTER[verb]}"
            return "STATE", f"{verb} answered {reply.result}, {seen}"
        return None

    def _without_late(self, replies: dict[int, Reply], without: dict[int, str]) -> dict[int, Reply]:
        """Leave out what has a state but no context: the driver initialised, and nothing to lock.

        Such daemons hold no GPU memory (llm-d-incubation's time slicing met one in its process tree).
        """
        late = [pid for pid, reply in replies.items() if reply.code == NOT_INITIALIZED]
        if self.kind != "CUDA" or len(late) == len(replies):
            return replies  # then it is a failure, of all
        without |= {pid: replies[pid].result for pid in late}
        self._taking_part = [pid for pid in self._taking_part if pid not in late]
        return {pid: reply for pid, reply in replies.items() if pid not in late}

    def _require(self, verb: str, pids: list[int]) -> None:
        if not self._taking_part or not set(self._taking_part) <= set(pids):
            raise UsageError(
                f"{verb} of processes {sorted(pids)}, of which {self._taking_part or 'none'} were locked",
                next_step="give every verb the processes that were given to lock",
            )

    # After a failure ------------------------------------------------------------------------------

    def _failed(self, verb: str, what: str, code: str) -> DeviceFailure:
        """Bring every process back, or end all of them; return the error that says which."""
        # Where a process is lost already, those that are left are no engine any more.
        fate = self.kill() if code == LOST else self.roll_back()
        calls = list(self._calls)
        self.close()
        return DeviceFailure(
            f"{verb} failed on {what}",
            signature=f"{self.kind}:{code}@{verb}",
            fate=fate,
            calls=calls,
            cause=self.cause(verb, code),
            next_step="see which cross-rank resources the observer saw before the checkpoint",
        )

    def cause(self, verb: str, code: str) -> str:
        """Return the likely cause of a failure, for people."""
        if code == LOST:
            return "the host layer did not bring every process back, or one died while it was away"
        if verb in ("checkpoint", "restore"):
            return (
                "something that the driver cannot checkpoint was live: a communicator with peer mappings, "
                "CUDA IPC, VMM handles shared between processes"
            )
        return "the process is in another state, busy, or gone"

    def roll_back(self) -> Fate:
        """Unlock every process, after a restore where it needs one; kill all where one cannot come back.

        A verb that has failed on a process already is not tried on it again. A process that never took part
        is killed with the others, being of the same engine.
        """
        self._undoing = True
        try:
            return Fate.RUNNING if self._undo(Deadline.after(ROLL_BACK_SECONDS)) else self.kill()
        finally:
            self._undoing = False

    def _undo(self, deadline: Deadline) -> bool:
        states = self._settled(deadline.reserve(0.5))
        known = {RUNNING, LOCKED, CHECKPOINTED}
        # All of them are restored before any is unlocked, here too.
        for state, verb in ((CHECKPOINTED, "restore"), (LOCKED, "unlock")):
            if not set(states.values()) <= known:
                return False
            known.discard(state)
            if pids := [pid for pid, now in states.items() if now == state]:
                failed = any((pid, verb) in self._failed_calls for pid in pids)
                if failed and not self.may_repeat(verb):
                    return False
                self.call(verb, pids, deadline.reserve(0.5))
                states = self._settled(deadline.reserve(0.5))
        return set(states.values()) == {RUNNING}

    def _settled(self, deadline: Deadline) -> Mapping[int, str | None]:
        """Read the states once none is one that passes by itself, or the deadline has."""
        latest: Mapping[int, str | None] = {}

        def settled() -> bool:
            nonlocal latest
            latest = self.read_states(self._taking_part, deadline)
            return not PASSING & set(latest.values())

        with suppress(DeadlineExceeded):
            wait_for("the driver to be done", settled, deadline, interval=0.1)
        return latest

    def kill(self) -> Fate:
        """Kill every process that was given, and see that each is gone."""
        for process in self._given:
            process.send(SIGKILL)
        try:
            wait_for(
                "the end of the engine's processes",
                lambda: not any(process.alive for process in self._given),
                Deadline.after(KILL_SECONDS),
                interval=0.02,
            )
        except DeadlineExceeded:
            return Fate.STUCK
        return Fate.KILLED


def _identities(pids: Sequence[int]) -> list[ProcessId]:
    return [found for found in map(ProcessId.of, pids) if found is not None]
