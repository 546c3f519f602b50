"""Reading files that somebody else wrote or named: whole, regular, and no larger than memory bears."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 256 << 20
"""The most that is read of one file, in bytes: far above any record, bundle or dump."""

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Return what the regular file ``path`` holds.

    Raises :class:`OSError` whose ``strerror`` tells, also for what is no regular file (a pipe that nobody
    writes to would be read forever, and a device has no end) and for more than ``most`` bytes.
    """
    # A pipe is opened at once with O_NONBLOCK, and a terminal does not become the controlling one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
            raise OSError(errno.EINVAL, f"it is no regular file but {kind}", str(path))
        size = status.st_size
        if size <= most:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(most + 1)  # it may grow, and one of /proc has no size
            size = len(data)
        if size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    finally:
        os.close(descriptor)
    return data


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """Return what the regular file ``path`` holds as UTF-8, like :func:`read_bytes`.

    Raises :class:`UnicodeDecodeError` too.
    """
    return read_bytes(path, most=most).decode("utf-8")
