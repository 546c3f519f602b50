"""A barrier and a broadcast of one group hold each other."""

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


@pytest.mark.clause("COLL-ONE-OPERATION")
def test_ranks_enter_one_operation(host_arm: Arm, fork_ranks: Callable[..., RankSet], tmp_path: Path) -> None:
    """With one operation on every rank the group meets."""
    fault = host_arm.mutant.options if host_arm.mutant else {}
    run_to_end(fork_ranks(SCRIPT, options=fault), tmp_path / "bundle")
