"""The files that belong to an image beside CRIU's own: /dev/shm and the engine's home.

CRIU stores which files a process has open or mapped, not what is in them, unless they are unlinked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.checkpoint.criu_failure import CriuFailure, Kind
from nvsnap_conformance.engines.home import LOG_NAME
from nvsnap_conformance.errors import UsageError

if TYPE_CHECKING:
    from nvsnap_conformance.engines.process import EngineProcess

_SECONDS = 60.0

SHM, HOME = "shm", "home"


def save_files(process: EngineProcess, folder: Path) -> None:
    """Copy /dev/shm and the home of a stopped engine into ``folder``.

    Raises :class:`CriuFailure` (no space) where they do not fit.
    """
    for name, source in ((SHM, shm_of(process)), (HOME, process.home_outside)):
        (folder / name).mkdir(parents=True)
        _copy(source, folder / name)


def put_files(process: EngineProcess, folder: Path) -> None:
    """Make /dev/shm and the home what they were at the dump; nothing of the engine may run.

    What the log got since then is kept beside it, in ``engine.log.N`` of the launch's workdir.
    """
    shm, home = shm_of(process), process.home_outside
    log, saved_log = home / LOG_NAME, folder / HOME / LOG_NAME
    if log.stat().st_size > saved_log.stat().st_size:
        number = 1 + len(list(process.workdir.glob(f"{LOG_NAME}.[0-9]*")))
        shutil.copyfile(log, process.workdir / f"{LOG_NAME}.{number}")
    _empty(shm)
    _copy(folder / SHM, shm)
    _empty(home)
    _copy(folder / HOME, home)


def shm_of(process: EngineProcess) -> Path:
    """Return the engine's own /dev/shm as the suite reaches it, through init's mounts."""
    return process.inside_mounts(Path("/dev/shm"))  # noqa: S108 - the engine's, not the suite's


def check_visible(path: Path) -> None:
    """Refuse a folder that CRIU cannot see from inside an engine's mounts: :class:`UsageError`."""
    if path.resolve().is_relative_to("/dev/shm"):  # noqa: S108 - looked at, nothing is written
        raise UsageError(
            f"an image cannot lie in {path}",
            cause="an isolated engine has a /dev/shm of its own, which hides it",
            next_step="name a folder on a disk or on another tmpfs",
        )


def tree_bytes(folder: Path) -> int:
    """Return the disk space that a folder's files take, in bytes; holes take none."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _copy(source: Path, target: Path) -> None:
    """Copy a folder's content with modes, owners, links, holes, FIFOs and sockets' names."""
    argv = ["cp", "--archive", "--sparse=always", "--reflink=auto", f"{source}/.", f"{target}/"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        full = "No space left" in done.stderr or "quota exceeded" in done.stderr
        raise CriuFailure(
            Kind.NO_SPACE if full else Kind.OTHER,
            f"the files of the engine cannot be copied to {target}",
            cause=done.stderr.strip()[-500:],
            next_step="free some space" if full else "see the message",
        )


def _empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()
