"""The situations in which hooks are judged by themselves, and what is found in each.

Each function drives an engine, or a group of ranks that stands for one, into one situation, leaves it serving
where the hooks let it, and returns findings. The cases of the suite and :mod:`nvsnap_conformance.testing`
call the same ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from nvsnap_conformance.engines.protocol import RequestFailed
from nvsnap_conformance.lifecycle import accounting
from nvsnap_conformance.lifecycle.driver import OBSERVER
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import HooksSpec, RankReply

UNKNOWN_VERSION = "99.0.0"
PRETEND = "pretend_engine_version"
"""The loader's reserved option: the engine version that the hooks are made to see during one call."""

Inventory = dict[int | None, dict[str, Any]]


class Ranks(Protocol):
    """What the situations need of an engine."""

    def rpc(self, method: str, *, hooks: HooksSpec, deadline: Deadline, **arguments: Any) -> list[RankReply]:
        """Call ``method`` of ``hooks`` on every rank."""

    def quiesce(self, deadline: Deadline) -> None:
        """Hold requests."""

    def resume(self, deadline: Deadline) -> None:
        """Serve again."""


def not_imported(engine: Ranks, hooks: HooksSpec, deadline: Deadline) -> RankReply | None:
    """Return the reply of a rank that cannot import ``hooks``, ``None`` where all can.

    A method that no hooks have is asked for, so that none of theirs is run but the constructor.
    """
    for reply in engine.rpc("nvsnap_is_there", hooks=hooks, deadline=deadline):
        error = reply.error or {}
        if error.get("type") == "BadRequest" and "cannot be imported" in error.get("message", ""):
            return reply
    return None


def unpaired_calls(engine: Ranks, hooks: HooksSpec, *, ranks: int, deadline: Deadline) -> list[Finding]:
    """Call restore on a serving engine, and prepare on a prepared one.

    Findings: ``PAIR:ACCEPTED``, ``PAIR:CHANGED``, ``PAIR:FAILED`` (a call in its right place failed).
    """
    engine.quiesce(deadline)
    serving = inventory(engine, deadline)
    found = check_refused(
        engine.rpc("restore", hooks=hooks, deadline=deadline), ranks=ranks, what="restore without prepare"
    )
    found += check_unchanged(serving, inventory(engine, deadline), what="restore without prepare")
    failed = check_succeeded(engine.rpc("prepare", hooks=hooks, deadline=deadline), what="prepare")
    if failed:
        return found + failed
    prepared = inventory(engine, deadline)
    found += check_refused(
        engine.rpc("prepare", hooks=hooks, deadline=deadline), ranks=ranks, what="a second prepare"
    )
    found += check_unchanged(prepared, inventory(engine, deadline), what="a second prepare")
    found += check_succeeded(engine.rpc("restore", hooks=hooks, deadline=deadline), what="restore")
    engine.resume(deadline)
    return found


def failing_call(engine: Ranks, hooks: HooksSpec, *, ranks: int, deadline: Deadline) -> list[Finding]:
    """Make prepare fail on the last rank (it sees an engine version that nobody knows).

    Findings: ``HOOKS:RAISED`` (the failure went through the engine's RPC), ``HOOKS:FAILURE_HIDDEN``, and
    those of :func:`nvsnap_conformance.lifecycle.accounting.check_every_rank`.
    """
    last = ranks - 1
    failing = replace(hooks, options={**hooks.options, PRETEND: {str(last): UNKNOWN_VERSION}})
    engine.quiesce(deadline)
    try:
        replies = engine.rpc("prepare", hooks=failing, deadline=deadline)
    except RequestFailed as error:
        return [finding(f"the hook's failure went through the engine's RPC: {error}", "HOOKS:RAISED")]
    found = accounting.check_every_rank(replies, ranks=ranks, verb="a failing prepare")
    guilty = {reply.rank: reply for reply in replies}.get(last)
    if guilty is None or guilty.error is None:
        found.append(finding(f"rank {last} failed and reports success", "HOOKS:FAILURE_HIDDEN"))
    _take_back(engine, failing, replies, deadline)
    status = engine.rpc("status", hooks=hooks, deadline=deadline)
    found += accounting.check_every_rank(status, ranks=ranks, verb="status after a failure")
    engine.resume(deadline)
    return found


