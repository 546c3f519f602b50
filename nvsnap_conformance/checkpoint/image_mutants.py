"""Known-bad use of a checkpointer that writes images: failures swallowed, or passed on without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure
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
    """Restores, ends what came back, and restores once more: the retry resets every connection."""

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Restore two times."""
        super().load(process, folder, deadline)
        return super().load(process, folder, deadline)
