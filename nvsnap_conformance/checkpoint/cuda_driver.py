"""The driver's own checkpoint of GPU state, through ``cuCheckpointProcess*`` (driver 570 and later).

Measured on driver 580.159.04: with a live NCCL communicator the *checkpoint* succeeds, the restore answers
CUDA_ERROR_NOT_SUPPORTED, and the processes are lost. So a checkpoint proves nothing before its restore.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import UUID

from nvsnap_conformance.checkpoint.cuda_driver_calls import Helper, call_all
from nvsnap_conformance.checkpoint.device import NOT_INITIALIZED, Reply, RoundsCheckpointer
from nvsnap_conformance.checkpoint.device_failure import HANG, DeviceFailure, Fate
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.gpus import require_driver, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from nvsnap_conformance.deadline import Deadline

STATE_SECONDS = 10.0
"""Allowance for a helper's start and for reading one state. cuInit takes up to 3 s on a host with one GPU."""


class CudaDriverCheckpointer(RoundsCheckpointer):
    """Drives every process with a CUDA context, each through a helper process of its own.

    ``driver`` is a stand-in's file in place of cuda-bindings, for tests. ``moves`` has processes restored
    onto other devices (CUDA 13.0 and later): the UUID of each device that they see, as ``nvidia-smi -L``
    prints it, and the one to restore onto. Where a restore onto other devices fails, the roll-back restores
    onto the old ones.
    """

    name = "cuda-driver"
    kind = "CUDA"

    def __init__(self, *, driver: Path | None = None, moves: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._driver = driver
        self._moves = {_digits(old): _digits(new) for old, new in (moves or {}).items()}
        if len(self._moves) < len(moves or {}):
            raise UsageError(
                f"a map of devices that names one twice: {sorted(moves or {})}",
                next_step="name each GPU once, with or without GPU-",
            )
        self._helpers: dict[int, Helper] = {}

    def survey(self, pids: Sequence[int], deadline: Deadline) -> tuple[dict[int, str], dict[int, str]]:
        """Start a helper for each process and ask the driver for its state.

        Raises :class:`EnvironmentFailure` where cuda-bindings or the driver is not there, the driver's
        version is one that must not be used, or it does not give the state of a process that uses it.
        """
        without: dict[int, str] = {}
        if self._driver is None:
            require_driver(visible().driver)
            without = {pid: "libcuda is not loaded" for pid in pids if not _maps_cuda(pid)}
        with ExitStack() as undo:
            undo.callback(self.drop)
            for pid in pids:
                if pid not in without:
                    self._helpers[pid] = Helper(pid, self._driver)
            limit = deadline.sooner(STATE_SECONDS + len(pids))
            for helper in self._helpers.values():
                helper.ready(limit)
            states: dict[int, str] = {}
            for pid, reply in call_all(self._helpers, "state", deadline.sooner(STATE_SECONDS)).items():
                if reply.code == 0 and reply.state is not None:
                    states[pid] = reply.state
                elif reply.code == NOT_INITIALIZED:
                    without[pid] = reply.result
                elif reply.hung:
                    # No process was touched, so nothing has to be undone.
                    raise DeviceFailure(
                        f"lock failed on process {pid}: the driver does not give its state within "
                        f"{reply.seconds:.1f} s",
                        signature=f"{self.kind}:{HANG}@lock",
                        fate=Fate.RUNNING,
                        cause="a call of the driver on that process never returns",
                        next_step="see the kernel's log, and what else uses the GPU",
                    )
                else:
                    raise EnvironmentFailure(
                        f"the driver does not give the state of process {pid}: {reply.summary}",
                        cause="the process has libcuda loaded, but the driver cannot reach it: another user, "
                        "a pid of another namespace, or a driver older than 570",
                        next_step="run the suite as the engine's user, in the container that starts it",
                    )
            undo.pop_all()
        for pid in set(self._helpers) - set(states):
            self._helpers.pop(pid).close()
        return states, without

    def make_calls(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[int, Reply]:
        """Make one call on all ``pids`` at once; a helper that does not answer in time is killed."""
        moves = self._moves if verb == "restore" and not self._undoing else None
        return call_all({pid: self._helpers[pid] for pid in pids}, verb, deadline, moves)

    def may_repeat(self, verb: str) -> bool:
        """Return whether the roll-back makes another call than the one that failed: it moves nothing.

        Not where a process was moved already: half an engine on other devices than the rest is none.
        """
        moved = any(call["verb"] == verb and call["code"] == 0 for call in self._calls)
        return verb == "restore" and bool(self._moves) and not moved

    def cause(self, verb: str, code: str) -> str:
        """Return the likely cause; a restore onto other devices has one of its own."""
        if verb == "restore" and self._moves and code.isdecimal():
            return "the map of devices does not name every device that the processes see, one to one"
        return super().cause(verb, code)

    def read_states(self, pids: Sequence[int], deadline: Deadline) -> dict[int, str | None]:
        """Read every state, with a new helper where the old one hung or died."""
        for pid in pids:
            if not self._helpers[pid].usable:
                self._helpers[pid].close()
                self._helpers[pid] = Helper(pid, self._driver)
        helpers = {pid: self._helpers[pid] for pid in pids}
        for helper in helpers.values():
            try:
                helper.ready(deadline.sooner(STATE_SECONDS))
            except (EnvironmentFailure, DeadlineExceeded):
                helper.kill()
        replies = call_all(helpers, "state", deadline.sooner(STATE_SECONDS))
        return {pid: reply.state if reply.code == 0 else None for pid, reply in replies.items()}

    def details(self, verb: str, pids: Sequence[int], deadline: Deadline) -> dict[str, Any]:
        """Return the thread of each process in which the driver restores: a dump has to let it run."""
        told = self.make_calls("thread", pids, deadline.sooner(STATE_SECONDS))
        if hung := sorted(pid for pid, reply in told.items() if reply.hung):
            raise self._failed(verb, f"process {hung}: the driver does not give the restore thread", HANG)
        return {"restore_threads": {pid: reply.thread for pid, reply in told.items()}}

    def drop(self) -> None:
        """End the helpers."""
        for helper in self._helpers.values():
            helper.close()
        self._helpers = {}


def _digits(uuid: str) -> str:
    try:
        return UUID(uuid.removeprefix("GPU-")).hex
    except ValueError:
        raise UsageError(
            f"{uuid!r} is no UUID of a GPU", next_step="take it from `nvidia-smi -L`, with or without GPU-"
        ) from None


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
