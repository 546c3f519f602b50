"""Graphs that a restore left to be captured again: having that done now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.lifecycle.accounting import entries_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RankReply

CALLS = 200
"""More calls of ``recapture`` than any engine has graphs for: hooks that never end are told."""


def deferred(replies: Iterable[RankReply]) -> bool:
    """Whether any rank's report says that something comes back later (``deferred``)."""
    return any(
        entry.get("outcome") == "deferred" for reply in replies for entry in entries_of(reply).values()
    )


def capture(
    engine: EngineHandle, hooks: HooksSpec, *, deadline: Deadline, number: int = 64
) -> list[RankReply]:
    """Have dropped graphs of a quiesced engine captured again, ``number`` for each call.

    Returns the last replies: all graphs are there (:func:`captured`), or the hooks have none, cannot, or
    never come to an end. Eager and captured computation need not agree in 16-bit formats, so answers are
    comparable only once the graphs are back.
    """
    replies: list[RankReply] = []
    for _ in range(CALLS):
        replies = engine.rpc("recapture", hooks=hooks, deadline=deadline, number=number)
        states = {_state(reply) for reply in replies}
        if states == {"captured"} or not states <= {"eager", "capturing", "captured"}:
            break
    return replies


def captured(replies: Iterable[RankReply]) -> bool:
    """Whether every rank says that all its graphs are there."""
    return {_state(reply) for reply in replies} == {"captured"}


def capture_all(engine: EngineHandle, hooks: HooksSpec, *, deadline: Deadline) -> bool:
    """Hold requests while dropped graphs are captured again; return whether all are there."""
    engine.quiesce(deadline)
    try:
        return captured(capture(engine, hooks, deadline=deadline))
    finally:
        engine.resume(deadline)


def _state(reply: RankReply) -> str | None:
    graphs = reply.value.get("graphs") if isinstance(reply.value, dict) else None
    state = graphs.get("state") if isinstance(graphs, dict) else None
    return state if isinstance(state, str) else None
