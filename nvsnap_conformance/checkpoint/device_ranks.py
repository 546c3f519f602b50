"""Processes with GPU state for the cases of the device layer, and one observed cycle over them.

Real ones on a GPU, or stand-ins, whose "GPU memory" is a file that the stand-in driver takes away and brings
back. The driver's own log of its calls is what their order is judged by.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from nvsnap_conformance.checkpoint import device_rank, stand_in_driver
from nvsnap_conformance.checkpoint.device_failure import DeviceFailure
from nvsnap_conformance.checkpoint.device_process import START_SECONDS, DeviceProcess
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import EnvironmentFailure, NvsnapError
from nvsnap_conformance.gpus import VISIBLE, Lease, leased, memory_in_use
from nvsnap_conformance.held_folder import DEVICE, new_folder
from nvsnap_conformance.lifecycle.residue import RUN_ID, run_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from nvsnap_conformance.checkpoint.protocol import CheckpointResult, DeviceCheckpointer
    from nvsnap_conformance.processes import ProcessId

GPU, GPUS, STAND_IN = "gpu", "gpus", "stand-in"
MEMORY, EVERYTHING = "memory", "everything"
OLD, NEW = "old", "new"
VERBS = ("lock", "checkpoint", "restore", "unlock")

STAND_IN_DEVICES = ("00" * 15 + "01", "00" * 15 + "02")
"""UUIDs of the stand-in's devices, as 32 hexadecimal digits."""

VERB_SECONDS = 60.0

FAULT_SECONDS = 4.0
"""Deadline of a verb in which a call hangs: long enough for the helpers' start on a machine under load."""


@dataclass
class DeviceObservation:
    """What one cycle of a device checkpointer over :class:`DeviceRanks` left to see.

    ``order`` are the calls (pid, verb, began, ended) as the driver saw them, ``memory`` the bytes on the
    device at the moments ``before``, ``between`` (after checkpoint) and ``after``. ``states``, ``alive``,
    ``answers`` and ``helpers`` (helper processes left over) were read once all was over. ``error`` is what
    the checkpointer raised, at ``at``. ``shared_again`` says of memory from before the cycle (``old``) and of
    ``new`` memory why it cannot be shared after it, empty where it can.
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
    shared_again: dict[str, str] = field(default_factory=dict)
    helpers: int = 0
    error: NvsnapError | None = None
    at: str | None = None

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls that the checkpointer tells of, those of a roll-back included."""
        if self.failure is not None:
            return list(self.failure.calls)
        return [call for result in self.results.values() for call in result.details["calls"]]

    @property
    def failure(self) -> DeviceFailure | None:
        """The error, where it is one of the device layer's own."""
        return self.error if isinstance(self.error, DeviceFailure) else None


