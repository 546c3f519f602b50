"""Cycles over stand-ins for what only GPUs hold, in a real engine on CPU: observations and checks.

What is planted, and why the engine's own hooks find it: :mod:`nvsnap_hooks.standins`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RankReply, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.hooks.released import (
    check_anything_released,
    check_observed,
    failed_ranks,
    silent_ranks,
)
from nvsnap_conformance.lifecycle import accounting
from nvsnap_conformance.lifecycle.driver import OBSERVER
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline

STAND_INS = HooksSpec("nvsnap_hooks.standins:StandIns")

VERB_SECONDS = 25.0
"""Allowance of one call, in seconds. The shipped hooks bound each wait by what they are told, or by 20 s."""

Reports = dict[int, dict[str, Any]]
"""By rank, what :meth:`nvsnap_hooks.standins.StandIns.report` says."""


@dataclass
class Observation:
    """One cycle over stand-ins.

    ``replies`` maps ``prepare`` and ``restore`` to what the ranks answered, ``snapshots`` a moment
    (``before``, ``prepared``, ``after``) to what the observer saw, ``reports`` the same moments to what had
    happened to the stand-ins. ``silent`` is the call that did not end in time. ``renewed`` says that the
    workspace's group was made anew between the two, the hooks having left it alone.
    """

    ranks: int
    replies: dict[str, list[RankReply]] = field(default_factory=dict)
    snapshots: dict[str, list[RankReply]] = field(default_factory=dict)
    reports: dict[str, Reports] = field(default_factory=dict)
    renewed: bool = False
    silent: str | None = None
    raised: str | None = None


def observe(
    engine: EngineHandle,
    hooks: HooksSpec,
    *,
    deadline: Deadline,
    verb_seconds: float = VERB_SECONDS,
    **plant: Any,
) -> Observation:
    """Plant (``plant`` are :meth:`nvsnap_hooks.standins.StandIns.plant`'s), drive one cycle, take them out.

    The engine serves afterwards unless the hooks have failed or a call did not end.
    """
    seen = Observation(engine.config.tensor_parallel)
    engine.quiesce(deadline)
    _values(engine.rpc("plant", hooks=STAND_INS, deadline=deadline, **plant))
    _look(engine, seen, "before", deadline)
    for verb, moment in (("prepare", "prepared"), ("restore", "after")):
        try:
            seen.replies[verb] = engine.rpc(verb, hooks=hooks, deadline=deadline.sooner(verb_seconds))
        except DeadlineExceeded as error:
            # Its workers are still in it: nothing more can be asked of this engine.
            seen.silent = f"{verb}: {error.what}"
            return seen
        except RequestFailed as error:
            seen.raised = f"{verb}: {error}"
            return seen
        _look(engine, seen, moment, deadline)
        if failed_ranks(seen.replies[verb]):
            break
        if verb == "prepare":
            told = _values(engine.rpc("renew_group", hooks=STAND_INS, deadline=deadline))
            seen.renewed = any(value.get("renewed") for value in told.values())
    _values(engine.rpc("remove", hooks=STAND_INS, deadline=deadline))
    engine.resume(deadline)
    return seen


def check_completed(seen: Observation) -> list[Finding]:
    """Check that both calls succeeded on every rank, and that all of them were looked at afterwards.

    Findings: ``CYCLE:<VERB>``, ``REPORT:UNOBSERVED``.
    """
    if seen.silent or seen.raised:
        what = seen.silent or seen.raised or ""
        return [finding(f"the cycle ended early: {what}", f"CYCLE:{what.partition(':')[0].upper()}")]
    for verb in ("prepare", "restore"):
        failed = failed_ranks(seen.replies.get(verb, []))
        silent = silent_ranks(seen.replies.get(verb, []), seen.ranks)
        if failed or silent:
            what = f"{verb} did not succeed: {failed}" if failed else f"{verb}: ranks {silent} did not answer"
            return [finding(what, f"CYCLE:{verb.upper()}")]
    return check_observed(seen, "prepared", "after")


def check_order(seen: Observation) -> list[Finding]:
    """Check that no group was destroyed while a graph or a workspace that uses it was there.

    Findings: ``ORDER:GROUP_BEFORE_GRAPH``, ``ORDER:GROUP_BEFORE_WORKSPACE``.
    """
    found: list[Finding] = []
    for rank, report in seen.reports.get("prepared", {}).items():
        kinds = [event["what"] for event in report["events"]]
        if "destroy-group" not in kinds:
            continue
        before = kinds[: kinds.index("destroy-group")]
        for event, code in (("graph-dropped", "GRAPH"), ("workspace-prepare", "WORKSPACE")):
            if event not in before:
                found.append(
                    finding(
                        f"rank {rank} destroyed a group before {event}; its calls: {kinds}",
                        f"ORDER:GROUP_BEFORE_{code}",
                    )
                )
    return found


def check_rebuild_order(seen: Observation) -> list[Finding]:
    """Check that no workspace was mapped again before the groups were made.

    Findings: ``ORDER:WORKSPACE_BEFORE_GROUP``.
    """
    found: list[Finding] = []
    for rank, report in seen.reports.get("after", {}).items():
        kinds = [event["what"] for event in report["events"]]
        if "new-group" not in kinds and "destroy-group" not in kinds:
            continue
        last = max((index for index, kind in enumerate(kinds) if kind == "new-group"), default=len(kinds))
        if "workspace-restore" in kinds[:last]:
            found.append(
                finding(
                    f"rank {rank} mapped a workspace before its groups were made; its calls: {kinds}",
                    "ORDER:WORKSPACE_BEFORE_GROUP",
                )
            )
    return found


def check_same_order(seen: Observation) -> list[Finding]:
    """Check that every rank destroyed, and made, groups in one order. Finding: ``ORDER:RANKS_DIFFER``."""
    found: list[Finding] = []
    reports = seen.reports.get("after") or seen.reports.get("prepared", {})
    for what in ("destroy-group", "new-group"):
        orders = {
            rank: [event["name"] for event in report["events"] if event["what"] == what]
            for rank, report in reports.items()
        }
        if len({tuple(order) for order in orders.values()}) > 1:
            found.append(finding(f"{what}: the ranks differ in their order: {orders}", "ORDER:RANKS_DIFFER"))
    return found


def check_alias_once(seen: Observation) -> list[Finding]:
    """Check that a workspace in two slots was prepared and restored once. Finding: ``ALIAS:TWICE``."""
    found: list[Finding] = []
    for rank, report in (seen.reports.get("after") or seen.reports.get("prepared", {})).items():
        for what in ("workspace-prepare", "workspace-restore"):
            calls = [event["name"] for event in report["events"] if event["what"] == what]
            if len(calls) > 1:
                found.append(finding(f"rank {rank}: {what} was called {len(calls)} times", "ALIAS:TWICE"))
    return found


def check_released(seen: Observation) -> list[Finding]:
    """Check that graphs and workspaces are gone, or told as unsupported, after prepare.

    Findings: those of :func:`accounting.check_accounted` and :func:`accounting.check_released`.
    """
    prepare, prepared = seen.replies.get("prepare", []), seen.snapshots.get("prepared", [])
    return accounting.check_accounted(prepare, prepared) + accounting.check_released(prepare, prepared)


def check_follows_group(seen: Observation) -> list[Finding]:
    """Check that after a restore without an error each workspace is mapped, over the group in force.

    Findings: ``RESTORE:STALE_GROUP``, ``RESTORE:UNMAPPED``.
    """
    found: list[Finding] = []
    for rank, report in seen.reports.get("after", {}).items():
        for name, workspace in report["workspaces"].items():
            if not all(workspace["mapped"]):
                why = " (its group was made anew in between)" if seen.renewed else ""
                found.append(
                    finding(
                        f"rank {rank}: restore succeeded, and workspace {name} is not mapped{why}",
                        "RESTORE:UNMAPPED",
                    )
                )
            elif not workspace["current"]:
                found.append(
                    finding(f"rank {rank}: workspace {name} is over an old group", "RESTORE:STALE_GROUP")
                )
    return found


def check_exchange(seen: Observation) -> list[Finding]:
    """Check that the all-to-all manager went and came back as an object, and no other of its class with it.

    Findings: ``EXCHANGE:STILL_ALIVE`` (it is called released, and exists), ``EXCHANGE:MISSING`` (nothing is
    in its place after restore), ``EXCHANGE:NOT_HANDED_OUT`` (what held it holds something else than its
    communicator), ``EXCHANGE:STALE_GROUP`` (it is over a group that is not in force), ``EXCHANGE:MIXED_UP``
    (another manager of its class was taken for it). One that stays is judged by the same but for the first.
    """
    found: list[Finding] = []
    outcomes = {
        reply.rank: {name: entry.get("outcome") for name, entry in accounting.entries_of(reply).items()}
        for reply in seen.replies.get("prepare", [])
    }
    for rank, report in seen.reports.get("prepared", {}).items():
        told = report["all2all"]
        if told["alive"] and outcomes.get(rank, {}).get(told["name"]) == "released":
            found.append(
                finding(f"rank {rank}: {told['name']} is called released and exists", "EXCHANGE:STILL_ALIVE")
            )
    for rank, report in seen.reports.get("after", {}).items():
        told = report["all2all"]
        what = f"rank {rank}: {told['name']}"
        if not told["there"]:
            found.append(finding(f"{what} is not there after restore", "EXCHANGE:MISSING"))
            continue
        if not told["shared"]:
            found.append(
                finding(f"{what}: a kernel that had held it holds something else", "EXCHANGE:NOT_HANDED_OUT")
            )
        # Hooks that have left the groups alone need not follow one that somebody else made anew.
        if seen.renewed:
            continue
        if not told["current"]:
            found.append(finding(f"{what} is over a group that is not in force", "EXCHANGE:STALE_GROUP"))
        if not told["apart"]:
            found.append(
                finding(f"{what}: another manager of its class was mixed up in it", "EXCHANGE:MIXED_UP")
            )
    return found


def check_failure_told(seen: Observation, *, rank: int, what: str, nth: int = 0) -> list[Finding]:
    """Check that a failure on one rank ended the call on all of them in time, and all say so.

    Findings: ``FAILURE:UNBOUNDED``, ``FAILURE:RAISED``, ``FAILURE:HIDDEN``. Hooks that never come to the call
    that was to fail have nothing to tell; then the cycle must have succeeded (:func:`check_completed`).
    """
    if seen.silent:
        return [finding(f"{what} failed on rank {rank}: {seen.silent}", "FAILURE:UNBOUNDED")]
    if seen.raised:
        return [finding(f"{what} failed on rank {rank}: {seen.raised}", "FAILURE:RAISED")]
    calls = max(
        (
            sum(event["what"] == what for event in reports.get(rank, {}).get("events", []))
            for reports in seen.reports.values()
        ),
        default=0,
    )
    if calls <= nth:
        return check_completed(seen) or check_anything_released(seen)
    last = seen.replies.get("restore") or seen.replies.get("prepare", [])
    told = set(failed_ranks(last))
    quiet = sorted(set(range(seen.ranks)) - told)
    if quiet:
        return [finding(f"{what} failed on rank {rank}; ranks {quiet} report success", "FAILURE:HIDDEN")]
    return []


def check_backends_agree(seen: Observation) -> list[Finding]:
    """Check that ranks whose workspaces are of different backends were refused in time, untouched.

    The backends differ in their number of barriers, so going on pairs a barrier with another one. Findings:
    ``BACKENDS:UNBOUNDED``, ``BACKENDS:ACCEPTED``, ``BACKENDS:TOUCHED``, ``REPORT:UNOBSERVED``.
    """
    if seen.silent or seen.raised:
        return [finding(f"workspaces of two backends: {seen.silent or seen.raised}", "BACKENDS:UNBOUNDED")]
    accepted = sorted(set(range(seen.ranks)) - set(failed_ranks(seen.replies.get("prepare", []))))
    found = check_observed(seen, "prepared")
    if accepted:
        found.append(finding(f"ranks {accepted} prepared workspaces of two backends", "BACKENDS:ACCEPTED"))
    for rank, report in seen.reports.get("prepared", {}).items():
        if report["events"]:
            found.append(finding(f"rank {rank} had begun: {report['events']}", "BACKENDS:TOUCHED"))
    return found


def _look(engine: EngineHandle, seen: Observation, moment: str, deadline: Deadline) -> None:
    seen.snapshots[moment] = engine.rpc("snapshot", hooks=OBSERVER, deadline=deadline)
    seen.reports[moment] = _values(engine.rpc("report", hooks=STAND_INS, deadline=deadline))


def _values(replies: list[RankReply]) -> Reports:
    """Return the values by rank; the suite's own part must work, so an error here is the suite's."""
    for reply in replies:
        if reply.error is not None:
            raise RuntimeError(f"the stand-ins failed on rank {reply.rank}: {dict(reply.error)}")
    return {reply.rank: reply.value for reply in replies if reply.rank is not None}
