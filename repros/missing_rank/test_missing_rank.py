"""A collective that one rank leaves out holds all the others."""

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


@pytest.mark.clause("COLL-ALL-ARRIVE")
def test_every_rank_arrives(host_arm: Arm, fork_ranks: Callable[..., RankSet], tmp_path: Path) -> None:
    """With every rank on its way the reduction ends."""
    fault = host_arm.mutant.options if host_arm.mutant else {}
    run_to_end(fork_ranks(SCRIPT, options=fault), tmp_path / "bundle")
