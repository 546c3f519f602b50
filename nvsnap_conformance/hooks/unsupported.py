"""A workspace that says itself that it cannot be torn down here: who tells, and what serves afterwards.

FlashInfer's ``checkpoint_prepare`` raises ``NotImplementedError`` where a workspace lies in torch's symmetric
memory (0.6.15 to 0.7.2); vLLM's hooks hand that on. The stand-ins (:mod:`nvsnap_hooks.standins`) do the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvsnap_conformance.engines.protocol import RequestFailed
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.hooks import standins
from nvsnap_conformance.lifecycle import accounting, oracle
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import Completion, EngineHandle, HooksSpec, RankReply

KIND = "flashinfer-workspace"
PROMPT = oracle.PROMPTS[0]
ANSWER_SECONDS = 20.0
"""Allowance for one short answer, in seconds; a serving engine on CPU gives it in well under one."""

_NAMES = ("NotImplementedError", "workspace", "symmetric memory")
"""What an error may name: the error as it was raised, what cannot be torn down, or why."""


@dataclass
class Observation:
    """A cycle over workspaces that cannot be torn down, and an answer before and after it.

    ``failure`` says why there was no answer afterwards.
    """

    cycle: standins.Observation
    before: Completion
    after: Completion | None = None
    failure: str | None = None


def observe(engine: EngineHandle, hooks: HooksSpec, *, deadline: Deadline) -> Observation:
    """Ask, drive one cycle over such workspaces, and ask again, whatever became of the cycle."""
    before = _answer(engine, deadline)
    seen = Observation(standins.observe(engine, hooks, deadline=deadline, unsupported=True), before)
    if seen.cycle.silent or seen.cycle.raised:
        # Its workers are still in the call, or no longer answer in step.
        seen.failure = seen.cycle.silent or seen.cycle.raised
        return seen
    try:
        seen.after = _answer(engine, deadline)
    except (RequestFailed, NvsnapError) as error:
        seen.failure = f"{type(error).__name__}: {error}"
    return seen


def check_told(seen: Observation) -> list[Finding]:
    """Check that every rank said so: by the outcome ``unsupported``, or by an error that names it.

    Findings: ``UNSUPPORTED:UNTOLD``, ``UNSUPPORTED:UNNAMED``.
    """
    replies = {reply.rank: reply for reply in seen.cycle.replies.get("prepare", [])}
    found: list[Finding] = []
    for rank in range(seen.cycle.ranks):
        reply = replies.get(rank)
        problem = None if reply is None else _problem(reply)
        if problem is not None and not any(name in problem for name in _NAMES):
            found.append(
                finding(f"rank {rank} fails without naming what is missing: {problem}", "UNSUPPORTED:UNNAMED")
            )
        elif problem is None and (reply is None or not _reports_unsupported(reply)):
            told = None if reply is None else reply.value
            found.append(
                finding(
                    f"rank {rank} passes over a workspace that it cannot tear down: {told}",
                    "UNSUPPORTED:UNTOLD",
                )
            )
    return found


def check_serves_on(seen: Observation) -> list[Finding]:
    """Check that the engine answers as before, and that its workspaces are as they were.

    Findings: ``UNSUPPORTED:NOT_SERVING``, ``ORACLE:TOKENS``, ``UNSUPPORTED:WORKSPACE``.
    """
    if seen.after is None:
        return [finding(f"the engine does not answer any more: {seen.failure}", "UNSUPPORTED:NOT_SERVING")]
    found: list[Finding] = []
    if seen.after.tokens != seen.before.tokens:
        found.append(finding(f"before {seen.before.tokens}, after {seen.after.tokens}", "ORACLE:TOKENS"))
    reports = seen.cycle.reports.get("after") or seen.cycle.reports.get("prepared", {})
    for rank, report in reports.items():
        found += [
            finding(f"rank {rank}: workspace {name} is {workspace}", "UNSUPPORTED:WORKSPACE", rank=rank)
            for name, workspace in report["workspaces"].items()
            # Hooks that left the groups alone need not follow one that was made anew in between.
            if not (all(workspace["mapped"]) and (workspace["current"] or seen.cycle.renewed))
        ]
    return found


def _answer(engine: EngineHandle, deadline: Deadline) -> Completion:
    (answer,) = engine.generate(
        [PROMPT], max_tokens=oracle.MAX_TOKENS, deadline=deadline.sooner(ANSWER_SECONDS)
    )
    return answer


def _problem(reply: RankReply) -> str | None:
    """Return what a reply that is no success says of it, ``None`` for a success."""
    if reply.error is not None:
        return f"{reply.error.get('type')}: {reply.error.get('message')}"
    if isinstance(reply.value, dict) and reply.value.get("state") == "failed":
        return str(reply.value.get("problem"))
    return None


def _reports_unsupported(reply: RankReply) -> bool:
    return any(
        entry.get("kind") == KIND and entry.get("outcome") == "unsupported"
        for entry in accounting.entries_of(reply).values()
    )
