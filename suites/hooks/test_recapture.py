"""Captured graphs after a restore: gone, and captured again while the engine serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.hooks import recapture
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec

SECONDS = 240.0


@pytest.mark.clause("HOOKS-GRAPHS-COME-BACK")
def test_graphs_come_back_while_the_engine_serves(engine: EngineHandle, hooks: HooksSpec) -> None:
    """Dropped graphs are captured again while requests are served, and none is used before all are there."""
    seen = recapture.observe(engine, hooks, deadline=Deadline.after(SECONDS))
    require(recapture.check_come_back(seen))
