"""The suite's own eyes: the stacks of every rank, from outside, at any deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.fixtures.arms import implementation
from nvsnap_conformance.hang.bundle import collect_bundle
from nvsnap_conformance.outcomes import finding, require

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.session.arms import Arm
    from nvsnap_conformance.session.pool import LiveEngine

SECONDS = 30.0


@pytest.mark.clause("LIVE-STACKS-AT-DEADLINE")
def test_every_rank_shows_its_stack(live_engine: LiveEngine, arm: Arm, tmp_path: Path) -> None:
    """One round over a running engine gives frames of every rank's own process."""
    collect = implementation(arm.mutant, "hang", collect_bundle)
    bundle = collect(
        live_engine.handle.process.root,
        ranks=live_engine.ranks,
        folder=tmp_path / "bundle",
        rounds=1,
        native_round=False,
        deadline=Deadline.after(SECONDS),
    )
    framed = {
        sample.pid for sample in bundle.rounds[0].samples if any(thread.frames for thread in sample.threads)
    }
    seen = {member.rank for member in bundle.ranks if member.pid in framed}
    missing = sorted(set(range(arm.tensor_parallel)) - seen)
    if missing:
        require(
            [
                finding(
                    f"no stack of ranks {missing} could be taken; {len(seen)} ranks have one",
                    "STACKS:MISSING",
                )
            ]
        )
