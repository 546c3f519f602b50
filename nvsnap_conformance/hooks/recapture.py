"""What becomes of captured graphs after a restore: observation and checks.

On CPU stand-ins are planted behind the engine's own dispatcher (:mod:`nvsnap_hooks.graph_standins`); on CUDA
the graphs are the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.engines.protocol import HooksSpec, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.lifecycle import accounting, oracle
from nvsnap_conformance.lifecycle.driver import OBSERVER
from nvsnap_conformance.lifecycle.graphs import CALLS
from nvsnap_conformance.outcomes import Finding, Outcome, finding

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import Completion, EngineHandle, RankReply

STAND_INS = HooksSpec("nvsnap_hooks.graph_standins:GraphStandIns")
GRAPHS = "cuda-graphs"
PROMPT = oracle.PROMPTS[0]


@dataclass
class Observation:
    """One cycle with captured graphs.

    ``held`` says whether there were any, ``answers`` what the engine answered ``before``, right after the
    restore (``eager``), ``between`` two calls of recapture, and at the end (``captured``). ``progress`` is
    what each call told on each rank, ``reports`` what happened to stand-ins on each rank, ``None`` on CUDA.
    """

    ranks: int
    held: bool = False
    replies: dict[str, list[RankReply]] = field(default_factory=dict)
    snapshots: dict[str, list[RankReply]] = field(default_factory=dict)
    answers: dict[str, Completion] = field(default_factory=dict)
    progress: list[list[Any]] = field(default_factory=list)
    reports: dict[int, dict[str, Any]] | None = None
    silent: str | None = None


def observe(engine: EngineHandle, hooks: HooksSpec, *, deadline: Deadline) -> Observation:
    """Prepare and restore an engine that holds graphs, and have them captured again while it serves."""
    seen = Observation(engine.config.tensor_parallel)
    answer(engine, seen, "before", deadline)
    engine.quiesce(deadline)
    planted = all(
        value["planted"] for value in _values(engine.rpc("plant", hooks=STAND_INS, deadline=deadline))
    )
    snapshot(engine, seen, "before", deadline)
    seen.held = all(GRAPHS in accounting.inventory_of(reply) for reply in seen.snapshots["before"])
    if seen.held:
        for verb in ("prepare", "restore"):
            seen.replies[verb] = engine.rpc(verb, hooks=hooks, deadline=deadline)
        engine.resume(deadline)
        try:
            answer(engine, seen, "eager", deadline)
            _capture(engine, hooks, seen, deadline)
            answer(engine, seen, "captured", deadline)
        except (DeadlineExceeded, RequestFailed) as error:
            seen.silent = str(error)
            return seen
        snapshot(engine, seen, "after", deadline)
        engine.quiesce(deadline)
    if planted:
        told = engine.rpc("report", hooks=STAND_INS, deadline=deadline)
        seen.reports = {reply.rank: reply.value for reply in told if reply.rank is not None}
        engine.rpc("remove", hooks=STAND_INS, deadline=deadline)
    engine.resume(deadline)
    return seen


def _capture(engine: EngineHandle, hooks: HooksSpec, seen: Observation, deadline: Deadline) -> None:
    """Call ``recapture`` until it has nothing left to do, between requests, and serve in between."""
    for _ in range(CALLS):
        engine.quiesce(deadline)
        replies = engine.rpc("recapture", hooks=hooks, deadline=deadline)
        engine.resume(deadline)
        told = [reply.value.get("graphs") if isinstance(reply.value, dict) else None for reply in replies]
        seen.progress.append(told)
        # Hooks without that verb, or without graphs to make, are judged by what is there at the end.
        if any(not isinstance(one, dict) or one.get("state") in ("captured", "failed") for one in told):
            return
        answer(engine, seen, "between", deadline)


def check_come_back(seen: Observation) -> list[Finding]:
    """Check that graphs that are gone after a restore are there again in the end, and that answers are right.

    Findings: ``GRAPHS:NONE`` (unknown), ``CYCLE:<VERB>``, ``GRAPHS:NO_ANSWER``, ``GRAPHS:NOT_BACK``,
    ``GRAPHS:DISPATCHED_EARLY`` (the engine might have replayed one while not all were there), and
    ``ORACLE:TOKENS``.
    """
    if not seen.held:
        what = "its target launches it to capture graphs, and the engine holds none on some rank"
        return [finding(what, "GRAPHS:NONE", outcome=Outcome.UNKNOWN)]
    for verb in ("prepare", "restore"):
        failed = [reply for reply in seen.replies.get(verb, []) if reply.error is not None]
        if failed or verb not in seen.replies:
            return [finding(f"{verb} did not succeed: {failed}", f"CYCLE:{verb.upper()}")]
    if seen.silent:
        return [finding(f"the engine did not serve after the restore: {seen.silent}", "GRAPHS:NO_ANSWER")]
    told = f"recapture told {seen.progress[-1:]}"
    found = [
        finding(f"rank {reply.rank} holds no captured graph any more; {told}", "GRAPHS:NOT_BACK")
        for reply in seen.snapshots["after"]
        if GRAPHS not in accounting.inventory_of(reply)
    ]
    for rank, report in (seen.reports or {}).items():
        if report["captured"] < report["wanted"] and not found:
            found.append(
                finding(
                    f"rank {rank} has {report['captured']} of {report['wanted']} graphs", "GRAPHS:NOT_BACK"
                )
            )
        if report["early"]:
            found.append(
                finding(
                    f"rank {rank}: {report['early']} of {report['served']} dispatches might have gone to a "
                    "graph while not all were there",
                    "GRAPHS:DISPATCHED_EARLY",
                )
            )
    return found + _check_tokens(seen)


def _check_tokens(seen: Observation) -> list[Finding]:
    """Compare graphs with graphs and eager with eager: in 16 bits the two need not give the same tokens."""
    alike = [("before", "captured"), ("eager", "between")]
    if seen.reports is not None:  # a stand-in's graphs compute nothing
        alike.append(("before", "eager"))
    return [
        finding(f"{other}: {seen.answers[other].tokens}, {one}: {seen.answers[one].tokens}", "ORACLE:TOKENS")
        for one, other in alike
        if other in seen.answers and seen.answers[one].tokens != seen.answers[other].tokens
    ]


def answer(engine: EngineHandle, seen: Observation, moment: str, deadline: Deadline) -> None:
    """Ask one prompt."""
    (seen.answers[moment],) = engine.generate([PROMPT], max_tokens=oracle.MAX_TOKENS, deadline=deadline)


def snapshot(engine: EngineHandle, seen: Observation, moment: str, deadline: Deadline) -> None:
    """Have the observer look."""
    seen.snapshots[moment] = engine.rpc("snapshot", hooks=OBSERVER, deadline=deadline)


def _values(replies: list[RankReply]) -> list[dict[str, Any]]:
    for reply in replies:
        if reply.error is not None:
            raise RuntimeError(f"the stand-ins failed on rank {reply.rank}: {dict(reply.error)}")
    return [reply.value for reply in replies]
