"""Where an engine keeps its temporary files and its log, seen from outside and from inside.

Every isolated engine sees its own folder at one fixed place, so that the paths in its image are the same
for every copy that is restored from it.
"""

from __future__ import annotations

import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from nvsnap_conformance.errors import EnvironmentFailure, UsageError
from nvsnap_conformance.lifecycle.residue import run_id, temporary_prefix

TMPDIR_LIMIT = 107 - 60
"""Longest TMPDIR, in bytes: a UNIX socket's path has at most 107 (unix(7)), and engines add up to 60
(vLLM a uuid; multiprocessing ``/pymp-XXXXXXXX/listener-XXXXXXXX``)."""

LOG_NAME = "engine.log"


@dataclass(frozen=True)
class Home:
    """A launch's own folder: ``outside`` on the host, ``inside`` in the engine's mounts.

    Both hold ``engine.log``, and ``tmp/`` unless ``extra_tmp`` names a folder beside it: one that has to
    be made and removed with the engine, because the path of ``outside`` is too long for sockets.
    """

    outside: Path
    inside: Path
    extra_tmp: Path | None = None

    @property
    def tmp_outside(self) -> Path:
        """The engine's TMPDIR by its path on the host."""
        return self.extra_tmp or self.outside / "tmp"

    @property
    def tmp_inside(self) -> Path:
        """The engine's TMPDIR as the engine sees it."""
        return self.extra_tmp or self.inside / "tmp"


def mount_point() -> Path:
    """Return the fixed folder over which each isolated engine's home is mounted; made if need be.

    It stays empty on the host. It lies in the user's cache folder, or, where that path is too long for
    the sockets in it, in a folder of this user alone in the system's temporary folder.
    """
    cache = platformdirs.user_cache_path("nvsnap-conformance") / "engine"
    short = Path(f"/tmp/nvsnap-{os.getuid()}/engine")  # noqa: S108 - its owner is checked below
    place = cache if len(os.fsencode(cache / "tmp")) <= TMPDIR_LIMIT else short
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = place.parent.stat()
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot make the engines' mount point {place}",
            cause=str(error),
            next_step="set XDG_CACHE_HOME to a folder that you can write to",
        ) from error
    if place != cache and (owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o022):
        raise EnvironmentFailure(
            f"{place.parent} belongs to somebody else or can be written by others",
            next_step="remove it, or set XDG_CACHE_HOME to a short path",
        )
    return place


def make_home(workdir: Path, *, isolated: bool) -> Home:
    """Make the home of a launch in ``workdir`` with ``tmp/`` and an empty log, both private to this user."""
    if not workdir.is_dir():
        raise UsageError(f"{workdir} is not a folder", next_step="make the launch's workdir first")
    outside = workdir.resolve() / "engine-home"
    try:
        outside.mkdir(mode=0o700)
    except FileExistsError:
        raise UsageError(
            f"{outside} exists: a workdir serves one launch only",
            next_step="give each launch its own workdir",
        ) from None
    (outside / "tmp").mkdir(mode=0o700)
    os.close(os.open(outside / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    log = workdir / LOG_NAME
    log.symlink_to(os.path.relpath(outside / LOG_NAME, log.parent.resolve()))
    if isolated:
        return Home(outside, mount_point())
    if len(os.fsencode(outside / "tmp")) <= TMPDIR_LIMIT:
        return Home(outside, outside)
    # Only named here: the supervisor makes it and removes it, so that it goes with the engine.
    return Home(outside, outside, Path(f"{temporary_prefix(run_id())}{uuid.uuid4().hex[:8]}"))
