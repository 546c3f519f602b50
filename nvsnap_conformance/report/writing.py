"""Whether the process that writes a run record is alive: it holds a lock on the record's folder.

The kernel drops the lock with the process, however that ends, also in another pid namespace. So a record that
says ``running`` in a folder that nobody holds is one whose run was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Hold:
    """A lock on a record's folder. It is shared: whoever helps to write the record has one too."""

    def __init__(self, folder: Path) -> None:
        """Take the lock, or go on without where the file system has none; ``folder`` exists."""
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.close()

    def close(self) -> None:
        """Drop the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold a record's folder, which is made where need be, for a block."""
    folder.mkdir(parents=True, exist_ok=True)
    hold = Hold(folder)
    try:
        yield
    finally:
        hold.close()


def is_written(folder: Path) -> bool | None:
    """Whether a process of this host holds ``folder``; ``None`` where that cannot be told."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno == errno.EWOULDBLOCK else None
    finally:
        os.close(descriptor)
    return False
