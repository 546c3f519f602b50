"""With FlashInfer's all-reduce switched off there is no workspace of it on any rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.hang.repro import run_to_end
from nvsnap_conformance.hooks.workspaces import check_switched_off
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.hang.ranks.client import RankSet
    from nvsnap_conformance.session.arms import Arm

HERE = Path(__file__).resolve().parent
PATHS = (HERE / "standin", HERE.parent / "rank_local_fallback" / "standin")


@pytest.mark.clause("COLL-SWITCHED-OFF-MEANS-NONE")
def test_no_workspace_while_the_switch_is_off(
    host_arm: Arm, fork_ranks: Callable[..., RankSet], tmp_path: Path
) -> None:
    """The same two ranks make a workspace with the switch on, and none with it off."""
    form = {"form": "today"} | (host_arm.mutant.options if host_arm.mutant else {})

    def told(switch: str) -> dict[int, Any]:
        options = form | {"switch": switch}
        ranks = fork_ranks(
            HERE / "ranks.py", world=2, options=options, paths=PATHS, preload=["fusion_pass:load"]
        )
        values = run_to_end(ranks, tmp_path / f"bundle-{switch}")
        ranks.end()
        return values

    require(check_switched_off(told("1"), told("0")))
