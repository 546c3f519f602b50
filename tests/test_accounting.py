"""Reports against the observer: every kind of misreport is told, and an honest report holds."""

from __future__ import annotations

from typing import Any

import pytest

from nvsnap_conformance.engines.protocol import RankReply
from nvsnap_conformance.lifecycle import accounting

HELD = {
    "tp:0/device": {"kind": "process-group", "live": True},
    "tp:0/shm": {"kind": "shared-memory-communicator", "live": True},
    "executor/replies": {"kind": "control-queue", "live": True},
    "tp:0/all2all": {"kind": "all2all-manager", "live": False},
}
HONEST = {
    "tp:0/device": "released",
    "tp:0/shm": "released",
    "executor/replies": "unsupported",
    "tp:0/all2all": "absent",
}


def reply(
    rank: int | None, value: Any, *, nonce: str = "n", error: dict[str, str] | None = None
) -> RankReply:
    return RankReply(rank, "n", nonce, value, error)


def report(outcomes: dict[str, str]) -> dict[str, Any]:
    return {"resources": [{"name": name, "outcome": outcome} for name, outcome in outcomes.items()]}


def snapshot(*, without: tuple[str, ...] = (), extra: dict[str, Any] | None = None) -> dict[str, Any]:
    held = {name: entry for name, entry in HELD.items() if name not in without}
    return {"resources": {**held, **(extra or {})}}


def names(found: list[Any]) -> list[str]:
    return [str(finding.signature) for finding in found]


def test_an_honest_cycle_holds() -> None:
    prepare = [reply(rank, report(HONEST)) for rank in (0, 1)]
    before = [reply(rank, snapshot()) for rank in (0, 1)]
    prepared = [reply(rank, snapshot(without=("tp:0/device", "tp:0/shm"))) for rank in (0, 1)]
    assert accounting.check_every_rank(prepare, ranks=2, verb="prepare") == []
    assert accounting.check_outcomes(prepare, verb="prepare", allowed=accounting.PREPARE_OUTCOMES) == []
    assert accounting.check_honest(prepare, before) == []
    assert accounting.check_released(prepare, prepared) == []
    assert accounting.check_rebuilt(before, before) == []


@pytest.mark.parametrize(
    ("change", "signature"),
    [
        ({"tp:0/device": "absent"}, "REPORT:FALSE_ABSENT"),
        ({"tp:0/all2all": "released"}, "REPORT:FALSE_RELEASED"),
        ({"invented": "released"}, "REPORT:FALSE_RELEASED"),
    ],
)
def test_each_false_outcome(change: dict[str, str], signature: str) -> None:
    found = accounting.check_honest([reply(0, report({**HONEST, **change}))], [reply(0, snapshot())])
    assert names(found) == [signature]


def test_a_resource_that_is_left_out() -> None:
    short = {name: outcome for name, outcome in HONEST.items() if name != "tp:0/shm"}
    found = accounting.check_honest([reply(0, report(short))], [reply(0, snapshot())])
    assert names(found) == ["REPORT:UNLISTED"]


def test_released_and_still_there() -> None:
    found = accounting.check_released([reply(0, report(HONEST))], [reply(0, snapshot(without=("tp:0/shm",)))])
    assert names(found) == ["RELEASE:STILL_LIVE"]


def test_unsupported_and_called_released() -> None:
    claimed = report({**HONEST, "executor/replies": "released"})
    gone = snapshot(without=("tp:0/device", "tp:0/shm"))
    assert names(accounting.check_released([reply(0, claimed)], [reply(0, gone)])) == ["RELEASE:STILL_LIVE"]


def test_missing_and_leaked_after_restore() -> None:
    leaked = {"loose/0": {"kind": "process-group", "live": True}}
    after = [reply(0, snapshot(without=("tp:0/device",), extra=leaked))]
    assert names(accounting.check_rebuilt([reply(0, snapshot())], after)) == [
        "RESTORE:MISSING",
        "RESTORE:LEAKED",
    ]


@pytest.mark.parametrize(
    ("replies", "signature"),
    [
        ([reply(0, {})], "REPORT:RANK_MISSING"),
        ([reply(0, {}), reply(0, {}), reply(1, {})], "REPORT:RANK_TWICE"),
        ([reply(0, {}), reply(1, {}, nonce="older")], "RPC:STALE_REPLY"),
        ([], "REPORT:RANK_MISSING"),
    ],
)
def test_replies_of_every_rank(replies: list[RankReply], signature: str) -> None:
    assert signature in names(accounting.check_every_rank(replies, ranks=2, verb="status"))


@pytest.mark.parametrize(
    ("value", "signature"),
    [
        ({}, "REPORT:EMPTY"),
        (None, "REPORT:EMPTY"),
        ("done", "REPORT:EMPTY"),
        (report({"tp:0/device": "ok"}), "REPORT:OUTCOME"),
        (report({"tp:0/device": "failed"}), "REPORT:FAILED"),
    ],
)
def test_outcomes_that_are_no_outcomes(value: Any, signature: str) -> None:
    found = accounting.check_outcomes([reply(0, value)], verb="prepare", allowed=accounting.PREPARE_OUTCOMES)
    assert names(found) == [signature]


@pytest.mark.parametrize("check", [accounting.check_honest, accounting.check_released])
def test_without_an_observation_nothing_passes(check: Any) -> None:
    assert names(check([reply(0, report(HONEST))], [])) == ["REPORT:UNOBSERVED"]
    assert names(accounting.check_rebuilt([], [])) == ["REPORT:UNOBSERVED"]
