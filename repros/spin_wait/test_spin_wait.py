"""Ranks that spin at full CPU while they wait are waiting."""

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

PRELOAD = (
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.platforms:current_platform.import_kernels",
)


@pytest.mark.clause("HANG-NAMES-MISSING")
def test_spinning_ranks_wait_for_the_missing_one(
    host_arm: Arm, fork_ranks: Callable[..., RankSet], tmp_path: Path
) -> None:
    """The shared memory all-reduce of vLLM spins; the rank that never comes is named all the same."""
    judging = implementation(host_arm.mutant, "hang", judge)
    ranks = fork_ranks(SCRIPT, options={"absent": [5]}, preload=PRELOAD)
    ranks.wait_told("entered", Deadline.after(SECONDS))
    bundle, _ = look(ranks, tmp_path / "bundle", Deadline.after(SECONDS))
    require(check_verdict(judging(bundle), [VerdictKind.MISSING_ARRIVAL], [5]))
