"""Gives restored processes the marks of the run that restored them, in place of their maker's.

A process is known by NVSNAP_RUN_ID and NVSNAP_LAUNCH_ID in its environment. A restored one has the
environment of the engine that was dumped, so one run would take another's engine for its own.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from nvsnap_conformance.engines.linux import stat_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nvsnap_conformance.processes import ProcessId

_ENV_START = 50 - 3
"""Index of ``env_start`` (field 50 of proc_pid_stat(5)) in what ``stat_fields`` returns."""


def remark(processes: Iterable[ProcessId], marks: Mapping[str, str]) -> int:
    """Overwrite the values of ``marks`` in the processes' environment; return how many were overwritten.

    Only values of the same length are, and only what the kernel shows as the environment: a program that
    copied it keeps the copy. One that put its title there (setproctitle does) has no marks to change.
    """
    changed = 0
    for process in processes:
        with suppress(OSError, ValueError):  # it has just ended
            fields = stat_fields(process.pid)
            start = int(fields[_ENV_START]) if fields else 0
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:  # noqa: PTH123 - no plain file
                for name, value in marks.items():
                    changed += _overwrite(
                        cast("BinaryIO", memory), start, environment, name.encode(), value.encode()
                    )
    return changed


def _overwrite(memory: BinaryIO, start: int, environment: bytes, name: bytes, value: bytes) -> bool:
    entry = b"\0" + name + b"="
    found = (b"\0" + environment).find(entry)  # of the entry's first byte in the environment itself
    if found < 0:
        return False
    begin = found + len(entry) - 1
    end = environment.find(b"\0", begin)
    if end - begin != len(value) or environment[begin:end] == value:
        return False
    memory.seek(start + begin)
    memory.write(value)
    return True
