"""Sampling that goes on until the verdict is certain: rounds roll through a window of the last few."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.hang import bundle as bundles
from nvsnap_conformance.hang.sample import promptly, sample_round
from nvsnap_conformance.hang.signs import SURE_ROUNDS
from nvsnap_conformance.hang.verdict import Confidence, Verdict, VerdictKind, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import Rank
    from nvsnap_conformance.hang.collectives import FrameRegistry
    from nvsnap_conformance.hang.model import Bundle, Member, Round

WINDOW = 3
"""Rounds that a verdict needs."""


def follow(
    members: Sequence[Member],
    *,
    folder: Path,
    deadline: Deadline,
    ranks: Sequence[Rank] | None = None,
    interval: float = 0.4,
    most_rounds: int = 8,
    reason: str = "",
    evidence: Mapping[str, Any] | None = None,
    resumed: Callable[[], bool] | None = None,
    registry: FrameRegistry | None = None,
    with_locals: bool = False,
) -> tuple[Bundle, Verdict]:
    """Sample until the last rounds show a hang or a death, and write those rounds as a bundle.

    Ends without a hang after ``most_rounds`` rounds, at ``deadline``, or once ``resumed()`` says that
    progress goes on; the verdict then is that of the last window. Native frames are read once per place, for
    the processes whose Python frames leave open what they wait for; the window grows while in doubt.
    """
    with promptly():
        folder = bundles.create_folder(folder)
        head = bundles.begin_bundle(members, ranks=ranks, reason=reason, evidence=evidence)
        bundles.write_head(head, folder)
        began = time.monotonic()
        window: list[Round] = []
        current, verdict = head, judge(head, registry)
        for index in range(most_rounds):
            if index:
                time.sleep(min(interval, deadline.remaining()))
            unclear = verdict.unclear_pids if len(window) >= WINDOW - 1 else frozenset()
            taken = sample_round(
                members,
                index=index,
                began=began,
                deadline=deadline.sooner(bundles.ROUND_SECONDS),
                native=bool(unclear),
                native_pids=unclear,
                with_locals=with_locals,
            )
            current = bundles.with_round(current, taken)
            bundles.write_round(current.rounds[-1], folder)
            window = [*window, current.rounds[-1]][
                -(WINDOW if verdict.confidence is not Confidence.LOW else SURE_ROUNDS) :
            ]
            current = replace(current, rounds=tuple(window))
            verdict = judge(current, registry)
            found = verdict.is_hang or verdict.kind is VerdictKind.DEAD_RANK
            # A rank that still moves may be on its way to where the others are.
            certain = found and len(window) >= WINDOW and verdict.settled
            if certain or deadline.expired or (resumed is not None and resumed()):
                break
        _keep(folder, window)
        bundles.write_head(current, folder)
        return current, verdict


def _keep(folder: Path, window: list[Round]) -> None:
    """Drop the rounds that rolled out of the window."""
    names = {f"round-{taken.index}.json" for taken in window}
    for path in (folder / "stacks").glob("round-*.json"):
        if path.name not in names:
            path.unlink()
