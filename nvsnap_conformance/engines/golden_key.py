"""What makes two engines the same, so that one's image may stand for the other's cold start.

Everything that a cold start would have read is in the key: the engine's files, the command line and the
environment, the model, what the suite injects, and what CRIU and the kernel are.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint import criu as criu_checkpointer
from nvsnap_conformance.checkpoint import criu_files, criu_manifest
from nvsnap_conformance.engines import channel, home, linux, supervisor
from nvsnap_conformance.engines.home import mount_point

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nvsnap_conformance.checkpoint.criu_program import Criu
    from nvsnap_conformance.engines.protocol import LaunchConfig

_FORMAT = 1
_HASH_UP_TO = 64 << 20
"""Files up to this size (bytes) count with their content, larger ones (weights) with size and times."""

_LIMITS = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK")

_MODULES = (channel, criu_checkpointer, criu_files, criu_manifest, home, linux, supervisor)
_SOURCES = tuple(Path(str(module.__file__)) for module in _MODULES)


@dataclass(frozen=True)
class GoldenKey:
    """``name`` is the key; ``parts`` what went into it, each by its digest, to tell why two differ."""

    name: str
    parts: dict[str, str]


class NotGoldenError(Exception):
    """Why an engine cannot be started from an image."""


def golden_key(
    *,
    adapter: str,
    config: LaunchConfig,
    argv: Sequence[str],
    env: Mapping[str, str],
    criu: Criu,
) -> GoldenKey:
    """Return the key of the engine that ``argv`` and ``env`` would start.

    Raises :class:`NotGoldenError` for an engine whose files cannot be followed: one that was installed in
    editable form, or that reads files of its launch's own folder.
    """
    workdir = str(config.workdir)
    used = next((word for word in (*argv, *env.values()) if workdir in word), None)
    if used is not None:
        raise NotGoldenError(f"its command line or environment names the launch's own folder: {used[:200]}")
    packages, editable = _packages(config.python)
    if not packages:
        raise NotGoldenError(f"what is installed beside {config.python} cannot be found, so nor can changes")
    if editable:
        raise NotGoldenError(f"{', '.join(editable)} is installed in editable form, so its files may change")
    parts = {
        "format": str(_FORMAT),
        "adapter": adapter,
        "interpreter": f"{config.python} -> {config.python.resolve()}",
        "packages": _digest(packages),
        "argv": _digest(list(argv)),
        "environment": _digest(sorted(env.items())),
        "model": _digest(_files([config.model])),
        "injected": _digest(_files(_python_path(env))),
        "launch": _digest(_files(_SOURCES)),
        "mount-point": str(mount_point()),
        "machine": _digest([platform.node(), platform.machine(), _cpu_flags(), os.getuid()]),
        "inherited": _digest([sorted(os.sched_getaffinity(0)), _limits()]),
        "kernel": f"{platform.release()} {platform.version()}",
        "criu": f"{criu.version} {criu.build_id}",
    }
    return GoldenKey(f"{adapter}-tp{config.tensor_parallel}-{_digest(parts)[:16]}", parts)


@functools.cache
def _packages(python: Path) -> tuple[list[Any], list[str]]:
    """Return what is installed beside an interpreter, and the distributions that are editable.

    Nothing for an environment that takes packages of another. Looked at once per process (0.2 s).

    A distribution counts with its metadata's name and its record's content, its modules with size and
    modification time: what somebody edits in place makes another engine.
    """
    found: list[Any] = []
    editable: list[str] = []
    prefix = python.parent.parent
    settings = prefix / "pyvenv.cfg"
    if settings.is_file() and "include-system-site-packages = true" in settings.read_text().lower():
        return [], []
    for site in sorted(
        [*prefix.glob("lib/python*/site-packages"), *prefix.glob("lib/python*/dist-packages")]
    ):
        for info in sorted(site.glob("*.dist-info")):
            direct = info / "direct_url.json"
            if direct.is_file() and '"editable": true' in direct.read_text():
                editable.append(info.name.partition("-")[0])
            record = info / "RECORD"
            found.append((info.name, _content(record) if record.is_file() else ""))
        for folder, names, files in os.walk(site):
            names[:] = [name for name in sorted(names) if name != "__pycache__"]
            for name in sorted(files):
                if name.endswith((".py", ".so", ".pth")):
                    stat = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 - 20,000 files
                    found.append((folder, name, stat.st_size, stat.st_mtime_ns))
    return found, editable


def _python_path(env: Mapping[str, str]) -> list[Path]:
    """Return the folders of PYTHONPATH: what the suite injects, and the target's own."""
    return [Path(place) for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]


def _files(places: Iterable[Path]) -> list[Any]:
    """Describe every file at or below ``places``, without compiled Python."""
    found: list[Any] = []
    for place in places:
        paths = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in paths:
            if path.is_file() and "__pycache__" not in path.parts:
                stat = path.stat()
                content = _content(path) if stat.st_size <= _HASH_UP_TO else str(stat.st_mtime_ns)
                found.append((str(path), stat.st_size, content))
    return found


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _limits() -> dict[str, tuple[int, int]]:
    """Return the resource limits that a launched engine inherits, and a restored one has from its maker."""
    return {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name in _LIMITS}


def _cpu_flags() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return line
    return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
