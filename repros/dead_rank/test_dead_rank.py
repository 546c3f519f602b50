"""A dead rank is named as dead, with those that wait for it."""

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


@pytest.mark.clause("HANG-DEATH-IS-SEEN")
def test_dead_rank_is_named(host_arm: Arm, fork_ranks: Callable[..., RankSet], tmp_path: Path) -> None:
    """A rank that was killed during start-up is the dead one, and not merely missing."""
    judging = implementation(host_arm.mutant, "hang", judge)
    ranks = fork_ranks(SCRIPT, options={"dying": [4]})
    ranks.wait_exit(Deadline.after(SECONDS), ranks=[4])
    bundle, _ = look(ranks, tmp_path / "bundle", Deadline.after(SECONDS))
    require(check_verdict(judging(bundle), [VerdictKind.DEAD_RANK], [4]))
