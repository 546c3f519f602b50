"""Known-bad drivers of the device layer: what the clauses on it must catch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.cuda_driver import CudaDriverCheckpointer
from nvsnap_conformance.checkpoint.device import AFTER, RUNNING, Reply
from nvsnap_conformance.checkpoint.device_failure import DeviceFailure, Fate
from nvsnap_conformance.checkpoint.device_held_stand_in import UNSHARED
from nvsnap_conformance.checkpoint.device_ranks import STAND_IN_DEVICES
from nvsnap_conformance.checkpoint.protocol import CheckpointResult
from nvsnap_conformance.checkpoint.stand_in_driver import FOLDER
from nvsnap_conformance.deadline import Deadline, wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence


class CheckpointsBeforeAllAreLocked(CudaDriverCheckpointer):
    """Takes one process after the other through lock and checkpoint."""

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Lock and checkpoint each process at ``lock``; answer ``checkpoint`` from what was done then."""
        if verb == "lock":
            locked: dict[int, Reply] = {}
            for pid in pids:
                locked |= super().make_calls("lock", [pid], deadline)
                super().make_calls("checkpoint", [pid], deadline)
            return locked
        if verb == "checkpoint":
            done = super().make_calls("state", pids, deadline)
            return {pid: replace(reply, verb=verb) for pid, reply in done.items()}
        return super().make_calls(verb, pids, deadline)


class UnlocksBeforeAllAreRestored(CudaDriverCheckpointer):
    """Lets each process run on as soon as it is restored itself."""

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Restore and unlock each process at ``restore``; answer ``unlock`` from what was done then."""
        if verb == "restore":
            restored: dict[int, Reply] = {}
            for pid in pids:
                restored |= super().make_calls("restore", [pid], deadline)
                super().make_calls("unlock", [pid], deadline)
            return restored
        if verb == "unlock":
            done = super().make_calls("state", pids, deadline)
            return {pid: replace(reply, verb=verb) for pid, reply in done.items()}
        return super().make_calls(verb, pids, deadline)


class OnlyLocks(CudaDriverCheckpointer):
    """Leaves the memory on the device, and reports a checkpoint and a restore."""

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Make no call for ``checkpoint`` and ``restore``."""
        if verb in ("checkpoint", "restore"):
            done = super().make_calls("state", pids, deadline)
            return {pid: replace(reply, verb=verb, state=AFTER[verb]) for pid, reply in done.items()}
        return super().make_calls(verb, pids, deadline)


class CarriesPlainMemoryOnly(CudaDriverCheckpointer):
    """Brings back what was allocated plainly, and nothing else that a process held."""

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Lose the rest at ``restore``; only the stand-in's can be lost from outside."""
        replies = super().make_calls(verb, pids, deadline)
        folder = os.environ.get(FOLDER)
        if verb == "restore" and folder is not None:
            for pid in pids:
                (Path(folder) / f"{pid}.extra").unlink()
        return replies


class OverridesARefusal(CudaDriverCheckpointer):
    """Goes on after a checkpoint that the driver refused, as a script without a look at exit codes does."""

    def problem(self, verb: str, reply: Reply) -> tuple[str, str] | None:
        """See nothing wrong with a checkpoint."""
        return None if verb == "checkpoint" else super().problem(verb, reply)


class MovesHalf(CudaDriverCheckpointer):
    """Moves whom it can, and lets the rest run on where it was, as if the whole move had been undone."""

    def may_repeat(self, verb: str) -> bool:
        """Restore those that could not be moved, whoever was."""
        return verb == "restore"

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Move the first process by a map that holds for it, whatever map was asked for."""
        if verb != "restore" or not self._moves or self._undoing or len(pids) < 2:
            return super().make_calls(verb, pids, deadline)
        asked, known = self._moves, list(STAND_IN_DEVICES)
        self._moves = dict(zip(known, reversed(known), strict=True))
        first = super().make_calls(verb, pids[:1], deadline)
        self._moves = asked
        return first | super().make_calls(verb, pids[1:], deadline)


class KeepsTheBusId(CudaDriverCheckpointer):
    """Moves a process to another device, and lets it see the old one's bus id."""

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Put the old one back after the restore; only the stand-in's can be set from outside."""
        folder = os.environ.get(FOLDER)
        files = [Path(folder) / f"{pid}.bus" for pid in pids] if folder and verb == "restore" else []
        before = [file.read_text() for file in files]
        replies = super().make_calls(verb, pids, deadline)
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
        return replies


