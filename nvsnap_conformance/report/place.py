"""Where a run record goes, and whether it can be written there: asked before anything is started."""

from __future__ import annotations

import errno
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.errors import EnvironmentFailure, NvsnapError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the kernel says of a disk without room, or of a quota that is used up."""

_ANOTHER = "name another folder with --out, or leave the option out for a new one below ./nvs-runs"


def new_folder() -> Path:
    """Return the path of a new record's folder below the working directory; it does not exist yet.

    Raises :class:`EnvironmentFailure` where the working directory has been removed.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    try:
        return Path.cwd() / "nvs-runs" / f"{stamp}-{os.getpid()}"
    except OSError as error:
        raise EnvironmentFailure(
            f"there is no working directory to make the record in: {error.strerror}",
            cause="it was removed",
            next_step="change to another folder, or name one with --out",
        ) from error


def named_folder(text: str) -> Path:
    """Return the absolute path of a record's folder that the user named.

    Raises :class:`UsageError` for a name that can be none.
    """
    if not text.strip():
        raise UsageError(
            "--out names no folder",
            cause="it is empty; a variable in its place may not be set",
            next_step=_ANOTHER,
        )
    try:
        return Path(text).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise UsageError(f"--out {text!r} can be no folder: {error}", next_step=_ANOTHER) from error


def require_writable(folder: Path) -> None:
    """See that ``folder`` can be made and written into; nothing of that stays.

    Raises :class:`UsageError` for a path that can be no folder, and :class:`EnvironmentFailure` where it can
    be, and cannot be written.
    """
    made: list[Path] = []
    try:
        for part in (*reversed(folder.parents), folder):
            if not part.is_dir():
                part.mkdir()
                made.append(part)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise _refused(folder, error) from error
    finally:
        _remove(made)


def _remove(made: Sequence[Path]) -> None:
    for part in reversed(made):
        try:
            part.rmdir()
        except OSError:  # another run has begun to use it
            return


def _refused(folder: Path, error: OSError) -> NvsnapError:
    if error.errno in {errno.ENOTDIR, errno.EEXIST}:
        name = next((part for part in (folder, *folder.parents) if part.exists()), folder)
        return UsageError(
            f"the record's folder {folder} cannot be: {name} is a file",
            next_step=f"{_ANOTHER}; it may not exist yet",
        )
    if error.errno in {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}:
        return UsageError(f"the record's folder {folder} cannot be: {error.strerror}", next_step=_ANOTHER)
    return unwritten(folder, error)


def unwritten(path: Path, error: OSError) -> EnvironmentFailure:
    """Return the error of a file or folder of the record that cannot be written."""
    if error.errno in FULL:
        return EnvironmentFailure(
            f"the run record cannot be written: {path}: {error.strerror}",
            cause="the disk is full, or a quota is used up",
            next_step="make room, or name a folder on another disk with --out; what was written before stays",
        )
    return EnvironmentFailure(
        f"the run record cannot be written: {path}: {error.strerror or error}",
        cause="its folder belongs to another user, is on a read-only file system, or was removed",
        next_step="name a folder that you can write with --out",
    )
