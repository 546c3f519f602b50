"""Graphs put off by a restore are captured before anything is compared, and the engine serves in the end."""

from __future__ import annotations

from typing import Any, cast

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RankReply, RequestFailed
from nvsnap_conformance.lifecycle.graphs import CALLS, capture_all, deferred


def reply(rank: int, value: Any) -> RankReply:
    return RankReply(rank=rank, expected_nonce="n", nonce="n", value=value)


def report(*outcomes: str) -> dict[str, Any]:
    return {"resources": [{"name": str(n), "outcome": outcome} for n, outcome in enumerate(outcomes)]}


class Engine:
    """Answers ``recapture`` with these states of two ranks in turn, and with the last ones for ever."""

    def __init__(self, *states: tuple[str | None, str | None]) -> None:
        self.states = list(states)
        self.verbs: list[str] = []

    def quiesce(self, _deadline: Deadline) -> None:
        self.verbs.append("quiesce")

    def resume(self, _deadline: Deadline) -> None:
        self.verbs.append("resume")

    def rpc(self, method: str, **_options: Any) -> list[RankReply]:
        self.verbs.append(method)
        if not self.states:
            raise RequestFailed("the engine is gone", status=None)
        pair = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return [
            reply(rank, None if state is None else {"graphs": {"state": state}})
            for rank, state in enumerate(pair)
        ]


def capture(engine: Engine) -> bool:
    return capture_all(cast("EngineHandle", engine), HooksSpec(), deadline=Deadline.after(5.0))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([report("rebuilt", "deferred"), report("rebuilt")], True),
        ([report("rebuilt"), report("absent")], False),
        ([None, "text", {}], False),
        ([], False),
    ],
)
def test_one_rank_that_puts_off_is_enough(values: list[Any], expected: bool) -> None:
    assert deferred([reply(rank, value) for rank, value in enumerate(values)]) is expected


def test_it_goes_on_until_all_ranks_have_theirs() -> None:
    engine = Engine(("eager", "eager"), ("capturing", "captured"), ("captured", "captured"))
    assert capture(engine)
    assert engine.verbs == ["quiesce", "recapture", "recapture", "recapture", "resume"]


@pytest.mark.parametrize("last", [("failed", "failed"), (None, None), ("captured", "failed")])
def test_what_cannot_be_captured_is_no_success(last: tuple[str | None, str | None]) -> None:
    engine = Engine(("capturing", "capturing"), last)
    assert not capture(engine)
    assert engine.verbs[-1] == "resume"


def test_hooks_that_never_end_are_left() -> None:
    engine = Engine(("capturing", "capturing"))
    assert not capture(engine)
    assert engine.verbs.count("recapture") == CALLS


def test_an_engine_that_fails_is_resumed_all_the_same() -> None:
    engine = Engine()
    with pytest.raises(RequestFailed):
        capture(engine)
    assert engine.verbs == ["quiesce", "recapture", "resume"]
