"""Shared-memory mappings of this process, from the kernel's point of view."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

_SHM = "/dev/shm/"  # noqa: S108 - the kernel's shared memory, not a temporary file of ours
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Mapping:
    """One mapping: address range and the file below /dev/shm; ``deleted`` once that has been unlinked."""

    start: int
    end: int
    path: str
    deleted: bool

    @property
    def size(self) -> int:
        """Return the length in bytes."""
        return self.end - self.start


def shared_memory() -> list[Mapping]:
    """Return every mapping of a file in /dev/shm, from /proc/self/maps."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(_SHM):
            start, _, end = fields[0].partition("-")
            path = fields[5].removesuffix(" (deleted)")
            found.append(Mapping(int(start, 16), int(end, 16), path, path != fields[5]))
    return found


def release(mapping: Mapping) -> None:
    """Give a shared mapping back, keeping its addresses reserved and inaccessible.

    vLLM's SHMManager (csrc/cpu/shm.cpp) has no release: it unmaps its addresses when the process exits.
    An inaccessible private mapping of the same length holds no memory, shares nothing, and keeps anything
    else from being mapped where that last unmap will hit. Raises ``OSError``.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    flag = ctypes.c_int
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, flag, flag, flag, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    got = library.mmap(mapping.start, mapping.size, _PROT_NONE, flags, -1, 0)
    if got in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot release the mapping of {mapping.path}: {os.strerror(number)}")


def unlink(path: str) -> None:
    """Remove a file of /dev/shm; another rank may have done so."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
