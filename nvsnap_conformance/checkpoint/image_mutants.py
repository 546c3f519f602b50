"""Known-bad use of a checkpointer that writes images: failures swallowed, or passed on without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure
from nvsnap_conformance.checkpoint.criu_files import put_files
from nvsnap_conformance.checkpoint.criu_manifest import FILES
from nvsnap_conformance.checkpoint.protocol import CheckpointResult
from nvsnap_conformance.errors import EnvironmentFailure

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.process import EngineProcess


class SwallowsFailures(CriuCheckpointer):
    """Reports every dump and restore as a success, as a script does that does not look at exit codes."""

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Dump, or say so."""
        try:
            return super().dump(process, folder, deadline)
        except CriuFailure:
            return CheckpointResult("dump", 0.0, ())

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Restore, or say so."""
        try:
            return super().load(process, folder, deadline)
        except CriuFailure:
            return CheckpointResult("load", 0.0, ())


class PassesExitCodesOn(CriuCheckpointer):
    """Fails with the program's exit code and nothing else, as ``subprocess.run(check=True)`` does.

    vLLM's ``snapshot restore`` shows the text of a ``CalledProcessError`` (0.31 to 0.33).
    """

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Dump, or fail without a reason."""
        try:
            return super().dump(process, folder, deadline)
        except CriuFailure as failure:
            raise EnvironmentFailure("criu dump returned non-zero exit status 1") from failure

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Restore, or fail without a reason."""
        try:
            return super().load(process, folder, deadline)
        except CriuFailure as failure:
            raise EnvironmentFailure("criu restore returned non-zero exit status 1") from failure


class RestoresTwice(CriuCheckpointer):
    """Restores, ends what came back before it answers, and restores once more, as a hasty retry does.

    The end of what came back first resets every connection that was in the image.
    """

    def _restore(self, process: EngineProcess, folder: Path, deadline: Deadline, *more: str) -> None:
        # Stopped, so that no request is answered in between, however fast the machine is.
        super()._restore(process, folder, deadline, *more, "--leave-stopped")
        process.vacate(deadline)
        put_files(process, folder / FILES)
        super()._restore(process, folder, deadline, *more)
