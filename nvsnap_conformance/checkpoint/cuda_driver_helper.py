"""The process that makes the driver's checkpoint calls for one target process.

One for each target, so that a call that never returns can be ended with the process that made it. It runs
in the suite's own pid namespace, because the driver takes pids as the caller sees them. It reads requests
and writes replies, one JSON object a line, and ends with its standard input, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

STATES = {
    0: "RUNNING",
    1: "LOCKED",
    2: "CHECKPOINTED",
    3: "FAILED",
    4: "CHECKPOINTING",
    5: "RESTORING",
}
"""cuda.h: CUprocessState, without its prefix ``CU_PROCESS_STATE_``; the last two came with CUDA 13."""

NO_DRIVER = 3
"""Exit status where cuda-bindings, or the driver behind it, is not there."""

_PR_SET_PDEATHSIG = 1


def load_driver(path: str | None) -> Any:
    """Return the module with ``cuCheckpointProcess*``: cuda-bindings', or a stand-in's file."""
    if path is None:
        from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency of the suite

        return driver
    spec = importlib.util.spec_from_file_location("nvsnap_stand_in_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Caller:
    """Makes the calls on one target process and reads its state back after each."""

    def __init__(self, driver: Any, pid: int) -> None:
        self._driver = driver
        self._pid = pid

    def call(self, verb: str, milliseconds: int, moves: dict[str, str]) -> dict[str, Any]:
        """Make one call; return result (name and number), the state read back, and the span (monotonic).

        ``milliseconds`` is a lock's timeout, ``moves`` the devices of a restore: UUID that the process was
        checkpointed on to UUID that it is restored onto, both as 32 hexadecimal digits.
        """
        began = time.monotonic()
        answer = self._make(verb, milliseconds, moves)
        ended = time.monotonic()
        reply = {**_result(answer), "began": began, "ended": ended}
        if verb == "thread":
            return {**reply, "thread": int(answer[1]) if reply["code"] == 0 else None}
        return {**reply, **self._state(answer if verb == "state" else None)}

    def _make(self, verb: str, milliseconds: int, moves: dict[str, str]) -> Any:
        driver, pid = self._driver, self._pid
        if verb == "state":
            return driver.cuCheckpointProcessGetState(pid)
        if verb == "thread":
            ask = getattr(driver, "cuCheckpointProcessGetRestoreThreadId", None)
            return -1 if ask is None else ask(pid)
        if verb == "lock":
            arguments = driver.CUcheckpointLockArgs()
            arguments.timeoutMs = milliseconds
            return driver.cuCheckpointProcessLock(pid, arguments)
        if verb == "checkpoint":
            return driver.cuCheckpointProcessCheckpoint(pid, driver.CUcheckpointCheckpointArgs())
        if verb == "restore":
            arguments = driver.CUcheckpointRestoreArgs()
            if moves:
                arguments.gpuPairs = [self._pair(old, new) for old, new in moves.items()]
                arguments.gpuPairsCount = len(moves)
            return driver.cuCheckpointProcessRestore(pid, arguments)
        return driver.cuCheckpointProcessUnlock(pid, driver.CUcheckpointUnlockArgs())

    def _pair(self, old: str, new: str) -> Any:
        pair = self._driver.CUcheckpointGpuPair()
        for field, digits in (("oldUuid", old), ("newUuid", new)):
            uuid = self._driver.CUuuid()
            # cuda-bindings 13.3 lets the bytes be read only.
            ctypes.memmove(uuid.getPtr(), bytes.fromhex(digits), 16)
            setattr(pair, field, uuid)
        return pair

    def _state(self, answer: Any) -> dict[str, Any]:
        answer = self._driver.cuCheckpointProcessGetState(self._pid) if answer is None else answer
        result = _result(answer)
        if result["code"] != 0:
            return {"state": None, "state_result": result["result"]}
        number = int(answer[1])
        return {"state": STATES.get(number, str(number)), "state_result": result["result"]}


def _result(answer: Any) -> dict[str, Any]:
    error = answer[0] if isinstance(answer, tuple) else answer
    return {"result": str(getattr(error, "name", error)), "code": int(error)}


def _say(**message: Any) -> None:
    # One write: a parent that reads lines never sees a part of one.
    os.write(1, (json.dumps(message) + "\n").encode())


def main() -> None:
    """Run with the target's pid, the driver's file (or an empty word) and the parent's pid as arguments."""
    pid, path, parent = int(sys.argv[1]), sys.argv[2] or None, int(sys.argv[3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        # Also while the driver holds the main thread in a call: nobody waits for its end any more.
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    try:
        driver = load_driver(path)
        first = _result(driver.cuInit(0))
        version = driver.cuDriverGetVersion()
    except Exception as error:  # noqa: BLE001 - told to the suite, which says what it means
        _say(event="failed", error=f"{type(error).__name__}: {error}")
        sys.exit(NO_DRIVER)
    _say(event="ready", **first, version=int(version[1]) if _result(version)["code"] == 0 else None)
    caller = Caller(driver, pid)
    while True:
        request = requests.get()
        try:
            reply = caller.call(request["verb"], request.get("milliseconds", 0), request.get("moves", {}))
        except Exception as error:  # noqa: BLE001 - as above
            reply = {"error": f"{type(error).__name__}: {error}"}
        _say(event="reply", number=request["number"], **reply)
