"""Processes with GPU state for the cases of the device layer, and one observed cycle over them.

Real ones on a GPU, or stand-ins, whose "GPU memory" is a file that the stand-in driver takes away and brings
back. The driver's own log of its calls is what their order is judged by.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from nvsnap_conformance.checkpoint import device_rank, stand_in_driver
from nvsnap_conformance.checkpoint.device_failure import DeviceFailure
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, NvsnapError
from nvsnap_conformance.gpus import VISIBLE, Lease, Nvml, count_visible, leased
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from nvsnap_conformance.checkpoint.protocol import CheckpointResult, DeviceCheckpointer

GPU, STAND_IN = "gpu", "stand-in"
VERBS = ("lock", "checkpoint", "restore", "unlock")

START_SECONDS = 60.0
ANSWER_SECONDS = 10.0
VERB_SECONDS = 60.0

FAULT_SECONDS = 4.0
"""Deadline of a verb in which a call hangs: long enough for the helpers' start on a machine under load."""


@dataclass
class DeviceObservation:
    """What one cycle of a device checkpointer over :class:`DeviceRanks` left to see.

    ``order`` are the calls (pid, verb, began, ended) as the driver saw them, ``memory`` the bytes on the
    device at the moments ``before``, ``between`` (after checkpoint) and ``after``. ``states``, ``alive``,
    ``answers`` and ``helpers`` (helper processes left over) were read once all was over. ``error`` is what
    the checkpointer raised, at ``at``.
    """

    pids: list[int]
    context_free: list[int]
    real: bool
    results: dict[str, CheckpointResult] = field(default_factory=dict)
    order: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    alive: dict[int, bool] = field(default_factory=dict)
    answers: dict[int, str] = field(default_factory=dict)
    helpers: int = 0
    error: NvsnapError | None = None
    at: str | None = None

    @property
    def failure(self) -> DeviceFailure | None:
        """The error, where it is one of the device layer's own."""
        return self.error if isinstance(self.error, DeviceFailure) else None


