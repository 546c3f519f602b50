"""The lifecycle's state machine: what it accepts, and each way in which a trace can break it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvsnap_conformance.lifecycle.trace import ORDER, PER_RANK, Event, Verb, check_order, wanted

FULL = (Verb.QUIESCE, Verb.PREPARE, Verb.DUMP, Verb.LOAD, Verb.REBUILD, Verb.RESUME)


def trace(ranks: int, verbs: tuple[Verb, ...] = FULL) -> list[Event]:
    events = []
    for at, verb in enumerate(verbs):
        owners: list[int | None] = list(range(ranks)) if verb in PER_RANK else [None]
        events += [Event(verb, owner, at + 0.1, at + 0.9) for owner in owners]
    return events


def signatures(events: list[Event], ranks: int) -> set[str]:
    return {str(finding.signature) for finding in check_order(events, ranks=ranks)}


@given(ranks=st.integers(1, 64), data=st.data())
def test_a_full_trace_holds_in_any_order_of_its_events(ranks: int, data: st.DataObject) -> None:
    events = data.draw(st.permutations(trace(ranks)))
    assert check_order(list(events), ranks=ranks) == []


def test_every_verb_of_the_longest_lifecycle_is_accepted() -> None:
    assert check_order(trace(2, ORDER), ranks=2) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_rank_that_is_dumped_before_another_is_prepared(rank: int) -> None:
    events = [
        dataclasses.replace(event, ended=2.5) if (event.verb, event.rank) == (Verb.PREPARE, rank) else event
        for event in trace(3)
    ]
    assert signatures(events, 3) == {"ORDER:OVERTAKEN"}


@pytest.mark.parametrize("verb", FULL)
def test_a_verb_that_is_left_out(verb: Verb) -> None:
    left = [event for event in trace(2) if event.verb is not verb]
    assert "ORDER:INCOMPLETE" in signatures(left, 2)


def test_a_rank_that_misses_a_verb_is_named() -> None:
    left = [event for event in trace(3) if (event.verb, event.rank) != (Verb.REBUILD, 1)]
    (found,) = check_order(left, ranks=3)
    assert str(found.signature) == "ORDER:INCOMPLETE"
    assert found.evidence["missing"] == [1]


def test_a_verb_twice_on_one_rank() -> None:
    events = trace(2)
    twice = next(event for event in events if (event.verb, event.rank) == (Verb.PREPARE, 1))
    assert signatures([*events, twice], 2) == {"ORDER:REPEATED"}


def test_a_verb_that_failed() -> None:
    events = [dataclasses.replace(event, ok=event.verb is not Verb.LOAD) for event in trace(1)]
    assert signatures(events, 1) == {"ORDER:FAILED"}


def test_no_trace_at_all_is_no_pass() -> None:
    assert signatures([], 2) == {"ORDER:EMPTY"}


def test_events_survive_json() -> None:
    for event in trace(2):
        assert Event.from_json(event.as_json()) == event


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("sleeps", [True, False])
def test_a_verb_that_the_target_calls_for_is_missed(host: bool, device: bool, sleeps: bool) -> None:
    required = wanted(host=host, device=device, sleeps=sleeps)
    verbs = tuple(verb for verb in ORDER if verb in required)
    assert check_order(trace(2, verbs), ranks=2, required=required) == []
    assert check_order(trace(2, ORDER), ranks=2, required=required) == []
    for missing in verbs:
        left = [event for event in trace(2, verbs) if event.verb is not missing]
        (found,) = check_order(left, ranks=2, required=required)
        assert (str(found.signature), found.evidence["verb"]) == ("ORDER:INCOMPLETE", missing.value)


def test_the_verbs_of_a_lifecycle_by_its_layers() -> None:
    assert wanted(host=True, device=True, sleeps=True) == frozenset(Verb)
    common = {Verb.QUIESCE, Verb.PREPARE, Verb.REBUILD, Verb.RESUME}
    assert wanted(host=False, device=False, sleeps=False) == common
    assert wanted(host=True, device=False, sleeps=False) == common | {Verb.DUMP, Verb.LOAD}
    assert wanted(host=False, device=False, sleeps=True) == common | {Verb.SLEEP, Verb.WAKE}
