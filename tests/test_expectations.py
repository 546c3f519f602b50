"""Expectations: what they match, and when they are void."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from pydantic import ValidationError

from nvsnap_conformance.clauses.registry import load_registry
from nvsnap_conformance.errors import ExpectationError
from nvsnap_conformance.expectations import Expectation, Expectations

TODAY = datetime.date(2027, 1, 1)


def entry(**changes: Any) -> Expectation:
    keys: dict[str, Any] = {
        "clause": "LIFE-ORDER",
        "signature": "ORDER:OVERTAKEN",
        "reason": "it is so",
        "url": "https://example.org/1",
        "owner": "me",
        "expires": TODAY,
    }
    return Expectation(**(keys | changes))


def expectations(*entries: Expectation) -> Expectations:
    return Expectations(entries, source=Path("mine.toml"))


def match(book: Expectations, signature: str = "ORDER:OVERTAKEN", **changes: Any) -> Expectation | None:
    keys: dict[str, Any] = {
        "clause": "LIFE-ORDER",
        "engine": "vllm",
        "engine_version": "0.32.0",
        "tensor_parallel": 2,
        "today": TODAY,
    }
    return book.match(signature=signature, **(keys | changes))


def test_matches_the_signature_with_and_without_its_place() -> None:
    book = expectations(entry())
    assert match(book) is book.entries[0]
    assert match(book, "ORDER:OVERTAKEN@dump") is book.entries[0]
    assert match(book, "ORDER:MISSING") is None
    assert match(book, clause="LIFE-REPEATS") is None
    placed = expectations(entry(signature="ORDER:OVERTAKEN@dump"))
    assert match(placed, "ORDER:OVERTAKEN@dump")
    assert match(placed, "ORDER:OVERTAKEN@load") is None


@pytest.mark.parametrize(
    ("changes", "where", "applies"),
    [
        ({"engine": "vllm>=0.27,<0.34"}, {"engine_version": "0.32.0"}, True),
        ({"engine": "vllm>=0.27,<0.34"}, {"engine_version": "0.32.0+cpu"}, True),
        ({"engine": "vllm>=0.27,<0.34"}, {"engine_version": "0.34.0"}, False),
        ({"engine": "vllm>=0.27"}, {"engine_version": "0.33.0.dev12+g1234567"}, True),
        ({"engine": "vllm>=0.27"}, {"engine_version": None}, False),
        ({"engine": "vllm>=0.27"}, {"engine_version": "a-fork"}, False),
        ({"engine": "sglang"}, {"engine_version": "0.32.0"}, False),
        ({"engine": "vllm"}, {"engine_version": None}, True),
        ({"driver": ">=580"}, {"driver_version": "580.105.08"}, True),
        ({"driver": ">=580"}, {"driver_version": "570.1"}, False),
        ({"driver": ">=580"}, {"driver_version": None}, False),
        ({"tensor_parallel": (2,)}, {"tensor_parallel": 2}, True),
        ({"tensor_parallel": (2,)}, {"tensor_parallel": 1}, False),
    ],
)
def test_applies_to_engine_driver_and_size(
    changes: dict[str, Any], where: dict[str, Any], applies: bool
) -> None:
    assert (match(expectations(entry(**changes)), **where) is not None) is applies


def test_is_good_through_its_last_day() -> None:
    book = expectations(entry())
    book.validate(load_registry(), today=TODAY)
    tomorrow = TODAY + datetime.timedelta(days=1)
    with pytest.raises(ExpectationError, match=r"mine.toml.*has expired on 2027-01-01"):
        book.validate(load_registry(), today=tomorrow)
    with pytest.raises(ExpectationError, match="has expired"):
        match(book, today=tomorrow)
    book.validate(load_registry())


def test_two_that_match_are_an_error() -> None:
    book = expectations(entry(), entry(signature="ORDER:OVERTAKEN@dump"))
    assert match(book, "ORDER:OVERTAKEN@load") is book.entries[0]
    with pytest.raises(ExpectationError, match=r"2 .* entries match LIFE-ORDER"):
        match(book, "ORDER:OVERTAKEN@dump")


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ({}, {}, True),
        ({}, {"signature": "ORDER:OVERTAKEN@dump"}, True),
        ({"signature": "ORDER:OVERTAKEN@load"}, {"signature": "ORDER:OVERTAKEN@dump"}, False),
        ({}, {"clause": "LIFE-REPEATS"}, False),
        ({"tensor_parallel": (1,)}, {"tensor_parallel": (2, 4)}, False),
        ({"tensor_parallel": (1, 2)}, {"tensor_parallel": (2, 4)}, True),
        ({"tensor_parallel": (1,)}, {}, True),
        ({"engine": "vllm<0.30"}, {"engine": "vllm>=0.30"}, False),
        ({"engine": "vllm<=0.30"}, {"engine": "vllm>=0.30"}, True),
        ({"engine": "vllm<0.34"}, {"engine": "vllm>0.33"}, True),
        ({"engine": "vllm<0.34"}, {"engine": "vllm<0.28"}, True),
        ({"engine": "vllm==0.32.*"}, {"engine": "vllm>=0.32.1"}, True),
        ({"engine": "vllm>=0.27"}, {"engine": "sglang>=0.5"}, False),
        ({"driver": "<570"}, {"driver": ">=570"}, False),
        ({"driver": ">=570"}, {"driver": ">=580"}, True),
    ],
)
def test_overlap(one: dict[str, Any], other: dict[str, Any], overlap: bool) -> None:
    for book in (expectations(entry(**one), entry(**other)), expectations(entry(**other), entry(**one))):
        if overlap:
            with pytest.raises(ExpectationError, match="can match the same failure"):
                book.validate(load_registry())
        else:
            book.validate(load_registry())


VERSIONS = st.builds(lambda a, b, c: f"{a}.{b}.{c}", *(st.integers(0, 3) for _ in range(3)))
BOUNDS = st.builds(lambda op, v: f"{op}{v}", st.sampled_from(["<", "<=", ">", ">="]), VERSIONS)


@given(st.lists(BOUNDS, max_size=2), st.lists(BOUNDS, max_size=2), VERSIONS)
def test_what_matches_both_ranges_is_seen_as_overlap(one: list[str], other: list[str], version: str) -> None:
    left, right = ",".join(one), ",".join(other)
    if not (SpecifierSet(left).contains(version) and SpecifierSet(right).contains(version)):
        return
    book = expectations(entry(engine=f"vllm{left}"), entry(engine=f"vllm{right}"))
    with pytest.raises(ExpectationError):
        book.validate(load_registry())


def test_every_entry_that_applies_and_was_not_met_is_told() -> None:
    book = expectations(
        entry(tensor_parallel=(2,)),
        entry(signature="ORDER:MISSING"),
        entry(signature="ORDER:LOST", driver=">=580"),
        entry(clause="LIFE-REPEATS"),
    )
    here: dict[str, Any] = {"engine": "vllm", "engine_version": "0.32.0"}

    def unmet(size: int, *met: str, **more: Any) -> list[str]:
        return [e.signature for e in book.unmet("LIFE-ORDER", met, tensor_parallel=size, **here, **more)]

    assert unmet(2) == ["ORDER:OVERTAKEN", "ORDER:MISSING"]
    assert unmet(2, "LIFE-ORDER ORDER:OVERTAKEN") == ["ORDER:MISSING"]
    assert unmet(2, "LIFE-REPEATS ORDER:OVERTAKEN", "LIFE-ORDER ORDER:MISSING") == ["ORDER:OVERTAKEN"]
    assert unmet(1, "LIFE-ORDER ORDER:MISSING") == []
    assert unmet(1, "LIFE-ORDER ORDER:MISSING", driver_version="580.1") == ["ORDER:LOST"]


@pytest.mark.parametrize(
    "changes",
    [
        {"signature": "overtaken"},
        {"engine": "vllm>>1"},
        {"engine": "vllm[extra]>1"},
        {"driver": "580"},
        {"driver": ""},
        {"driver": " "},
        {"engine": ""},
        {"engine": " "},
        {"url": "ticket 5"},
        {"owner": ""},
        {"expires": "soon"},
        {"tensor_parallel": ()},
        {"until": "2027-01-01"},
    ],
)
def test_refuses_what_cannot_be_read(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        entry(**changes)