class DeviceRanks:
    """``count`` processes that hold GPU memory, and one without a context. Use as a context.

    ``kind`` is ``gpu`` or ``stand-in``; for the latter ``faults`` maps (rank, verb) to a fault of
    :mod:`nvsnap_conformance.checkpoint.stand_in_driver`.
    """

    def __init__(
        self, kind: str, count: int = 2, *, faults: Mapping[tuple[int, str], str] | None = None
    ) -> None:
        self.kind = kind
        self._count = count
        self._faults = dict(faults or {})
        self._undo = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []
        self._identities: list[ProcessId] = []
        self._folder = Path()
        self._lease: Lease | None = None

    @property
    def driver(self) -> Path | None:
        """The stand-in driver's file, ``None`` on a GPU."""
        return None if self.kind == GPU else Path(stand_in_driver.__file__)

    def __enter__(self) -> Self:
        """Start the processes; raise :class:`EnvironmentFailure` where one does not come up."""
        try:
            self._start()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nvsnap-device-"))
        self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
        environment = dict(os.environ)
        if self.kind == GPU:
            self._lease = self._undo.enter_context(
                # Two processes share one where there is no more.
                leased(min(self._count, max(1, count_visible())), Deadline.after(START_SECONDS))
            )
            environment |= {VISIBLE: self._lease.setting, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        else:
            environment[stand_in_driver.FOLDER] = str(self._folder)
            # The checkpointer's helpers inherit it: it stands for where the driver is.
            before = os.environ.get(stand_in_driver.FOLDER)
            os.environ[stand_in_driver.FOLDER] = str(self._folder)
            self._undo.callback(_put_back, stand_in_driver.FOLDER, before)
        self._undo.callback(self._end)
        for rank in range(self._count + 1):
            kind = self.kind if rank < self._count else "none"
            number = rank % len(self._lease.gpus) if self._lease else 0
            self._processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        device_rank.__file__,
                        kind,
                        str(number),
                        json.dumps(sys.path),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
        deadline = Deadline.after(START_SECONDS)
        for process in self._processes:
            if _line(process, deadline) != "ready":
                process.kill()
                raise EnvironmentFailure(
                    "a process with GPU memory did not come up",
                    cause=process.communicate()[1].strip()[-500:],
                    next_step="see `nvidia-smi`, and whether cuda-bindings is installed beside the suite",
                )
            identity = ProcessId.of(process.pid)
            assert identity is not None  # a child of ours that has not been waited for
            self._identities.append(identity)
        faults = {f"{self.pids[rank]}:{verb}": fault for (rank, verb), fault in self._faults.items()}
        (self._folder / "faults.json").write_text(json.dumps(faults))

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    @property
    def pids(self) -> list[int]:
        """The pids of the processes with GPU memory, rank 0 first."""
        return [process.pid for process in self._processes[: self._count]]

    @property
    def context_free(self) -> list[int]:
        """The pids of the others."""
        return [process.pid for process in self._processes[self._count :]]

    def memory(self) -> int:
        """Return the bytes in use on the device now: all of the GPUs', or all stand-ins'."""
        if self._lease is not None:
            with Nvml() as nvml:
                return sum(nvml.use(gpu).used for gpu in self._lease.gpus)
        return sum(path.stat().st_size for path in self._folder.glob("*.memory"))

    def cycle(self, checkpointer: DeviceCheckpointer) -> DeviceObservation:
        """Take all processes through one cycle and look at what came of it; raises nothing of the cycle's."""
        seen = DeviceObservation(self.pids, self.context_free, real=self.kind == GPU)
        hanging = {verb for (_, verb), fault in self._faults.items() if fault == "HANG"}
        seen.memory["before"] = self.memory()
        for verb in VERBS:
            deadline = Deadline.after(FAULT_SECONDS if verb in hanging else VERB_SECONDS)
            try:
                seen.results[verb] = getattr(checkpointer, verb)([*self.pids, *self.context_free], deadline)
            except NvsnapError as error:
                seen.error, seen.at = error, verb
                break
            if verb == "checkpoint":
                seen.memory["between"] = self.memory()
        seen.memory["after"] = self.memory()
        self._look(seen)
        return seen

    def _look(self, seen: DeviceObservation) -> None:
        seen.helpers = sum(
            "cuda_driver_helper" in " ".join(_words(child)) for child in psutil.Process().children()
        )
        for process, identity in zip(self._processes, self._identities, strict=True):
            seen.alive[process.pid] = identity.alive
        if self.kind == GPU:
            seen.order = [call for result in seen.results.values() for call in result.details["calls"]]
        else:
            log = self._folder / "calls.jsonl"
            lines = log.read_text().splitlines() if log.exists() else []
            seen.order = [call for call in map(json.loads, lines) if call["ended"] is not None]
            prefix = "CU_PROCESS_STATE_"
            seen.states = {
                pid: (self._folder / f"{pid}.state").read_text().removeprefix(prefix) for pid in self.pids
            }
        if seen.failure is None or all(seen.alive.values()):
            seen.answers = {p.pid: self._ask(p) for p in self._processes[: self._count] if seen.alive[p.pid]}

    def _ask(self, process: subprocess.Popen[str]) -> str:
        assert process.stdin is not None  # asked for at the start
        try:
            process.stdin.write("look\n")
            process.stdin.flush()
            return _line(process, Deadline.after(ANSWER_SECONDS)) or "died"
        except BrokenPipeError:
            return "died"
        except DeadlineExceeded:
            return "silent"


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _line(process: subprocess.Popen[str], deadline: Deadline) -> str:
    """Return the next line of a process, empty at its end; raise :class:`DeadlineExceeded`."""
    assert process.stdout is not None  # asked for at the start
    readable, _, _ = select.select([process.stdout], [], [], deadline.remaining())
    if not readable:
        raise DeadlineExceeded(f"process {process.pid} says nothing within {deadline.budget:.0f} s")
    return process.stdout.readline().strip()
