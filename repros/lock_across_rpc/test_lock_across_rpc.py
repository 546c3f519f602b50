"""A lock held across a team operation starves the team's own requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.hang.repro import run_to_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.hang.ranks.client import RankSet
    from nvsnap_conformance.session.arms import Arm

SCRIPT = Path(__file__).with_name("ranks.py")


@pytest.mark.clause("COLL-NO-LOCK-ACROSS")
def test_requests_are_answered_during_a_team_operation(
    host_arm: Arm, fork_ranks: Callable[..., RankSet], tmp_path: Path
) -> None:
    """With the lock dropped around the operation every request is answered and the team forms."""
    fault = host_arm.mutant.options if host_arm.mutant else {}
    run_to_end(fork_ranks(SCRIPT, options=fault), tmp_path / "bundle")
