"""The driver's own checkpoint of GPU state, through ``cuCheckpointProcess*`` (driver 570 and later).

The driver moves a process's GPU memory into the process and back; what is here keeps to the order on which
several processes depend (vLLM PR 58183: all locked before any is checkpointed, all restored before any is
unlocked), bounds every call, and believes no success that the state read back does not show. Measured on
driver 580.159.04: with a live NCCL communicator the *checkpoint* succeeds, the restore answers
CUDA_ERROR_NOT_SUPPORTED, and the processes are lost.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.cuda_driver_calls import Helper, Reply, call_all
from nvsnap_conformance.checkpoint.device_failure import HANG, DeviceFailure, Fate
from nvsnap_conformance.checkpoint.protocol import CheckpointResult
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RUNNING, LOCKED, CHECKPOINTED = "RUNNING", "LOCKED", "CHECKPOINTED"

BEFORE = {"lock": RUNNING, "checkpoint": LOCKED, "restore": CHECKPOINTED, "unlock": LOCKED}
AFTER = {"lock": LOCKED, "checkpoint": CHECKPOINTED, "restore": LOCKED, "unlock": RUNNING}
"""The driver's states around each verb (cuda.h, CUprocessState)."""

NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: the process has not initialised CUDA, so there is nothing to take away."""

STATE_SECONDS = 10.0
"""Allowance for a helper's start and for reading one state. cuInit takes up to 3 s on a host with one GPU."""

ROLL_BACK_SECONDS = 30.0
KILL_SECONDS = 20.0


