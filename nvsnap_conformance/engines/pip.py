"""pip in an engine's environment: its own process tree, its progress as lines, its failures as errors."""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from typing import TYPE_CHECKING

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.errors import EnvironmentFailure, NvsnapError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nvsnap_conformance.engines.recipes import Recipe

# pip's own words; it has no machine-readable errors (pip 23 to 26).
_NO_MATCH = re.compile(r"No matching distribution found for (?P<requirement>\S+)")
_VERSIONS = re.compile(r"\(from versions: (?P<versions>[^)]*)\)")
_PROGRESS = re.compile(r"(Collecting|Downloading|Installing collected packages|Successfully)\b.{0,60}")
_DISK_FULL = ("No space left on device", "Errno 28")
_NOISE = re.compile("WARNING: Location .* is ignored")
_TAIL_LINES = 15
_HEARTBEAT_SECONDS = 10.0


class CommandFailed(Exception):  # noqa: N818 - caught where it can be explained
    """A command ended with another status than 0; ``output`` is all that it wrote."""

    def __init__(self, status: int, output: str) -> None:
        super().__init__(f"exit status {status}")
        self.status = status
        self.output = output

    def tail(self) -> str:
        """Return the last lines that say something."""
        lines = [
            line for line in self.output.splitlines() if line.strip() and "WARNING: Location" not in line
        ]
        return "\n".join(lines[-_TAIL_LINES:])


def run_owned(
    argv: Sequence[str],
    *,
    what: str,
    scratch: Path,
    seconds: float,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run ``argv`` so that neither it nor a child of it can outlive the suite; return its output.

    ``what`` names it in messages. ``scratch`` is an existing folder on a disk with room: logs and
    temporary files go below it, and are removed again. Raises :class:`CommandFailed`, and
    ``DeadlineExceeded`` after ``seconds``.
    """
    workdir = scratch / uuid.uuid4().hex[:8]
    temporary = workdir / "tmp"
    temporary.mkdir(parents=True)
    complete = dict(os.environ if env is None else env)
    # env(1) sets TMPDIR last: the launch would put it where sockets have short names, not where disk is.
    words = ["/usr/bin/env", f"TMPDIR={temporary}", *argv]
    try:
        with EngineProcess.launch(words, env=complete, workdir=workdir, isolate=False) as process:
            follow = _Follower(process.log_path, on_line)

            def ended() -> int | None:
                status = process.poll()
                follow.look()
                return None if status is None else status + 1024  # wait_for takes 0 for "not yet"

            status = wait_for(
                what,
                ended,
                Deadline.after(seconds),
                interval=0.2,
                detail=lambda: process.log_tail(15),
            )
            output = process.log_path.read_text(encoding="utf-8", errors="replace")
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
    if status != 1024:
        raise CommandFailed(status - 1024, output)
    return output


class _Follower:
    """Hands the new lines of a growing log on, and a sign of life where there are none."""

    def __init__(self, path: Path, on_line: Callable[[str], None] | None) -> None:
        self._path = path
        self._on_line = on_line
        self._offset = 0
        self._began = self._spoke = time.monotonic()
        self._last = ""

    def look(self) -> None:
        if self._on_line is None:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        now = time.monotonic()
        for line in whole.decode(errors="replace").splitlines():
            found = _PROGRESS.search(line)
            if found:
                self._last = found[0]
                self._on_line(found[0])
                self._spoke = now
        if now - self._spoke >= _HEARTBEAT_SECONDS:
            self._on_line(f"{self._last or 'working'} ({now - self._began:.0f} s)")
            self._spoke = now


def explain(failure: CommandFailed, requirement: str, recipe: Recipe) -> NvsnapError:
    """Return the error that says why pip could not provide ``requirement``."""
    output = failure.output
    if any(words in output for words in _DISK_FULL):
        return disk_full(failure.tail())
    missing = _NO_MATCH.search(output)
    if missing and recipe.torch and missing["requirement"].startswith("torch=="):
        return EnvironmentFailure(
            f"pip finds no {missing['requirement']} for {requirement}",
            cause=f"{recipe.torch.reason}; no index or wheel folder that pip is configured with has it",
            next_step="add PyTorch's CPU wheel index to pip's extra-index-url (PyTorch's 'Get Started' page, "
            "choices pip and CPU, gives its address), or a folder that holds the wheel to find-links",
        )
    if missing and missing["requirement"].replace("_", "-").startswith(recipe.distribution):
        return TargetError(
            f"there is no {requirement} for this Python and machine",
            cause=_available(output),
            next_step="correct engine.requirement, or run the suite under a Python that the release supports",
        )
    return EnvironmentFailure(
        f"pip could not install {requirement} (exit status {failure.status})",
        cause=failure.tail(),
        next_step="see that pip reaches its index (pip download of any small package), then run again",
    )


def disk_full(detail: str) -> EnvironmentFailure:
    """Return the error for a full disk."""
    return EnvironmentFailure(
        "the disk is full: the engine environment could not be built",
        cause=detail,
        next_step="free some space, or set NVS_CACHE_DIR to a folder on another disk",
    )


def _available(output: str) -> str:
    found = _VERSIONS.search(output)
    if not found or found["versions"].strip() in ("", "none"):
        return "the index has no such release, or none that fits this Python and machine"
    return f"the index has {', '.join(found['versions'].split(', ')[-12:])}"
