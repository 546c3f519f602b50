"""Checkpointing by programs: a command line for each verb, from the target file.

For a vendor's agent, a snapshot controller's client, or NVIDIA's ``cuda-checkpoint``. In each word ``{pid}``
stands for a process (of the device layer: each; of the host layer: the engine's first) and ``{folder}`` for
the checkpoint's folder. A program that does not end in time is killed with its process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from nvsnap_conformance.checkpoint.device import AFTER, RUNNING, Reply, RoundsCheckpointer
from nvsnap_conformance.checkpoint.freeze import read_states
from nvsnap_conformance.checkpoint.protocol import CheckpointResult
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.lifecycle.residue import RUN_ID, run_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from nvsnap_conformance.engines.process import EngineProcess

STATE_SECONDS = 10.0
_TAIL = 800


class Program:
    """One run of a program with both of its outputs kept."""

    def __init__(self, words: Sequence[str], **values: object) -> None:
        """Start ``words``, in each of which ``{name}`` is replaced by the value of that name.

        Raises :class:`EnvironmentFailure` where it cannot be started.
        """
        self.words = [_filled(word, values) for word in words]
        self.began = time.monotonic()
        self.ended = self.began
        self.hung = False
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                start_new_session=True,
                env=os.environ | {RUN_ID: run_id()},
            )
        except OSError as error:
            self.close()
            raise EnvironmentFailure(
                f"the checkpoint command {' '.join(self.words)!r} cannot be started: {error.strerror}",
                next_step="see [checkpoint.command] in the target file, and PATH",
            ) from error

    def wait(self, deadline: Deadline) -> int | None:
        """Return the exit code (negative: the signal); ``None`` at the deadline, when it was killed."""
        try:
            code = wait_for("the program's end", self._ended, deadline, interval=0.02)[0]
        except DeadlineExceeded:
            self.hung, code = True, None
        self.ended = time.monotonic()
        if self.hung:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2.0)
        return code

    def _ended(self) -> tuple[int] | None:
        code = self._process.poll()
        return None if code is None else (code,)

    def output(self) -> str:
        """Return what it wrote to stdout."""
        return _read(self._output)

    def errors(self) -> str:
        """Return the end of what it wrote to stderr."""
        return _read(self._errors)[-_TAIL:].strip()

    def close(self) -> None:
        """Free what is kept."""
        self._output.close()
        self._errors.close()


class CommandDevice(RoundsCheckpointer):
    """The device layer by programs: ``lock``, ``checkpoint``, ``restore``, ``unlock``, and perhaps ``state``.

    ``state`` prints a process's state as its last word (``running``, ``locked``, ``checkpointed``), as
    ``cuda-checkpoint --get-state`` does, and fails for a process without GPU state. Without it every process
    that is given takes part, and a verb's exit code has to be believed.
    """

    name = "command"
    kind = "COMMAND"

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self._commands = commands
        self._believed: dict[int, str] = {}

    def survey(self, pids: Sequence[int], deadline: Deadline) -> tuple[dict[int, str], dict[int, str]]:
        """Ask for the state of every process."""
        if "state" not in self._commands:
            self._believed = dict.fromkeys(pids, RUNNING)
            return dict(self._believed), {}
        states: dict[int, str] = {}
        without: dict[int, str] = {}
        for pid, (state, why) in self._ask_states(pids, deadline).items():
            if state is None:
                without[pid] = why
            else:
                states[pid] = state
        return states, without

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Run the verb's program for all ``pids`` at once, then read the states."""
        programs = _start_all(self._commands[verb], pids)
        replies: dict[int, Reply] = {}
        try:
            for pid, program in programs.items():
                code = program.wait(deadline)
                if code == 0 and pid in self._believed:
                    self._believed[pid] = AFTER[verb]
                said = program.errors() or program.output()[-_TAIL:].strip()
                replies[pid] = Reply(
                    pid,
                    verb,
                    program.began,
                    program.ended,
                    result="exit code 0" if code == 0 else f"exit code {code}: {said}",
                    code=code,
                    hung=program.hung,
                )
        finally:
            for program in programs.values():
                program.wait(Deadline.after(0.0))
                program.close()
        states = self.read_states(pids, Deadline.after(STATE_SECONDS))
        return {pid: Reply(**{**reply.as_json(), "state": states[pid]}) for pid, reply in replies.items()}

    def read_states(self, pids: Sequence[int], deadline: Deadline) -> dict[int, str | None]:
        """Ask for the states, or say what the exit codes so far lead to."""
        if "state" not in self._commands:
            return {pid: self._believed[pid] for pid in pids}
        return {pid: state for pid, (state, _) in self._ask_states(pids, deadline).items()}

    def drop(self) -> None:
        """Forget what was believed."""
        self._believed = {}

    def _ask_states(self, pids: Sequence[int], deadline: Deadline) -> dict[int, tuple[str | None, str]]:
        programs = _start_all(self._commands["state"], pids)
        told: dict[int, tuple[str | None, str]] = {}
        limit = deadline.sooner(STATE_SECONDS)
        try:
            for pid, program in programs.items():
                code = program.wait(limit)
                words = program.output().split()
                if code == 0 and words:
                    told[pid] = words[-1].upper(), ""
                else:
                    told[pid] = None, f"exit code {code}: {program.errors()}"
        finally:
            for program in programs.values():
                program.wait(Deadline.after(0.0))
                program.close()
        return told


class CommandHost:
    """The host layer by programs: ``dump`` and ``load``.

    ``replaces_processes`` says whether load makes new processes; the target says so.
    """

    name = "command"

    def __init__(self, commands: Mapping[str, Sequence[str]], *, replaces_processes: bool) -> None:
        self._commands = commands
        self.replaces_processes = replaces_processes

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Run the program of ``dump``; raise :class:`EnvironmentFailure` or :class:`DeadlineExceeded`."""
        folder.mkdir(parents=True, exist_ok=True)
        members = process.tree()
        seconds = self._run("dump", process, folder, deadline)
        return CheckpointResult("dump", seconds, read_states(members))

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Run the program of ``load``; as :meth:`dump`."""
        seconds = self._run("load", process, folder, deadline)
        return CheckpointResult("load", seconds, read_states(process.tree()))

    def _run(self, verb: str, process: EngineProcess, folder: Path, deadline: Deadline) -> float:
        program = Program(self._commands[verb], pid=process.root.pid, folder=folder)
        try:
            code = program.wait(deadline)
            name = " ".join(program.words)
            if code is None:
                raise DeadlineExceeded(
                    f"the {verb} command did not end within {deadline.budget:.0f} s and was killed: {name}",
                    cause=program.errors() or "it says nothing on stderr",
                    next_step="run it by hand on an engine that is up",
                )
            if code != 0:
                raise EnvironmentFailure(
                    f"the {verb} command ended with {code}: {name}",
                    cause=program.errors() or "it says nothing on stderr",
                    next_step="run it by hand on an engine that is up",
                )
            return program.ended - program.began
        finally:
            program.close()


def _start_all(words: Sequence[str], pids: Sequence[int]) -> dict[int, Program]:
    programs: dict[int, Program] = {}
    try:
        for pid in pids:
            programs[pid] = Program(words, pid=pid)
    except BaseException:
        for program in programs.values():
            program.wait(Deadline.after(0.0))
            program.close()
        raise
    return programs


def _filled(word: str, values: Mapping[str, object]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
