"""An outside look at a stuck engine, as a diagnosis that a failing case can carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.hang.bundle import collect_bundle
from nvsnap_conformance.hang.verdict import judge
from nvsnap_conformance.lifecycle.observe import Diagnosis
from nvsnap_conformance.outcomes import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.session.pool import LiveEngine

BUNDLE_SECONDS = 30.0


def diagnose_engine(live: LiveEngine, folder: Path, reason: str) -> Diagnosis:
    """Take a stack bundle of every rank of ``live`` and judge it.

    A verdict that is not a hang leaves the outcome ``UNKNOWN``: a deadline alone never says "hang".
    """
    name = live.handle.config.workdir.name  # no other engine of the run has it, in no worker
    place = folder / f"{name}-{len(list(folder.glob(f'{name}-*'))):02d}"
    bundle = collect_bundle(
        live.handle.process.root,
        ranks=live.ranks,
        folder=place,
        deadline=Deadline.after(BUNDLE_SECONDS),
    )
    verdict = judge(bundle)
    outcome = Outcome.HANG if verdict.is_hang else Outcome.UNKNOWN
    return Diagnosis(
        verdict.signature, outcome, f"{reason}\n{verdict.paragraph()}\nbundle: {place}", str(place)
    )