class SpoilsSharing(CudaDriverCheckpointer):
    """Brings everything back, in processes that can share no memory any more."""

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """See to it at ``unlock``; only the stand-in's can be kept from it from outside."""
        folder = os.environ.get(FOLDER)
        for pid in pids if folder and verb == "unlock" else ():
            (Path(folder or "") / f"{pid}.{UNSHARED}").touch()
        return super().make_calls(verb, pids, deadline)


class ForgetsWhereTo(CudaDriverCheckpointer):
    """Restores every process onto the device that it was on, whatever was asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"moves": None}))


class TrustsTheReturnCode(CudaDriverCheckpointer):
    """Takes a call that answers success for one, whatever the state."""

    def problem(self, verb: str, reply: Reply) -> tuple[str, str] | None:
        """Look at the return code only."""
        return super().problem(verb, replace(reply, state=AFTER[verb]) if reply.code == 0 else reply)


class TellsNoName(CudaDriverCheckpointer):
    """Fails with one error for everything, as a script does that passes an exit code on."""

    def _failed(self, verb: str, what: str, code: str) -> DeviceFailure:
        failure = super()._failed(verb, what, code)
        return DeviceFailure("the checkpoint failed", signature="CUDA:999@lock", fate=failure.fate)


class LeavesThemLocked(CudaDriverCheckpointer):
    """Fails and leaves every process as it is, without a word of it."""

    def roll_back(self) -> Fate:
        """Do nothing and claim that the engine runs."""
        return Fate.RUNNING


class KillsTheFailedOnly(CudaDriverCheckpointer):
    """Ends the process that failed and keeps the rest of its engine."""

    def kill(self) -> Fate:
        """Kill those on which a call has failed, and claim that all are gone."""
        failed = {pid for pid, _ in self._failed_calls}
        for process in self._given:
            if process.pid in failed:
                process.send(SIGKILL)
        gone = [process for process in self._given if process.pid in failed]
        wait_for(
            "the failed processes' end",
            lambda: not any(process.alive for process in gone),
            Deadline.after(10.0),
            interval=0.02,
        )
        return Fate.KILLED


class HidesAHang(CudaDriverCheckpointer):
    """Gives up on a call that does not return, and goes on as if it had succeeded."""

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Answer for calls that hang."""
        return {
            pid: replace(reply, hung=False, result="CUDA_SUCCESS", code=0, state=AFTER[verb])
            if reply.hung
            else reply
            for pid, reply in super().make_calls(verb, pids, deadline).items()
        }

    def lock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Lock; what comes after a hang is made up as well."""
        return self._pretend("lock", pids, deadline)

    def checkpoint(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Checkpoint; as :meth:`lock`."""
        return self._pretend("checkpoint", pids, deadline)

    def restore(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Restore; as :meth:`lock`."""
        return self._pretend("restore", pids, deadline)

    def unlock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Unlock; as :meth:`lock`."""
        return self._pretend("unlock", pids, deadline)

    def _pretend(self, verb: str, pids: list[int], deadline: Deadline) -> CheckpointResult:
        if any(not helper.usable for helper in self._helpers.values()):
            return CheckpointResult(verb, 0.0, (), {"calls": [], "states": {}})
        result: CheckpointResult = getattr(super(), verb)(pids, deadline)
        return result


class LocksWhateverItIsGiven(CudaDriverCheckpointer):
    """Asks nobody whether a process has a context."""

    def survey(self, pids: Sequence[int], deadline: Deadline) -> tuple[dict[int, str], dict[int, str]]:
        """Take all of them, with a helper for each."""
        _, without = super().survey(pids, deadline)
        self.read_states_anew(list(without))
        return dict.fromkeys(pids, RUNNING), {}

    def read_states_anew(self, pids: Sequence[int]) -> None:
        """Start helpers for processes that were left out."""
        from nvsnap_conformance.checkpoint.cuda_driver_calls import Helper  # noqa: PLC0415

        for pid in pids:
            self._helpers[pid] = Helper(pid, self._driver)
            self._helpers[pid].ready(Deadline.after(20.0))

    def _without_late(self, replies: dict[int, Reply], _without: dict[int, Any]) -> dict[int, Reply]:
        return replies
