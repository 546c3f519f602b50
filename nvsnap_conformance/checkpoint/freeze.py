"""Checkpointing without an image: every process of the engine is stopped, and continued later.

It takes nothing away, so it needs no rights and no tool, and still proves what has to hold at the moment
of a dump: that no thread of the engine runs, and that the engine is whole afterwards.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import TYPE_CHECKING

from nvsnap_conformance.checkpoint.protocol import CheckpointResult, ProcessState
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.linux import stat_fields
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.outcomes import Finding, finding
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nvsnap_conformance.engines.process import EngineProcess

MANIFEST = "freeze.json"
"""The file in the checkpoint's folder that lists who was stopped."""

ATTEMPT_SECONDS = 1.0
"""How long one attempt may take before everything is continued and stopped again, in seconds. A process
stopped between vfork and exec keeps its parent in an uninterruptible wait, where no signal stops it."""

_GONE = "X"
"""The kernel's letter for a dead process; also used here for one that has vanished."""


def read_states(processes: Iterable[ProcessId]) -> tuple[ProcessState, ...]:
    """Read the state of each process and of each of its threads from /proc.

    One that is gone has state ``X`` and no threads, which never counts as stopped.
    """
    return tuple(_read_state(process) for process in processes)


def _read_state(process: ProcessId) -> ProcessState:
    threads = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{process.pid}/task").iterdir():
            fields = stat_fields(process.pid, int(entry.name))
            if fields is not None:
                threads[int(entry.name)] = fields[0]
    # Looked at last: what was read above is this process's only if it is still the same one.
    fields = stat_fields(process.pid)
    if fields is None or process.process() is None:
        return ProcessState(process, _GONE)
    return ProcessState(process, fields[0], threads)


def check_all_stopped(states: Sequence[ProcessState]) -> list[Finding]:
    """Return a finding for each process that has a thread which is not stopped, or if there are none."""
    if not states:
        return [finding("no process was observed at the checkpoint", "FREEZE:NOT_STOPPED@nothing-observed")]
    findings = []
    for state in states:
        if not state.stopped:
            running = {thread: letter for thread, letter in state.threads.items() if letter not in "Tt"}
            what = f"threads {running} are not stopped" if running else "it is gone"
            findings.append(
                finding(
                    f"process {state.process.pid} at the checkpoint (state {state.state}): {what}",
                    "FREEZE:NOT_STOPPED",
                    pid=state.process.pid,
                    threads=state.threads,
                )
            )
    return findings


class FreezeCheckpointer:
    """SIGSTOP for a dump, SIGCONT for a load, both verified thread by thread."""

    name = "freeze"
    replaces_processes = False

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Stop the whole tree, children included that appear meanwhile; note in ``folder`` who it was.

        Raises :class:`EnvironmentFailure` for a tree that is empty or has stopped processes already, and
        :class:`DeadlineExceeded` where it cannot be stopped in time; every process runs again then.
        """
        start = time.monotonic()
        members = process.tree()
        already = [state.process.pid for state in read_states(members) if state.stopped]
        if not members or already:
            raise EnvironmentFailure(
                "cannot freeze the engine",
                cause=f"processes {already} are stopped already" if already else "it has no process",
                next_step="load an earlier checkpoint first" if already else "see the engine's log",
            )
        try:
            states, details = _stop_tree(process, deadline)
            folder.mkdir(parents=True, exist_ok=True)
            entries = [[state.process.pid, state.process.create_time] for state in states]
            (folder / MANIFEST).write_text(json.dumps({"processes": entries}))
        except BaseException:
            _continue_all(process.tree())
            raise
        return CheckpointResult("dump", time.monotonic() - start, states, details)

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Continue every process that was stopped into ``folder``, and see that all of them run.

        Raises :class:`UsageError` for a folder without a freeze, :class:`EnvironmentFailure` where a
        process died meanwhile (the others run), :class:`DeadlineExceeded` where one stays stopped.
        """
        start = time.monotonic()
        try:
            entries = json.loads((folder / MANIFEST).read_text())["processes"]
            stopped = [ProcessId(int(pid), float(create_time)) for pid, create_time in entries]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{folder} holds no frozen engine", cause=str(error), next_step="dump into it first"
            ) from error
        _continue_all(stopped)
        dead = [member.pid for member in stopped if not member.alive]
        if dead:
            raise EnvironmentFailure(
                f"processes {dead} died while the engine was frozen",
                cause="they were killed from outside, or by the kernel for memory",
                next_step=f"see the engine's log: {process.log_path}",
            )

        def all_run() -> tuple[ProcessState, ...] | None:
            states = read_states(stopped)
            return None if any(letter == "T" for s in states for letter in s.threads.values()) else states

        states = wait_for("every thread of the engine to run again", all_run, deadline, interval=0.005)
        return CheckpointResult("load", time.monotonic() - start, states)


def _stop_tree(process: EngineProcess, deadline: Deadline) -> tuple[tuple[ProcessState, ...], dict[str, int]]:
    """Stop the tree; return the states and the numbers of attempts and scans that it took."""
    scans = attempts = 0
    sent: set[ProcessId] = set()

    def settled() -> tuple[ProcessState, ...] | None:
        nonlocal scans
        scans += 1
        members = process.tree()
        new = [member for member in members if member not in sent]
        for member in new:
            member.send(SIGSTOP)
        sent.update(new)
        states = read_states(members)
        if new or not states or not all(state.stopped for state in states):
            return None
        # Looked at again once all of them are stopped, and so can make no child any more.
        return states if set(process.tree()) == set(members) else None

    while True:
        attempts += 1
        try:
            states = wait_for(
                "every thread of the engine to stop",
                settled,
                deadline.sooner(ATTEMPT_SECONDS),
                interval=0.005,
            )
        except DeadlineExceeded:
            if deadline.expired:
                raise _not_stopped(process, deadline) from None
            _continue_all(process.tree())
            sent.clear()
        else:
            return states, {"attempts": attempts, "scans": scans}


def _continue_all(members: Sequence[ProcessId]) -> None:
    for member in members:
        member.send(SIGCONT)


def _not_stopped(process: EngineProcess, deadline: Deadline) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"cannot stop every thread of the engine within {deadline.budget:.1f} s; it runs again",
        cause="a process is continued by somebody else, starts children without an end, or waits in the "
        f"kernel (state D): {[(s.process.pid, s.state) for s in read_states(process.tree())]}",
        next_step="see who sends SIGCONT, and `ps axo pid,stat,wchan:30,comm`",
    )
