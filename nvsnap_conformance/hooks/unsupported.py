"""A workspace that says itself that it cannot be torn down here: who tells, and what serves afterwards.

FlashInfer's ``checkpoint_prepare`` raises ``NotImplementedError`` where a workspace lies in torch's symmetric
memory (0.6.15 to 0.7.2); vLLM's hooks hand that on. The stand-ins (:mod:`nvsnap_hooks.standins`) do the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvsnap_conformance.engines.protocol import RequestFailed
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.hooks import standins
from nvsnap_conformance.hooks.released import check_observed
from nvsnap_conformance.lifecycle import accounting, oracle
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import Completion, EngineHandle, HooksSpec, RankReply

KIND = "flashinfer-workspace"
NAME = "flashinfer/normal"
"""The observer's name of the workspace that is planted; it is in both of vLLM's slots."""

PROMPT = oracle.PROMPTS[0]
ANSWER_SECONDS = 20.0
"""Allowance for one short answer, in seconds; a serving engine on CPU gives it in well under one."""

_NAMED = re.compile(
    rf"NotImplementedError|symmetric[ -]memory|(?<![\w/.])({NAME}|flashinfer[ -]workspace)(?![\w/])",
    re.IGNORECASE,
)
"""What an error may name: the error as it was raised, why, or what cannot be torn down, as such and not as a
part of a path or of a key that is missing."""


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
    """Check that every rank said so: by the outcome ``unsupported`` of that workspace, or by an error's name.

    Findings: ``UNSUPPORTED:UNTOLD``, ``UNSUPPORTED:UNNAMED``.
    """
    replies = {reply.rank: reply for reply in seen.cycle.replies.get("prepare", [])}
    found: list[Finding] = []
    for rank in range(seen.cycle.ranks):
        reply = replies.get(rank)
        problem = None if reply is None else _problem(reply)
        if problem is not None and not _NAMED.search(problem):
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

    Findings: ``UNSUPPORTED:NOT_SERVING``, ``ORACLE:TOKENS``, ``UNSUPPORTED:WORKSPACE``,
    ``REPORT:UNOBSERVED`` (nobody looked at a rank's workspaces).
    """
    if seen.after is None:
        return [finding(f"the engine does not answer any more: {seen.failure}", "UNSUPPORTED:NOT_SERVING")]
    found: list[Finding] = []
    if seen.after.tokens != seen.before.tokens:
        found.append(finding(f"before {seen.before.tokens}, after {seen.after.tokens}", "ORACLE:TOKENS"))
    last = "after" if "after" in seen.cycle.reports else "prepared"
    found += check_observed(seen.cycle, last)
    for rank, report in seen.cycle.reports.get(last, {}).items():
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
    entry = accounting.entries_of(reply).get(NAME, {})
    return (entry.get("kind"), entry.get("outcome")) == (KIND, "unsupported")
