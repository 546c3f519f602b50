"""Hooks that are asked for a teardown which the engine's library cannot do.

What stands for the library: :mod:`nvsnap_hooks.nccl_standins`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nvsnap_conformance.hooks.released import check_observed
from nvsnap_conformance.lifecycle import accounting
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.engines.protocol import HooksSpec, RankReply
    from nvsnap_conformance.hooks.standins import Observation

SUSPEND = "ncclCommSuspend"


def asked_to_suspend(hooks: HooksSpec) -> HooksSpec:
    """Return the same hooks, asked to suspend NCCL's communicators in place of destroying them."""
    return replace(hooks, options={**hooks.options, "teardown": {"nccl": "suspended"}})


def check_refused(seen: Observation, *, named: str = SUSPEND) -> list[Finding]:
    """Check that every rank refused in time, by the name of what is missing, before it had begun.

    Findings: ``TEARDOWN:UNBOUNDED``, ``TEARDOWN:RAISED``, ``TEARDOWN:ACCEPTED``, ``TEARDOWN:UNNAMED``,
    ``TEARDOWN:TOUCHED``, ``REPORT:UNOBSERVED`` (nobody looked at what a rank holds).
    """
    if seen.silent or seen.raised:
        code = "UNBOUNDED" if seen.silent else "RAISED"
        return [finding(f"asked for what is not there: {seen.silent or seen.raised}", f"TEARDOWN:{code}")]
    replies = {reply.rank: reply for reply in seen.replies.get("prepare", [])}
    found: list[Finding] = []
    for rank in range(seen.ranks):
        reply = replies.get(rank)
        if reply is None or not reply.error:
            told = None if reply is None else reply.value
            found.append(
                finding(f"rank {rank} was asked for {named}, has none, and says {told}", "TEARDOWN:ACCEPTED")
            )
        elif named not in reply.error.get("message", ""):
            found.append(
                finding(
                    f"rank {rank} refuses without naming {named}: {dict(reply.error)}", "TEARDOWN:UNNAMED"
                )
            )
    return found or _check_untouched(seen)


def _check_untouched(seen: Observation) -> list[Finding]:
    before, after = _held(seen, "before"), _held(seen, "prepared")
    blind = [rank for rank in range(seen.ranks) if not before.get(rank) or rank not in after]
    if blind:
        return [finding(f"nobody saw what ranks {blind} hold before and after", "REPORT:UNOBSERVED")]
    if before != after:
        what = f"before {before}, after the refusal {after}"
        return [finding(f"what the ranks hold has changed: {what}", "TEARDOWN:TOUCHED")]
    return check_observed(seen, "prepared") + [
        finding(f"rank {rank} had begun: {report['events']}", "TEARDOWN:TOUCHED")
        for rank, report in seen.reports.get("prepared", {}).items()
        if report["events"]
    ]


def _held(seen: Observation, moment: str) -> dict[int | None, dict[str, object]]:
    """Return by rank what the observer saw, with the identity of each resource."""
    replies: list[RankReply] = seen.snapshots.get(moment, [])
    return {
        reply.rank: {name: entry.get("identity") for name, entry in accounting.inventory_of(reply).items()}
        for reply in replies
        if accounting.is_snapshot(reply)
    }
