"""Temporary folders that are held by a lock, and the removal of those whose owners were killed.

A folder's owners hold a lock on a file in it: the process that made it, and those that inherit the open file,
a rank server as its standard error. The kernel drops the lock with the last of them, however it ends. So a
folder without a locked file is nobody's, and whoever makes the next one removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK_SERVER = "nvsnap-rank-server-"
DEVICE = "nvsnap-device-"
PROBE = "nvsnap-probe-"
CHECK = "nvsnap-check-"
PREFIXES = (RANK_SERVER, DEVICE, PROBE, CHECK)
"""How the names of the folders begin, by what they are for."""

LOCKED = "stderr.txt"
"""The file that is locked. Rank servers write their errors there; versions side by side must agree on it."""

_YOUNG_SECONDS = 60.0
"""A folder that is younger may be one whose owner has not locked it yet."""


def new_folder(prefix: str) -> tuple[Path, BinaryIO]:
    """Make a folder in TMPDIR, and return it with its file that holds the lock, open for writing.

    ``prefix`` is one of :data:`PREFIXES`. Folders there that killed owners left, of any prefix, go first.
    Raises :class:`OSError` where none can be made.
    """
    place = Path(tempfile.gettempdir())
    sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        locked = (folder / LOCKED).open("wb")
        fcntl.flock(locked, fcntl.LOCK_EX)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, locked


@contextmanager
def held(prefix: str) -> Iterator[Path]:
    """Give a folder for a block; see :func:`new_folder`."""
    folder, locked = new_folder(prefix)
    try:
        yield folder
    finally:
        # Removed while it is locked, or another sweep would be at it too.
        shutil.rmtree(folder, ignore_errors=True)
        locked.close()


def sweep(place: Path, *, older_than: float = _YOUNG_SECONDS) -> None:
    """Remove the folders in ``place`` that are this user's and no process's, and are so old (seconds)."""
    for folder in _folders(place):
        try:
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < older_than:
                continue
            with (folder / LOCKED).open("r+b") as locked:
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            _remove_empty(folder)
        except OSError:  # locked, or no folder of ours
            continue


def unheld(place: Path) -> list[Path]:
    """Return the folders in ``place`` that no process holds, whatever their age.

    Those that the caller may not look into are left out; one that is being made right now can be among them.
    """
    found = []
    for folder in _folders(place):
        try:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                continue
            # Shared: a look must not keep two looks from each other, and an owner has it exclusively.
            with (folder / LOCKED).open("rb") as locked:
                fcntl.flock(locked, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            if folder.is_dir():
                found.append(folder)
        except OSError:  # locked, or another user's
            continue
        else:
            found.append(folder)
    return found


def _folders(place: Path) -> list[Path]:
    return sorted(folder for prefix in PREFIXES for folder in place.glob(f"{prefix}*"))


def _remove_empty(folder: Path) -> None:
    """Remove a folder whose maker was killed before the file was there.

    One that has other files and no lock is of a version that had none, and may be in use.
    """
    try:
        folder.rmdir()
    except OSError:
        return
