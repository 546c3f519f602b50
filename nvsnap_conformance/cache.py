"""The suite's folder in the user's cache directory: engine environments, fixture models, images."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from nvsnap_conformance.errors import EnvironmentFailure

ENVIRONMENT_VARIABLE = "NVS_CACHE_DIR"


def cache_dir(*parts: str) -> Path:
    """Return a folder of the cache, made (mode 0700) where it is missing.

    ``NVS_CACHE_DIR`` names another root than the user's cache directory. Raises
    :class:`EnvironmentFailure` where the folder cannot be made or written.
    """
    configured = os.environ.get(ENVIRONMENT_VARIABLE)
    root = (
        Path(configured).expanduser()
        if configured
        else Path(platformdirs.user_cache_path("nvsnap-conformance"))
    )
    folder = root.absolute().joinpath(*parts)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFailure(
            f"the cache folder {folder} cannot be made: {error.strerror}",
            cause="the disk is full, read-only, or belongs to another user",
            next_step=f"set {ENVIRONMENT_VARIABLE} to a folder that you can write, with some GiB free",
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentFailure(
            f"the cache folder {folder} cannot be written",
            cause="it belongs to another user or lies on a read-only file system",
            next_step=f"set {ENVIRONMENT_VARIABLE} to a folder that you can write, with some GiB free",
        )
    return folder
