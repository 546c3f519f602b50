"""Ranks that all wait for one outside peer are not to blame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.fixtures.arms import implementation
from nvsnap_conformance.hang.repro import SECONDS, check_verdict, look
from nvsnap_conformance.hang.verdict import VerdictKind, judge
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.hang.ranks.client import RankSet
    from nvsnap_conformance.session.arms import Arm

SCRIPT = Path(__file__).with_name("ranks.py")


@pytest.mark.clause("HANG-OUTSIDE-CAUSE")
def test_no_rank_is_blamed_for_a_silent_agent(
    host_arm: Arm, fork_ranks: Callable[..., RankSet], tmp_path: Path
) -> None:
    """An agent that takes requests and never answers holds every rank at one place."""
    judging = implementation(host_arm.mutant, "hang", judge)
    ranks = fork_ranks(SCRIPT, options={"silent": True})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    bundle, _ = look(ranks, tmp_path / "bundle", Deadline.after(SECONDS))
    require(check_verdict(judging(bundle), [VerdictKind.ALL_TOGETHER], []))
