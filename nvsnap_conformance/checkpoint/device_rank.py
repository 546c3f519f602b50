"""One process with GPU state, for the cases of the device layer; run as a program.

Arguments: the kind (``gpu``, ``stand-in`` or ``none``), the number of the GPU and the suite's path as JSON.
Says ``ready`` once it holds its memory; answers each line of its standard input with ``right``, ``wrong`` or
``gone``; ends with its standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES = 64 << 20
"""GPU memory of a real process, in bytes."""

_STAND_IN_BYTES = 4096
_PR_SET_PDEATHSIG = 1


def _on_gpu(number: int) -> Callable[[], str]:
    from cuda.bindings import driver  # noqa: PLC0415 - only where there is a GPU

    def made(answer: tuple[object, ...]) -> object:
        if int(answer[0]) != 0:  # type: ignore[call-overload] # an enumeration of cuda-bindings
            raise RuntimeError(f"CUDA answers {answer[0]}")
        return answer[1] if len(answer) > 1 else None

    made(driver.cuInit(0))
    device = made(driver.cuDeviceGet(number))
    made(driver.cuCtxSetCurrent(made(driver.cuDevicePrimaryCtxRetain(device))))
    address = made(driver.cuMemAlloc(BYTES))
    pattern = int.from_bytes(os.urandom(4), "little")
    made(driver.cuMemsetD32(address, pattern, BYTES // 4))
    made(driver.cuCtxSynchronize())
    expected = pattern.to_bytes(4, "little") * (BYTES // 4)

    def look() -> str:
        back = bytearray(BYTES)
        made(driver.cuMemcpyDtoH(back, address, BYTES))
        return "right" if back == expected else "wrong"

    return look


def _stand_in() -> Callable[[], str]:
    folder = Path(os.environ["NVSNAP_STAND_IN_DRIVER"])
    memory = folder / f"{os.getpid()}.memory"
    expected = os.urandom(_STAND_IN_BYTES)
    memory.write_bytes(expected)
    (folder / f"{os.getpid()}.state").write_text("CU_PROCESS_STATE_RUNNING")

    def look() -> str:
        try:
            return "right" if memory.read_bytes() == expected else "wrong"
        except FileNotFoundError:
            return "gone"

    return look


def main() -> None:
    """Hold memory until the standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    kind, number = sys.argv[1], int(sys.argv[2])
    sys.path[:] = json.loads(sys.argv[3])
    look: Callable[[], str] = (
        (lambda: "none") if kind == "none" else _stand_in() if kind == "stand-in" else _on_gpu(number)
    )
    print("ready", flush=True)  # noqa: T201 - the parent waits for it
    for _ in sys.stdin:
        print(look(), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
