"""Known-bad process owners: what SUITE-LEAVES-NOTHING must catch. The case itself cleans up after them."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from nvsnap_conformance.engines.process import EngineProcess


class AsksOnly(EngineProcess):
    """Ends an engine as many launchers do: SIGTERM to the parent, and trust in the rest."""

    def close(self) -> None:
        """Send SIGTERM to the root process and return."""
        self.root.send(SIGTERM)


class KillsRootOnly(EngineProcess):
    """Kills the process that it started, and none of the children of that process."""

    def close(self) -> None:
        """Send SIGKILL to the root process and return."""
        self.root.send(SIGKILL)
