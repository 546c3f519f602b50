"""Whether there is anything to judge in a cycle over stand-ins: who answered, what was seen, what went.

Hooks that release nothing break no order, follow no stale group and visit nothing twice. So the clauses about
how something is released ask first whether it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.lifecycle import accounting
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.engines.protocol import RankReply
    from nvsnap_conformance.hooks.standins import Observation

_KINDS = frozenset({"process-group", "flashinfer-workspace", "cuda-graphs", "all2all-manager"})
"""Kinds of what a cycle over stand-ins is about: what is planted, and the groups that it is over."""

_LEFT = frozenset({"unsupported", "kept"})
"""Outcomes by which hooks say truly that they leave something alone."""


def failed_ranks(replies: list[RankReply]) -> dict[int, str]:
    """Return by rank why it did not succeed: an error value, or a report whose state says so."""
    found: dict[int, str] = {}
    for reply in replies:
        state = reply.value.get("state") if isinstance(reply.value, dict) else None
        if reply.rank is not None and (reply.error is not None or state == "failed"):
            found[reply.rank] = str(dict(reply.error) if reply.error else reply.value.get("problem"))[:300]
    return found


def silent_ranks(replies: list[RankReply], ranks: int) -> list[int]:
    """Return the ranks that have not answered this call."""
    return sorted(set(range(ranks)) - {reply.rank for reply in replies if reply.in_step})


def check_observed(seen: Observation, *moments: str) -> list[Finding]:
    """Check that at each moment every rank's stand-ins were looked at. Finding: ``REPORT:UNOBSERVED``."""
    found: list[Finding] = []
    for moment in moments:
        reports = seen.reports.get(moment, {})
        blind = [rank for rank in range(seen.ranks) if not reports.get(rank, {}).get("workspaces")]
        if blind:
            what = f"nobody saw the stand-ins of ranks {blind} at the moment {moment!r}"
            found.append(finding(what, "REPORT:UNOBSERVED", missing=blind))
    return found


def check_anything_released(seen: Observation) -> list[Finding]:
    """Check that a prepare that succeeded released something on every rank, or says that it left all of it.

    Left is what the report calls unsupported or kept, each by the observer's name. Finding:
    ``RELEASE:NOTHING``.
    """
    found: list[Finding] = []
    failed = failed_ranks(seen.replies.get("prepare", []))
    told = {reply.rank: accounting.entries_of(reply) for reply in seen.replies.get("prepare", [])}
    held = {reply.rank: accounting.inventory_of(reply) for reply in seen.snapshots.get("before", [])}
    for rank, report in seen.reports.get("prepared", {}).items():
        if rank in failed or report["events"] or not report["all2all"]["alive"]:
            continue
        there = [name for name, entry in held.get(rank, {}).items() if entry.get("kind") in _KINDS]
        untold = [n for n in there if told.get(rank, {}).get(n, {}).get("outcome") not in _LEFT]
        if untold or not there:
            found.append(
                finding(
                    f"rank {rank} prepared without an error, nothing was seen to be released, and its report "
                    f"does not call unsupported: {', '.join(sorted(untold)) or 'what was to be released'}",
                    "RELEASE:NOTHING",
                    rank=rank,
                )
            )
    return found
