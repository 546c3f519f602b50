"""One process with GPU state, for the cases of the device layer; run as a program.

Arguments: where (``gpu``, ``stand-in`` or ``none``), the number of the GPU, the suite's path as JSON, what is
held (a kind of :mod:`nvsnap_conformance.checkpoint.device_held`) and the descriptor of the socket to the peer
(-1: none). Says ``ready`` once it holds it. Then it does what each line of its standard input says, and
answers with one line: ``look`` with ``right`` or what is wrong, ``share``, ``renew``, ``take`` and ``drop``
with ``done``, ``where`` with its device; where a call fails, with ``failed: `` and why. It ends with its
standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvsnap_conformance.checkpoint.device_held import Memory
    from nvsnap_conformance.checkpoint.device_held_stand_in import StandIn

_PR_SET_PDEATHSIG = 1


def _hold(where: str, number: int, kind: str, channel: socket.socket | None) -> Memory | StandIn | None:
    # Each loads only what it needs: none of a GPU's bindings where there is no GPU.
    if where == "gpu":
        from nvsnap_conformance.checkpoint.device_held import KINDS, Cuda  # noqa: PLC0415

        return KINDS[kind](Cuda(number), channel)
    if where == "stand-in":
        from nvsnap_conformance.checkpoint.device_held_stand_in import StandIn  # noqa: PLC0415

        return StandIn(channel)
    return None


def _answer(held: Memory | StandIn | None, command: str) -> str:
    if held is None:
        return "none"
    try:
        told: str | None = getattr(held, command)()
    except (RuntimeError, OSError) as error:
        return f"failed: {error}"
    return told or "done"


def main() -> None:
    """Hold GPU state until the standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    where, number, path, kind, descriptor = sys.argv[1:]
    sys.path[:] = json.loads(path)
    channel = socket.socket(fileno=os.dup(int(descriptor))) if int(descriptor) >= 0 else None
    held = _hold(where, int(number), kind, channel)
    print("ready", flush=True)  # noqa: T201 - the parent waits for it
    for line in sys.stdin:
        print(_answer(held, line.strip()), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
