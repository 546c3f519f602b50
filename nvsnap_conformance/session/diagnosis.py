"""An outside look at a stuck engine, as a diagnosis that a failing case can carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.hang.discover import discover
from nvsnap_conformance.hang.follow import follow
from nvsnap_conformance.lifecycle.observe import Diagnosis
from nvsnap_conformance.outcomes import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.engines.protocol import EngineHandle, Rank
    from nvsnap_conformance.session.pool import LiveEngine

BUNDLE_SECONDS = 30.0


def diagnose_engine(live: LiveEngine, folder: Path, reason: str) -> Diagnosis:
    """Sample every rank of ``live`` and judge that, see :func:`diagnose_ranks`."""
    return diagnose_ranks(live.handle, live.ranks, folder, reason)


def diagnose_ranks(engine: EngineHandle, ranks: list[Rank], folder: Path, reason: str) -> Diagnosis:
    """Sample ``ranks`` until it is certain where they stand, into a bundle below ``folder``, and judge that.

    A verdict that is not a hang leaves the outcome ``UNKNOWN``: a deadline alone never says "hang".
    """
    name = engine.config.workdir.name  # no other engine of the run has it, in no worker
    place = folder / f"{name}-{len(list(folder.glob(f'{name}-*'))):02d}"
    _, verdict = follow(
        discover(engine.process.root, ranks),
        folder=place,
        deadline=Deadline.after(BUNDLE_SECONDS),
        ranks=ranks,
        reason=reason,
    )
    outcome = Outcome.HANG if verdict.is_hang else Outcome.UNKNOWN
    return Diagnosis(
        verdict.signature, outcome, f"{reason}\n{verdict.paragraph()}\nbundle: {place}", str(place)
    )
