"""Provenance: a restore is told from a fresh start, and a changed weight from an unchanged one."""

from __future__ import annotations

import dataclasses

import pytest

from nvsnap_conformance.lifecycle.provenance import RankIdentity, check_is_restore, check_weights
from nvsnap_conformance.processes import ProcessId

WEIGHTS = {"sha256": "aa", "hashed_elements": 145_000}
BEFORE = [RankIdentity(rank, ProcessId(100 + rank, 1.0), "nonce", WEIGHTS) for rank in (0, 1)]
PLANTED = {0: "nonce", 1: "nonce"}


def other_process(identity: RankIdentity) -> RankIdentity:
    return dataclasses.replace(identity, process=ProcessId(identity.process.pid, 2.0))


def names(found: list[object]) -> list[str]:
    return [str(getattr(finding, "signature", "")) for finding in found]


def test_continued_and_replaced_processes() -> None:
    replaced = [other_process(identity) for identity in BEFORE]
    assert check_is_restore(PLANTED, BEFORE, BEFORE, replaces_processes=False) == []
    assert check_is_restore(PLANTED, BEFORE, replaced, replaces_processes=True) == []
    found = check_is_restore(PLANTED, BEFORE, replaced, replaces_processes=False)
    assert names(list(found)) == ["PROVENANCE:PROCESS"] * 2
    found = check_is_restore(PLANTED, BEFORE, BEFORE, replaces_processes=True)
    assert names(list(found)) == ["PROVENANCE:PROCESS"] * 2


@pytest.mark.parametrize("nonce", [None, "another"])
def test_a_cold_start_does_not_hold_the_nonce(nonce: str | None) -> None:
    after = [BEFORE[0], dataclasses.replace(BEFORE[1], nonce=nonce)]
    (found,) = check_is_restore(PLANTED, BEFORE, after, replaces_processes=False)
    assert str(found.signature) == "PROVENANCE:NONCE"
    assert found.evidence["rank"] == 1


@pytest.mark.parametrize("after", [[], BEFORE[:1]])
def test_ranks_that_did_not_come_back(after: list[RankIdentity]) -> None:
    assert names(list(check_is_restore(PLANTED, BEFORE, after, replaces_processes=False))) == [
        "PROVENANCE:RANKS"
    ]


def test_a_nonce_that_was_never_planted_proves_nothing() -> None:
    assert names(list(check_is_restore({}, BEFORE, BEFORE, replaces_processes=False))) == ["PROVENANCE:RANKS"]
    assert names(list(check_is_restore({}, [], [], replaces_processes=False))) == ["PROVENANCE:RANKS"]


def test_weights() -> None:
    assert check_weights(BEFORE, BEFORE) == []
    changed = dataclasses.replace(BEFORE[1], weights={**WEIGHTS, "sha256": "bb"})
    assert names(list(check_weights(BEFORE, [BEFORE[0], changed]))) == ["WEIGHTS:CHECKSUM"]


@pytest.mark.parametrize("weights", [None, {}, {"sha256": "e3b0c442", "hashed_elements": 0}])
def test_a_checksum_over_nothing_is_no_proof(weights: dict[str, object] | None) -> None:
    blind = [dataclasses.replace(identity, weights=weights) for identity in BEFORE]
    assert names(list(check_weights(blind, blind))) == ["WEIGHTS:UNREAD"] * 2
    assert names(list(check_weights([], []))) == ["WEIGHTS:UNREAD"]