class DeviceRanks:
    """``count`` processes that hold GPU memory, and one without a context. Use as a context.

    ``kind`` is ``gpu`` (all on one), ``gpus`` (each on one of its own) or ``stand-in``; for the latter
    ``faults`` maps (rank, verb) to a fault of
    :mod:`nvsnap_conformance.checkpoint.stand_in_driver`. On a GPU each rank holds what ``holding`` says, a
    kind of :mod:`nvsnap_conformance.checkpoint.device_held` for all or one for each; on the stand-in all
    kinds are alike. The first two have a socket between them, for handles.
    """

    def __init__(
        self,
        kind: str,
        count: int = 2,
        *,
        faults: Mapping[tuple[int, str], str] | None = None,
        holding: str | Sequence[str] = MEMORY,
    ) -> None:
        self.kind = kind
        self._count = count
        self._faults = dict(faults or {})
        self._holding = [holding] * count if isinstance(holding, str) else list(holding)
        self._undo = ExitStack()
        self._processes: list[DeviceProcess] = []
        self._others: list[DeviceProcess] = []
        self._environment: dict[str, str] = {}
        self._identities: list[ProcessId] = []
        self._folder = Path()
        self._lock = -1
        self._lease: Lease | None = None

    @property
    def driver(self) -> Path | None:
        """The stand-in driver's file, ``None`` on GPUs."""
        return Path(stand_in_driver.__file__) if self.kind == STAND_IN else None

    @property
    def real(self) -> bool:
        """Whether the processes hold memory of GPUs."""
        return self.kind != STAND_IN

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
        self._folder, lock = new_folder(DEVICE)
        self._undo.callback(lock.close)
        self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
        # The ranks inherit it: the folder is theirs too, for as long as one lives.
        self._lock = lock.fileno()
        environment = os.environ | {RUN_ID: run_id()}
        if self.real:
            count = self._count if self.kind == GPUS else 1
            self._lease = self._undo.enter_context(leased(count, Deadline.after(START_SECONDS)))
            environment |= {VISIBLE: self._lease.setting, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        else:
            environment[stand_in_driver.FOLDER] = str(self._folder)
            # The checkpointer's helpers inherit it: it stands for where the driver is.
            before = os.environ.get(stand_in_driver.FOLDER)
            os.environ[stand_in_driver.FOLDER] = str(self._folder)
            self._undo.callback(_put_back, stand_in_driver.FOLDER, before)
        self._undo.callback(self._end)
        self._environment = environment
        ends = [self._undo.enter_context(end) for end in socket.socketpair()]
        for rank in range(self._count):
            self._processes.append(self._launch(rank, self._holding[rank], ends[rank] if rank < 2 else None))
        self._processes.append(self._launch(self._count, None, None))
        self._identities = [process.ready() for process in self._processes]
        faults = {f"{self.pids[rank]}:{verb}": fault for (rank, verb), fault in self._faults.items()}
        (self._folder / "faults.json").write_text(json.dumps(faults))
        (self._folder / "devices.json").write_text(json.dumps(STAND_IN_DEVICES))
        for rank, pid in enumerate(self.pids):
            # Each sees all of them, its own first.
            seen = STAND_IN_DEVICES[rank % 2 :] + STAND_IN_DEVICES[: rank % 2]
            (self._folder / f"{pid}.devices").write_text(json.dumps(seen))
            (self._folder / f"{pid}.bus").write_text(stand_in_driver.bus_id(seen[0]))

    def _launch(self, rank: int, holding: str | None, end: socket.socket | None) -> DeviceProcess:
        """Start a process that holds something, or nothing of a device at all (``None``)."""
        where = "none" if holding is None else "gpu" if self.real else "stand-in"
        number = rank % len(self._lease.gpus) if self._lease else 0
        descriptor = -1 if end is None else end.fileno()
        words = [where, str(number), json.dumps(sys.path), holding or MEMORY, str(descriptor)]
        return DeviceProcess(
            [sys.executable, "-I", "-S", device_rank.__file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            pass_fds=(self._lock,) if end is None else (self._lock, descriptor),
        )

    def _end(self) -> None:
        for process in [*self._processes, *self._others]:
            process.end()

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
            return memory_in_use(self._lease.gpus)
        return sum(path.stat().st_size for path in self._folder.glob("*.memory"))

    def share(self) -> None:
        """Have rank 1 map what rank 0 shares; raise :class:`EnvironmentFailure` where that cannot be."""
        self._told(0, "share")
        self._told(1, "take")

    def share_again(self, seen: DeviceObservation) -> None:
        """After a cycle share the memory from before it, and then new memory; see ``shared_again``."""
        for what in (OLD, NEW):
            try:
                if what == NEW:
                    self._told(0, "renew")
                self.share()
                wrong = {answer for answer in self.answers().values() if answer != "right"}
                seen.shared_again[what] = ", ".join(sorted(wrong))
                self.close_shared()
            except EnvironmentFailure as failure:
                seen.shared_again[what] = failure.what

    def close_shared(self) -> None:
        """Have rank 1 close it again."""
        self._told(1, "drop")

    def devices(self) -> list[str]:
        """Return the device of each rank as the rank sees it: UUID (32 hexadecimal digits) and bus id."""
        return [process.ask("where") for process in self._processes[: self._count]]

    def answers(self) -> dict[int, str]:
        """Ask every rank whether what it holds works as it did: ``right``, or what is wrong."""
        return {process.pid: process.ask("look") for process in self._processes[: self._count]}

    def fill(self) -> None:
        """Take all memory that is left on the GPUs, by other processes, until the ranks are ended.

        A stand-in has none to take: a fault is in its place.
        """
        if self._lease is None:
            return
        for number in range(len(self._lease.gpus)):
            self._others.append(self._launch(number, EVERYTHING, None))
        for process in self._others:
            process.ready()

    def _told(self, rank: int, command: str) -> None:
        answer = self._processes[rank].ask(command)
        if answer != "done":
            raise EnvironmentFailure(
                f"rank {rank} cannot {command} memory: {answer}",
                cause="the driver or the container does not let processes share memory",
                next_step="see `nvsnap-conformance doctor` for peer access and namespaces",
            )

    def cycle(
        self,
        checkpointer: DeviceCheckpointer,
        *,
        while_away: Callable[[], None] = lambda: None,
        verb_seconds: float = VERB_SECONDS,
    ) -> DeviceObservation:
        """Take all processes through one cycle and look at what came of it; raises nothing of the cycle's.

        ``while_away`` is called after the checkpoint; ``verb_seconds`` bounds a verb, in seconds.
        """
        seen = DeviceObservation(self.pids, self.context_free, real=self.real)
        hanging = {verb for (_, verb), fault in self._faults.items() if fault == "HANG"}
        seen.memory["before"] = self.memory()
        for verb in VERBS:
            deadline = Deadline.after(FAULT_SECONDS if verb in hanging else verb_seconds)
            try:
                seen.results[verb] = getattr(checkpointer, verb)([*self.pids, *self.context_free], deadline)
            except NvsnapError as error:
                seen.error, seen.at = error, verb
                break
            if verb == "checkpoint":
                seen.memory["between"] = self.memory()
                while_away()
        seen.memory["after"] = self.memory()
        self._look(seen)
        return seen

    def _look(self, seen: DeviceObservation) -> None:
        seen.helpers = sum(
            "cuda_driver_helper" in " ".join(_words(child)) for child in psutil.Process().children()
        )
        for process, identity in zip(self._processes, self._identities, strict=True):
            seen.alive[process.pid] = identity.alive
        if self.real:
            seen.order = seen.calls
            if seen.failure is not None:
                seen.states = _driver_states([pid for pid in self.pids if seen.alive[pid]])
        else:
            log = self._folder / "calls.jsonl"
            lines = log.read_text().splitlines() if log.exists() else []
            seen.order = [call for call in map(json.loads, lines) if call["ended"] is not None]
            prefix = "CU_PROCESS_STATE_"
            seen.states = {
                pid: (self._folder / f"{pid}.state").read_text().removeprefix(prefix) for pid in self.pids
            }
        if seen.failure is None or all(seen.alive.values()):
            seen.answers = {pid: told for pid, told in self.answers().items() if seen.alive[pid]}


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _driver_states(pids: list[int]) -> dict[int, str]:
    """Return the states that the driver gives of processes, by helpers of their own."""
    from nvsnap_conformance.checkpoint.cuda_driver import CudaDriverCheckpointer  # noqa: PLC0415 - on GPUs only

    asked = CudaDriverCheckpointer()
    try:
        return asked.survey(pids, Deadline.after(START_SECONDS))[0]
    finally:
        asked.drop()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