def unknown_version(engine: Ranks, hooks: HooksSpec, *, ranks: int, deadline: Deadline) -> list[Finding]:
    """Show every rank an engine version that nobody knows, and then the engine's own.

    Findings: ``PAIR:ACCEPTED``, those of :func:`accounting.check_rebuilt` (nothing may have changed), and
    ``GATE:KNOWN_REFUSED``: hooks that fail at the engine's own version too have no gate that could be judged.
    """
    unknown = replace(hooks, options={**hooks.options, PRETEND: UNKNOWN_VERSION})
    engine.quiesce(deadline)
    before = engine.rpc("snapshot", hooks=OBSERVER, deadline=deadline)
    replies = engine.rpc("prepare", hooks=unknown, deadline=deadline)
    found = check_refused(replies, ranks=ranks, what=f"prepare on engine version {UNKNOWN_VERSION}")
    found += accounting.check_rebuilt(before, engine.rpc("snapshot", hooks=OBSERVER, deadline=deadline))
    _take_back(engine, unknown, replies, deadline)
    if all(reply.error is not None for reply in replies):
        found += _check_known_version(engine, hooks, deadline)
    engine.resume(deadline)
    return found


def _check_known_version(engine: Ranks, hooks: HooksSpec, deadline: Deadline) -> list[Finding]:
    """Check that the engine's own version is let through; the engine serves again afterwards."""
    for verb in ("prepare", "restore"):
        refused = [reply for reply in engine.rpc(verb, hooks=hooks, deadline=deadline) if reply.error]
        if refused:
            return [
                finding(
                    f"{verb} on the engine's own version fails as on an unknown one, on rank {reply.rank}: "
                    f"{reply.error}",
                    "GATE:KNOWN_REFUSED",
                    rank=reply.rank,
                )
                for reply in refused
            ]
    return []


def _take_back(engine: Ranks, hooks: HooksSpec, replies: list[RankReply], deadline: Deadline) -> None:
    """Restore where any rank took a prepare that was to be refused, so that the engine serves again."""
    if any(reply.error is None for reply in replies):
        engine.rpc("restore", hooks=hooks, deadline=deadline)


def inventory(engine: Ranks, deadline: Deadline) -> Inventory:
    """Return what the observer sees live on each rank."""
    replies = engine.rpc("snapshot", hooks=OBSERVER, deadline=deadline)
    return {reply.rank: accounting.inventory_of(reply) for reply in replies}


def check_refused(replies: list[RankReply], *, ranks: int, what: str) -> list[Finding]:
    """Check that every rank answered with an error value. Finding: ``PAIR:ACCEPTED``."""
    found = accounting.check_every_rank(replies, ranks=ranks, verb=what)
    accepted = [reply.rank for reply in replies if reply.error is None]
    if accepted:
        found.append(finding(f"{what} was accepted by ranks {accepted}", "PAIR:ACCEPTED"))
    return found


def check_unchanged(before: Inventory, after: Inventory, *, what: str) -> list[Finding]:
    """Check that every rank holds the same names. Finding: ``PAIR:CHANGED``."""
    if {rank: sorted(held) for rank, held in before.items()} == {
        rank: sorted(held) for rank, held in after.items()
    }:
        return []
    return [finding(f"{what} was to change nothing; held before {before}, after {after}", "PAIR:CHANGED")]


def check_succeeded(replies: list[RankReply], *, what: str) -> list[Finding]:
    """Check that no rank answered with an error. Finding: ``PAIR:FAILED``."""
    return [
        finding(f"{what} failed on rank {reply.rank}: {reply.error}", "PAIR:FAILED")
        for reply in replies
        if reply.error is not None
    ]
