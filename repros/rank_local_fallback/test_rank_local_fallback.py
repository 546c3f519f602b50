"""One rank's failure must not send it down another path than the rest of its group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.hang.repro import run_to_end
from nvsnap_conformance.outcomes import finding, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.engines.environment import EngineEnvironment
    from nvsnap_conformance.hang.ranks.client import RankSet
    from nvsnap_conformance.session.arms import Arm

HERE = Path(__file__).resolve().parent
PRELOAD = ("vllm.distributed.device_communicators.flashinfer_all_reduce",)
DENIED = (3, 6)


@pytest.mark.clause("COLL-BACKEND-AGREE")
def test_all_ranks_end_with_one_backend(
    host_arm: Arm,
    fork_ranks: Callable[..., RankSet],
    engine_environment: EngineEnvironment,
    tmp_path: Path,
) -> None:
    """Multicast fails on two of eight ranks; every rank must end with the same backend, or with none."""
    form = {"form": "today", "denied": list(DENIED)}
    if host_arm.mutant:
        form.update(host_arm.mutant.options)
    ranks = fork_ranks(HERE / "ranks.py", options=form, paths=[HERE / "standin"], preload=PRELOAD)
    about = {"engine": engine_environment.family, "engine_version": engine_environment.version}
    backends = run_to_end(ranks, tmp_path / "bundle", evidence=about)
    if len(set(backends.values())) > 1:
        require([finding(f"the ranks ended with different backends: {backends}", "COLL:BACKENDS_DIFFER")])
