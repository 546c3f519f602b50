"""What the hooks report against what the observer sees: no outcome is taken on trust.

Reports name resources with an outcome each; the observer names what a rank really holds, by the same
names. ``Worker.checkpoint_prepare`` of vLLM 0.27 to 0.33 returns nothing and skips what it does not know
with a success, which is why these checks exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvsnap_conformance.lifecycle.report_form import check_form
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvsnap_conformance.engines.protocol import RankReply

PREPARE_OUTCOMES = frozenset({"released", "absent", "unsupported", "kept", "failed"})
RESTORE_OUTCOMES = frozenset({"rebuilt", "deferred", "absent", "unsupported", "kept", "failed"})


def check_every_rank(replies: list[RankReply], *, ranks: int, verb: str) -> list[Finding]:
    """Check that every rank answered ``verb`` once, in step, naming itself.

    Findings: ``REPORT:RANK_MISSING``, ``REPORT:RANK_TWICE``, ``RPC:STALE_REPLY``.
    """
    found: list[Finding] = []
    stale = [reply for reply in replies if not reply.in_step]
    if stale:
        found.append(
            finding(
                f"{verb}: {len(stale)} of {len(replies)} replies do not carry the nonce of this call",
                "RPC:STALE_REPLY",
            )
        )
    seen = [reply.rank for reply in replies if reply.rank is not None]
    missing = sorted(set(range(ranks)) - set(seen))
    if missing:
        found.append(
            finding(
                f"{verb}: ranks {missing} gave no outcome of their own; answers came from {sorted(seen)}",
                "REPORT:RANK_MISSING",
                missing=missing,
            )
        )
    twice = sorted({rank for rank in seen if seen.count(rank) > 1})
    if twice:
        found.append(finding(f"{verb}: ranks {twice} answered more than once", "REPORT:RANK_TWICE"))
    return found


def check_outcomes(replies: list[RankReply], *, verb: str, allowed: frozenset[str]) -> list[Finding]:
    """Check that each rank's report lists resources with known outcomes and that none of them failed.

    Findings: ``REPORT:EMPTY``, ``REPORT:OUTCOME``, ``REPORT:FAILED``.
    """
    found: list[Finding] = []
    for reply in replies:
        entries = entries_of(reply)
        if not entries:
            found.append(
                finding(
                    f"{verb}: rank {reply.rank} reports no resource at all ({reply.error or reply.value!r})",
                    "REPORT:EMPTY",
                    rank=reply.rank,
                )
            )
        for name, entry in entries.items():
            outcome = entry.get("outcome")
            # Anything that JSON can say may stand here, also what cannot be looked up in a set.
            known = isinstance(outcome, str) and outcome in allowed
            if not known or (outcome == "deferred" and entry.get("kind") != "cuda-graphs"):
                found.append(
                    finding(
                        f"{verb}: rank {reply.rank}: {name} has the outcome {outcome!r}, "
                        f"not one of {sorted(allowed)}",
                        "REPORT:OUTCOME",
                        rank=reply.rank,
                    )
                )
            elif outcome == "failed":
                found.append(
                    finding(
                        f"{verb}: rank {reply.rank}: {name} failed: {entry.get('detail')}",
                        "REPORT:FAILED",
                        rank=reply.rank,
                    )
                )
    return found


def check_honest(prepare: list[RankReply], before: list[RankReply]) -> list[Finding]:
    """Check prepare's report against what the observer saw before it.

    Findings: ``REPORT:UNLISTED`` (a live resource is not in the report), ``REPORT:FALSE_ABSENT`` (it is
    called absent), ``REPORT:FALSE_RELEASED`` (a resource that the rank did not hold is called released),
    ``REPORT:UNOBSERVED`` (no snapshot of that rank).
    """
    found: list[Finding] = []
    seen = {reply.rank: inventory_of(reply) for reply in before}
    for reply in prepare:
        live = seen.get(reply.rank)
        if not live:
            found.append(
                finding(f"rank {reply.rank}: the observer saw nothing before prepare", "REPORT:UNOBSERVED")
            )
            continue
        entries = entries_of(reply)
        for name in live:
            outcome = entries.get(name, {}).get("outcome")
            if name not in entries:
                found.append(_misreport(reply, name, "is held and not in the report", "REPORT:UNLISTED"))
            elif outcome == "absent":
                found.append(_misreport(reply, name, "is held and called absent", "REPORT:FALSE_ABSENT"))
        found += [
            _misreport(reply, name, "is not held and is called released", "REPORT:FALSE_RELEASED")
            for name, entry in entries.items()
            if entry.get("outcome") == "released" and name not in live
        ]
    return found


def check_released(prepare: list[RankReply], prepared: list[RankReply]) -> list[Finding]:
    """Check that what prepare calls released is gone when the observer looks.

    Findings: ``RELEASE:STILL_LIVE``, ``REPORT:UNOBSERVED``.
    """
    found: list[Finding] = []
    seen = {reply.rank: inventory_of(reply) for reply in prepared if isinstance(reply.value, dict)}
    for reply in prepare:
        if reply.rank not in seen:
            found.append(
                finding(f"rank {reply.rank}: the observer gave no answer after prepare", "REPORT:UNOBSERVED")
            )
            continue
        found += [
            _misreport(reply, name, "is called released and still there", "RELEASE:STILL_LIVE")
            for name, entry in entries_of(reply).items()
            if entry.get("outcome") == "released" and name in seen[reply.rank]
        ]
    return found


def check_rebuilt(
    before: list[RankReply], after: list[RankReply], rebuild: list[RankReply] | None = None
) -> list[Finding]:
    """Check that each rank holds after restore what it held before prepare, no less and no more.

    What ``rebuild``, the reply to restore, calls deferred may be missing: captured graphs come later.

    Findings: ``RESTORE:MISSING``, ``RESTORE:LEAKED``, ``RESTORE:STALE_HANDLE`` (a group that was destroyed is
    still held, or a workspace is over one), ``REPORT:UNOBSERVED``.
    """
    found: list[Finding] = []
    now = {reply.rank: inventory_of(reply) for reply in after if isinstance(reply.value, dict)}
    deferred = {
        reply.rank: {n for n, entry in entries_of(reply).items() if entry.get("outcome") == "deferred"}
        for reply in rebuild or []
    }
    if not before:
        return [finding("the observer saw no rank before prepare", "REPORT:UNOBSERVED")]
    for reply in before:
        if reply.rank not in now:
            found.append(
                finding(f"rank {reply.rank}: the observer gave no answer after restore", "REPORT:UNOBSERVED")
            )
            continue
        old, new = set(inventory_of(reply)), set(now[reply.rank])
        found += [
            _misreport(reply, name, "was held before prepare and is not after restore", "RESTORE:MISSING")
            for name in sorted(old - new - deferred.get(reply.rank, set()))
        ]
        for name in sorted(new):
            was_stale = name in old and _stale(inventory_of(reply)[name])
            if _stale(now[reply.rank][name]) and not was_stale:
                found.append(
                    _misreport(reply, name, "is a handle of a destroyed group", "RESTORE:STALE_HANDLE")
                )
            elif name not in old:
                found.append(
                    _misreport(
                        reply, name, "was not held before prepare and is after restore", "RESTORE:LEAKED"
                    )
                )
    return found


def check_reports(
    prepare: list[RankReply],
    rebuild: list[RankReply],
    statuses: Mapping[str, list[RankReply]],
    *,
    ranks: int,
) -> list[Finding]:
    """Check both reports of a cycle: who gave them, what became of each resource, and their form.

    ``statuses`` are the replies to ``status`` by moment; here only that every rank answered counts, and what
    they say is for :func:`nvsnap_conformance.lifecycle.report_form.check_status`. Findings: those of
    :func:`check_every_rank`, :func:`check_outcomes` and
    :func:`nvsnap_conformance.lifecycle.report_form.check_form`.
    """
    found: list[Finding] = []
    for verb, replies, allowed, reached in (
        ("prepare", prepare, PREPARE_OUTCOMES, "prepared"),
        ("rebuild", rebuild, RESTORE_OUTCOMES, "serving"),
    ):
        found += check_every_rank(replies, ranks=ranks, verb=verb)
        found += check_outcomes(replies, verb=verb, allowed=allowed)
        found += check_form(replies, verb=verb, reached=reached)
    for moment, replies in statuses.items():
        found += check_every_rank(replies, ranks=ranks, verb=f"status ({moment})")
    return found


def check_accounted(prepare: list[RankReply], prepared: list[RankReply]) -> list[Finding]:
    """Check that after a prepare without an error nothing is live but what it calls unsupported or kept.

    Findings: ``RELEASE:UNACCOUNTED``, ``REPORT:UNOBSERVED``. Teardown of some kinds behind a plain success is
    what vLLM's own hooks do, and what cost a restore on real GPUs: a FlashInfer workspace left alone makes
    a checkpoint that succeeds and cannot be restored.
    """
    found: list[Finding] = []
    seen = {reply.rank: inventory_of(reply) for reply in prepared if isinstance(reply.value, dict)}
    for reply in prepare:
        if reply.error is not None:
            continue
        if reply.rank not in seen:
            found.append(
                finding(f"rank {reply.rank}: the observer gave no answer after prepare", "REPORT:UNOBSERVED")
            )
            continue
        entries = entries_of(reply)
        left = [
            name
            for name in seen[reply.rank]
            if entries.get(name, {}).get("outcome") not in ("unsupported", "kept", "failed", "released")
        ]
        if left:
            found.append(
                finding(
                    f"rank {reply.rank} prepared without an error and still holds, not called unsupported: "
                    f"{', '.join(sorted(left))}",
                    "RELEASE:UNACCOUNTED",
                    rank=reply.rank,
                    resources=sorted(left),
                )
            )
    return found


def check_fresh(prepare: list[RankReply], before: list[RankReply], after: list[RankReply]) -> list[Finding]:
    """Check that what was released is a new object after restore, and what was not is the same one.

    Findings: ``RESTORE:NOT_REBUILT`` (called released, and the very object from before is there: it never
    was), ``RESTORE:REPLACED`` (called unsupported, so kept, and another object is there).
    """
    found: list[Finding] = []
    old = {reply.rank: inventory_of(reply) for reply in before}
    new = {reply.rank: inventory_of(reply) for reply in after}
    for reply in prepare:
        for name, entry in entries_of(reply).items():
            was = old.get(reply.rank, {}).get(name, {}).get("identity")
            now = new.get(reply.rank, {}).get(name, {}).get("identity")
            if was is None or now is None:
                continue
            if entry.get("outcome") == "released" and was == now:
                found.append(
                    _misreport(reply, name, "was called released and is the same", "RESTORE:NOT_REBUILT")
                )
            elif entry.get("outcome") == "unsupported" and was != now:
                found.append(_misreport(reply, name, "was to stay and is another one", "RESTORE:REPLACED"))
    return found


def entries_of(reply: RankReply) -> dict[str, dict[str, Any]]:
    """Return a report's resources by name; empty where the reply has none."""
    resources = reply.value.get("resources") if isinstance(reply.value, dict) else None
    if not isinstance(resources, list):
        return {}
    return {str(entry.get("name")): entry for entry in resources if isinstance(entry, dict)}


def inventory_of(reply: RankReply) -> dict[str, dict[str, Any]]:
    """Return the cross-rank resources that the observer saw live on a rank, by name."""
    resources = reply.value.get("resources") if isinstance(reply.value, dict) else None
    if not isinstance(resources, dict):
        return {}
    return {name: entry for name, entry in resources.items() if isinstance(entry, dict) and entry.get("live")}


def is_snapshot(reply: RankReply) -> bool:
    """Return whether a reply is an observer's: a table of resources, be it an empty one."""
    return isinstance(reply.value, dict) and isinstance(reply.value.get("resources"), dict)


def _stale(entry: dict[str, Any]) -> bool:
    """Return whether a group is unknown to torch (any more), or a workspace is over such a one."""
    return entry.get("registered") is False or bool(entry.get("stale_group"))


def _misreport(reply: RankReply, name: str, what: str, signature: str) -> Finding:
    return finding(f"rank {reply.rank}: {name} {what}", signature, rank=reply.rank, resource=name)
