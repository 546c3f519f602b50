"""A workspace whose multicast pointer is null is thrown away, never used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.hang.repro import run_to_end
from nvsnap_conformance.hooks.workspaces import check_null_multicast
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.hang.ranks.client import RankSet
    from nvsnap_conformance.session.arms import Arm

HERE = Path(__file__).resolve().parent
STANDIN = HERE.parent / "rank_local_fallback" / "standin"
PRELOAD = ("vllm.distributed.device_communicators.flashinfer_all_reduce",)


@pytest.mark.clause("COLL-NULL-MULTICAST-REFUSED")
@pytest.mark.parametrize("backend", ["auto", "mnnvl"])
def test_no_rank_uses_a_workspace_without_multicast(
    host_arm: Arm, fork_ranks: Callable[..., RankSet], tmp_path: Path, backend: str
) -> None:
    """Multicast gives a null pointer on both ranks; the workspace is destroyed on both and none uses it."""
    form = {"form": "today", "backend": backend} | (host_arm.mutant.options if host_arm.mutant else {})
    ranks = fork_ranks(HERE / "ranks.py", world=2, options=form, paths=[STANDIN], preload=PRELOAD)
    require(check_null_multicast(run_to_end(ranks, tmp_path / "bundle"), asked=backend))