class CudaDriverCheckpointer:
    """Drives every process with a CUDA context through lock, checkpoint, restore and unlock.

    Processes without a context are left alone and named in ``details["without_context"]``. A verb that fails
    on any process is rolled back on all; where that cannot be, all that were given are killed. Either way
    :class:`DeviceFailure` says which. ``driver`` is a stand-in's file in place of cuda-bindings, for tests.
    """

    name = "cuda-driver"

    def __init__(self, *, driver: Path | None = None) -> None:
        self._driver = driver
        self._helpers: dict[int, Helper] = {}
        self._taking_part: list[int] = []
        self._given: list[ProcessId] = []
        self._calls: list[dict[str, Any]] = []
        self._refused: set[tuple[int, str]] = set()

    # The verbs ------------------------------------------------------------------------------------

    def lock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Lock every process that has a CUDA context; the others are named in the result.

        Raises :class:`DeviceFailure`; :class:`EnvironmentFailure` where cuda-bindings or the driver is not
        there, and where no process has a context, before anything is touched.
        """
        began = time.monotonic()
        self.close()
        self._given = [found for found in map(ProcessId.of, pids) if found is not None]
        states, without = self._survey(pids, deadline)
        if not states:
            self.close()
            raise EnvironmentFailure(
                "no process of the engine has a CUDA context, so there is no GPU state to checkpoint",
                cause=f"the driver says of each: {without}",
                next_step='run an engine on a GPU, or set [checkpoint] device = "none"',
            )
        self._taking_part = sorted(states)
        return self._verb("lock", began, deadline, without_context=without)

    def checkpoint(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Move the GPU state of every locked process into its memory; ``pids`` are those given to lock."""
        self._require("checkpoint", pids)
        began = time.monotonic()
        # The thread that a dump of the process has to let run, for the driver restores in it.
        threads = call_all(self._mine(), "thread", deadline.sooner(STATE_SECONDS))
        return self._verb(
            "checkpoint", began, deadline, restore_threads={pid: told.thread for pid, told in threads.items()}
        )

    def restore(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Move it back. After a host layer that made new processes, ``pids`` are theirs."""
        began = time.monotonic()
        if not set(self._taking_part) <= set(pids):
            self._given = [found for found in map(ProcessId.of, pids) if found is not None]
            expected = len(self._taking_part)
            self._drop_helpers()
            states, without = self._survey(pids, deadline)
            self._taking_part = sorted(pid for pid, state in states.items() if state == CHECKPOINTED)
            if len(self._taking_part) != expected:
                raise self._failed(
                    "restore",
                    f"{expected} processes were checkpointed, {len(self._taking_part)} came back: the driver "
                    f"says {states}, and without a context {sorted(without)}",
                    "CUDA:LOST@restore",
                )
        return self._verb("restore", began, deadline)

    def unlock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Let every process run on."""
        self._require("unlock", pids)
        result = self._verb("unlock", time.monotonic(), deadline)
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
        """End the helpers and forget the processes; nothing is done to these."""
        self._drop_helpers()
        self._taking_part = []
        self._calls = []
        self._refused = set()

    # One verb on all ------------------------------------------------------------------------------

    def _verb(self, verb: str, began: float, deadline: Deadline, **details: Any) -> CheckpointResult:
        # What is left of the deadline pays for a roll-back.
        replies = self.call(verb, self._taking_part, deadline.reserve(0.25))
        if verb == "lock":
            replies = self._without_late(replies, details["without_context"])
        bad = {pid: why for pid, reply in replies.items() if (why := self.problem(verb, reply)) is not None}
        if bad:
            self._refused |= {(pid, verb) for pid in bad}
            code, _ = min(bad.values(), key=lambda told: told[0] != HANG)
            texts = "; ".join(f"process {pid}: {text}" for pid, (_, text) in sorted(bad.items()))
            raise self._failed(verb, texts, f"CUDA:{code}@{verb}")
        return CheckpointResult(
            verb,
            time.monotonic() - began,
            (),
            {
                "calls": [reply.as_json() for reply in replies.values()],
                "states": {pid: reply.state for pid, reply in replies.items()},
                **details,
            },
        )

    def _without_late(self, replies: dict[int, Reply], without: dict[int, str]) -> dict[int, Reply]:
        """Leave out what has a state but no context: the driver initialised, and nothing to lock.

        Such daemons hold no GPU memory (llm-d-incubation's time slicing met one in its process tree).
        """
        late = [pid for pid, reply in replies.items() if reply.code == NOT_INITIALIZED]
        if len(late) == len(replies):
            return replies  # then it is a failure, of all
        for pid in late:
            without[pid] = replies[pid].result
            self._helpers.pop(pid).close()
            self._taking_part.remove(pid)
        return {pid: reply for pid, reply in replies.items() if pid not in late}

    def call(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Make one call on all ``pids`` at once and return each reply once all are in, or out of time."""
        replies = call_all({pid: self._helpers[pid] for pid in pids}, verb, deadline)
        self._calls += [reply.as_json() for reply in replies.values()]
        return replies

    def problem(self, verb: str, reply: Reply) -> tuple[str, str] | None:
        """Return the signature's code and a text where a reply is no success, else ``None``."""
        if reply.hung:
            return HANG, f"{verb} did not return within {reply.seconds:.1f} s; its helper was killed"
        if reply.died is not None:
            return "HELPER", f"the helper process died during {verb}: {reply.died}"
        if reply.code != 0:
            state = reply.state or reply.state_result
            return str(reply.code), f"{verb} answered {reply.result}, state {state}"
        if reply.state != AFTER[verb]:
            return (
                "STATE",
                f"{verb} answered {reply.result}, but the state is {reply.state}, not {AFTER[verb]}",
            )
        return None

    def _require(self, verb: str, pids: list[int]) -> None:
        if not self._taking_part or not set(self._taking_part) <= set(pids):
            raise UsageError(
                f"{verb} of processes {sorted(pids)}, of which {self._taking_part or 'none'} were locked",
                next_step="give every verb the processes that were given to lock",
            )

    # Who takes part -------------------------------------------------------------------------------

    def _survey(self, pids: Sequence[int], deadline: Deadline) -> tuple[dict[int, str], dict[int, str]]:
        """Start a helper for each process; return the states by pid, and why the others have none."""
        without: dict[int, str] = {}
        if self._driver is None:
            without = {pid: "libcuda is not loaded" for pid in pids if not _maps_cuda(pid)}
        with ExitStack() as undo:
            undo.callback(self._drop_helpers)
            for pid in pids:
                if pid not in without:
                    self._helpers[pid] = Helper(pid, self._driver)
            limit = deadline.sooner(STATE_SECONDS + len(pids))
            for helper in self._helpers.values():
                helper.ready(limit)
            replies = call_all(self._helpers, "state", deadline.sooner(STATE_SECONDS))
            states: dict[int, str] = {}
            for pid, reply in replies.items():
                if reply.code == 0 and reply.state is not None:
                    states[pid] = reply.state
                elif reply.code == NOT_INITIALIZED or not _maps_cuda(pid):
                    without[pid] = reply.result or "no answer"
                else:
                    raise EnvironmentFailure(
                        f"the driver does not give the state of process {pid}: {reply.summary}",
                        cause="the process has libcuda loaded, but the driver cannot reach it: another user, "
                        "a pid of another namespace, or a driver older than 570",
                        next_step="run the suite as the engine's user, in the container that starts it",
                    )
            undo.pop_all()
        for pid in set(self._helpers) & set(without):
            self._helpers.pop(pid).close()
        return states, without

    def _mine(self) -> dict[int, Helper]:
        return {pid: self._helpers[pid] for pid in self._taking_part}

    def _drop_helpers(self) -> None:
        for helper in self._helpers.values():
            helper.close()
        self._helpers = {}

    # After a failure ------------------------------------------------------------------------------

    def _failed(self, verb: str, what: str, signature: str) -> DeviceFailure:
        """Bring every process back, or end all of them; return the error that says which."""
        fate = self.roll_back()
        calls = list(self._calls)
        self.close()
        return DeviceFailure(
            f"{verb} failed on {what}",
            signature=signature,
            fate=fate,
            calls=calls,
            cause="something that the driver cannot checkpoint was live: a communicator with peer mappings, "
            "CUDA IPC, VMM handles shared between processes"
            if verb in ("checkpoint", "restore")
            else "the process is in another state, or gone",
            next_step="see which cross-rank resources the observer saw before the checkpoint",
        )

    def roll_back(self) -> Fate:
        """Unlock every process, after a restore where it needs one; kill all where one cannot come back.

        A verb that has failed on a process already is not tried on it again. A process that never took part
        is killed with the others, being of the same engine.
        """
        deadline = Deadline.after(ROLL_BACK_SECONDS)
        if self._undo(deadline):
            return Fate.RUNNING
        return self.kill()

    def _undo(self, deadline: Deadline) -> bool:
        states = self._states(deadline)
        known = {RUNNING, LOCKED, CHECKPOINTED}
        # All of them are restored before any is unlocked, here too.
        for state, verb in ((CHECKPOINTED, "restore"), (LOCKED, "unlock")):
            if not set(states.values()) <= known:
                return False
            known.discard(state)
            if pids := [pid for pid, now in states.items() if now == state]:
                if any((pid, verb) in self._refused for pid in pids):
                    return False
                self.call(verb, pids, deadline.reserve(0.5))
                states = self._states(deadline)
        return set(states.values()) == {RUNNING}

    def _states(self, deadline: Deadline) -> dict[int, str | None]:
        """Read every state, with a new helper where the old one hung or died; ``None`` without an answer."""
        for pid in self._taking_part:
            if not self._helpers[pid].usable:
                self._helpers[pid].close()
                self._helpers[pid] = Helper(pid, self._driver)
        helpers = self._mine()
        for helper in helpers.values():
            try:
                helper.ready(deadline.sooner(STATE_SECONDS))
            except (EnvironmentFailure, DeadlineExceeded):
                helper.kill()
        replies = call_all(helpers, "state", deadline.sooner(STATE_SECONDS))
        return {pid: reply.state if reply.code == 0 else None for pid, reply in replies.items()}

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


def _maps_cuda(pid: int) -> bool:
    """Whether a process has the driver's library loaded; true where that cannot be read.

    A process in whose mounts the library was replaced meanwhile has it as `` (deleted)``.
    """
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:  # noqa: PTH123 - read line by line
            return any(b"/libcuda.so" in line for line in maps)
    except FileNotFoundError:
        return False
    except OSError:
        return True
