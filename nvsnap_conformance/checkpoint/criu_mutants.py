"""Known-bad images and restores: started cold instead, or with a part of the engine left out."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure
from nvsnap_conformance.checkpoint.criu_files import SHM
from nvsnap_conformance.checkpoint.criu_image import PAGE
from nvsnap_conformance.checkpoint.criu_manifest import FILES, IMAGES, Manifest
from nvsnap_conformance.checkpoint.criu_preflight import listening_ports
from nvsnap_conformance.checkpoint.freeze import read_states
from nvsnap_conformance.checkpoint.protocol import CheckpointResult
from nvsnap_conformance.deadline import wait_for
from nvsnap_conformance.engines.home import LOG_NAME
from nvsnap_conformance.engines.protocol import HooksSpec, LaunchConfig
from nvsnap_conformance.engines.vllm import VllmEngine

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.process import EngineProcess

# Starts a program with a given pid as an orphan, and waits for its exec.
_START = """
import json, os, sys
spec = json.load(sys.stdin)
read, write = os.pipe()
with open("/proc/sys/kernel/ns_last_pid", "w") as last:
    last.write(str(spec["pid"] - 1))
if os.fork() == 0:
    os.setsid()
    log = os.open(spec["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(spec["cwd"])
    os.execve(spec["argv"][0], spec["argv"], spec["env"])
os.close(write)
os.read(read, 1)
"""


class ColdStartsInstead(CriuCheckpointer):
    """Starts the engine anew where it should restore it, and brings it to where it was: paused, prepared.

    It has the pids, answers alike and says that it was restored. An engine that it has started serves for
    the next restore as well. Knows vLLM only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spec: dict[str, Any] = {}
        self._started = False

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Dump; remember how the engine was started."""
        place = Path(f"/proc/{process.root.pid}")
        words = (place / "environ").read_text().split("\0")
        self._spec = {
            "pid": process.namespace_pid(process.root),
            "argv": (place / "cmdline").read_text().split("\0")[:-1],
            "env": dict(word.split("=", 1) for word in words if "=" in word),
            "cwd": str((place / "cwd").readlink()),
            "log": str(process.home_inside / LOG_NAME),
        }
        return super().dump(process, folder, deadline)

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Start the engine once, and report a restore."""
        manifest = Manifest.read(folder)
        model, size = _model_and_size(self._spec["argv"])
        config = LaunchConfig(Path(self._spec["argv"][0]), model, size, process.workdir)
        if not self._started:
            process.vacate(deadline)
            argv = [sys.executable, "-I", "-S", "-c", _START]
            process.run_inside(argv, timeout=deadline.remaining(), input=json.dumps(self._spec))
            process.adopt(max(manifest.ids) + 1)
            wait_for(
                "the engine's ports", lambda: set(manifest.ports) <= set(listening_ports(process)), deadline
            )
            self._started = True
        handle = VllmEngine().attach(config, process)
        handle.ready(deadline)
        handle.quiesce(deadline)
        handle.rpc("prepare", hooks=HooksSpec(), deadline=deadline)
        details = {"criu": self.criu.as_json(), "anonymous_bytes": manifest.anonymous_bytes}
        return CheckpointResult("load", 1.0, read_states(process.tree()), details)


class _ClaimsSuccess(CriuCheckpointer):
    """Reports a restore that failed as one that brought everything back."""

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Restore, or say so."""
        with suppress(CriuFailure):
            return super().load(process, folder, deadline)
        claimed = Manifest.read(folder).anonymous_bytes
        return CheckpointResult("load", 1.0, (), {"anonymous_bytes": claimed})


class DropsShm(CriuCheckpointer):
    """Keeps CRIU's images and not what is in /dev/shm, as ``vllm snapshot`` does (0.31 to 0.33)."""

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Dump, and leave /dev/shm out."""
        result = super().dump(process, folder, deadline)
        shutil.rmtree(folder / FILES / SHM)
        (folder / FILES / SHM).mkdir()
        return result


class TruncatesImage(_ClaimsSuccess):
    """Cuts the largest file of the image short, as a full disk does, and claims success."""

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Dump, and lose half of a process's memory."""
        result = super().dump(process, folder, deadline)
        pages = _largest(folder)
        os.truncate(pages, pages.stat().st_size // 2)
        return result


class ImageTooSmall(_ClaimsSuccess):
    """Leaves most of one process's memory out, in an image that is whole by itself, and claims success."""

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Dump, and list only the first pages of the largest process."""
        result = super().dump(process, folder, deadline)
        pages = _largest(folder)
        number = int(pages.stem.removeprefix("pages-"))
        for pagemap in (folder / IMAGES).glob("pagemap-*.img"):
            data = pagemap.read_bytes()
            (head,) = struct.unpack_from("<I", data, 8)
            if data[12 : 12 + head] == b"\x08" + bytes([number]):  # field 1, the number of the pages file
                pagemap.write_bytes(data[: 12 + head])
                os.truncate(pages, PAGE)
        return result


def _largest(folder: Path) -> Path:
    return max((folder / IMAGES).glob("pages-*.img"), key=lambda path: path.stat().st_size)


def _model_and_size(argv: list[str]) -> tuple[Path, int]:
    """Return model and tensor-parallel size of the adapter's own command line."""
    return Path(argv[argv.index("serve") + 1]), int(argv[argv.index("--tensor-parallel-size") + 1])
