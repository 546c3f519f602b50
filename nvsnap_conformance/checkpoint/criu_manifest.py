"""What a checkpoint of CRIU's consists of, and the note that says what was dumped."""

from __future__ import annotations

import json
import os
import platform
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.checkpoint.criu_failure import CriuFailure, Kind
from nvsnap_conformance.checkpoint.criu_files import HOME
from nvsnap_conformance.checkpoint.criu_image import anonymous_bytes
from nvsnap_conformance.checkpoint.criu_preflight import own_ports
from nvsnap_conformance.engines.home import LOG_NAME

if TYPE_CHECKING:
    from nvsnap_conformance.checkpoint.criu_program import Criu
    from nvsnap_conformance.engines.process import EngineProcess

IMAGES, FILES, WORK = "images", "files", "work"
"""Folders of a checkpoint: CRIU's images; /dev/shm and home; logs and statistics of the dump."""

MANIFEST = "checkpoint.json"
"""Written last: a folder without it holds no checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """What was dumped. ``processes`` maps each pid, as the engine sees it, to its threads' ids.

    ``limits`` are the first process's resource limits, soft and hard.
    """

    root_pid: int
    processes: dict[int, list[int]]
    sessions: list[int]
    ports: list[int]
    log_bytes: int
    nice: int
    limits: dict[str, list[int]]
    anonymous_bytes: int
    images: dict[str, int]
    criu: dict[str, str]
    kernel: str
    format: int = 1

    def write(self, folder: Path) -> None:
        """Publish the manifest in ``folder``, whole or not at all."""
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.rename(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint; :class:`CriuFailure` (no image) where there is none."""
        try:
            raw = json.loads((folder / MANIFEST).read_text())
            raw["processes"] = {int(pid): threads for pid, threads in raw["processes"].items()}
            return cls(**raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CriuFailure(
                Kind.NO_IMAGE,
                f"{folder} holds no finished checkpoint",
                cause=str(error),
                next_step="dump into it first; a dump that failed leaves no manifest",
            ) from error

    @property
    def ids(self) -> set[int]:
        """Every id that a restore has to have free."""
        return {*self.processes, *self.sessions, *(tid for tids in self.processes.values() for tid in tids)}


def describe(process: EngineProcess, folder: Path, criu: Criu) -> Manifest:
    """Describe a stopped engine, of which everything else has been written to ``folder``."""
    members = process.tree()
    ids = {process.namespace_pid(member): _namespace_ids(member.pid) for member in members}
    return Manifest(
        root_pid=process.namespace_pid(process.root),
        processes={pid: threads for pid, (threads, _) in ids.items()},
        sessions=sorted({one for _, leaders in ids.values() for one in leaders}),
        ports=own_ports(process),
        log_bytes=(folder / FILES / HOME / LOG_NAME).stat().st_size,
        nice=os.getpriority(os.PRIO_PROCESS, process.root.pid),
        limits=limits_of(process.root.pid),
        anonymous_bytes=anonymous_bytes(members),
        images={path.name: path.stat().st_size for path in sorted((folder / IMAGES).iterdir())},
        criu=criu.as_json(),
        kernel=platform.release(),
    )


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare every image's size with the manifest: :class:`CriuFailure` for one cut short or missing."""
    for name, size in manifest.images.items():
        try:
            now = (folder / IMAGES / name).stat().st_size
        except FileNotFoundError:
            now = -1
        if now != size:
            raise CriuFailure(
                Kind.IMAGE_DAMAGED,
                f"{name} of the image {'is missing' if now < 0 else f'has {now} bytes'}, not its {size}",
                cause="it was cut short, or written to, after the dump",
                next_step="take a new image",
            )


def limits_of(pid: int) -> dict[str, list[int]]:
    """Return the resource limits of a process by name, soft and hard; -1 stands for none."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: list(resource.prlimit(pid, getattr(resource, name))) for name in names}


def _namespace_ids(pid: int) -> tuple[list[int], set[int]]:
    """Return the thread ids of a process and its session's and group's, as the engine sees them."""
    threads, leaders = [], set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for line in (thread / "status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                threads.append(int(line.split()[-1]))
            elif line.startswith(("NSsid:", "NSpgid:")):
                leaders.add(int(line.split()[-1]))
    return sorted(threads), leaders
