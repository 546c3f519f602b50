"""The temporary folder of a rank server, and the removal of those whose owners were killed.

A folder's owners hold a lock on a file in it: the client, the server and the ranks, which inherit it with
their standard error. So a folder without a locked file is nobody's, and the next client removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

_PREFIX = "nvsnap-rank-server-"
_YOUNG_SECONDS = 60.0
"""A folder that is younger may be one whose owner has not locked it yet."""

ERRORS = "stderr.txt"


def new_folder() -> tuple[Path, BinaryIO]:
    """Make a folder in TMPDIR and return it with its file for standard error, which holds the lock."""
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    errors = (folder / ERRORS).open("wb")
    fcntl.flock(errors, fcntl.LOCK_EX)
    return folder, errors


def sweep(place: Path, *, older_than: float = _YOUNG_SECONDS) -> None:
    """Remove the folders in ``place`` that are this user's and no process's, and are so old (seconds)."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < older_than:
                continue
            with (folder / ERRORS).open("ab") as errors:
                fcntl.flock(errors, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # locked, or gone by now
            continue
