"""Provenance: a restore is told from a fresh start, and a changed weight from an unchanged one."""

from __future__ import annotations

import dataclasses

import pytest

from nvsnap_conformance.engines.protocol import RankReply
from nvsnap_conformance.lifecycle.provenance import RankIdentity, check_is_restore, check_weights
from nvsnap_conformance.lifecycle.trace import Verb
from nvsnap_conformance.lifecycle.transports import check_environment, check_settings
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


SETTINGS = {"NCCL_NVLS_ENABLE": "5f", "NCCL_IB_HCA": "aa"}
KNOWN = [dataclasses.replace(identity, environment=dict(SETTINGS)) for identity in BEFORE]


def with_environment(environment: dict[str, str] | None) -> list[RankIdentity]:
    return [KNOWN[0], dataclasses.replace(KNOWN[1], environment=environment)]


def test_one_environment_over_a_life_and_on_all_ranks() -> None:
    assert check_environment(KNOWN, KNOWN) == []
    own_adapter = with_environment({**SETTINGS, "NCCL_IB_HCA": "bb"})
    assert check_environment(own_adapter, own_adapter) == []


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({"NCCL_IB_HCA": "aa"}, "NCCL_NVLS_ENABLE unset"),
        ({**SETTINGS, "NCCL_P2P_DISABLE": "6b"}, "NCCL_P2P_DISABLE set"),
        ({**SETTINGS, "NCCL_NVLS_ENABLE": "6b"}, "NCCL_NVLS_ENABLE has another value"),
        ({**SETTINGS, "NCCL_IB_HCA": "bb"}, "NCCL_IB_HCA has another value"),
    ],
)
def test_an_environment_that_drifts(after: dict[str, str], words: str) -> None:
    (found,) = check_environment(KNOWN, with_environment(after))
    assert str(found.signature) == "PROVENANCE:ENVIRONMENT"
    assert found.evidence["rank"] == 1
    assert words in found.message


def test_ranks_of_two_environments() -> None:
    apart = with_environment({"NCCL_IB_HCA": "aa"})
    (found,) = check_environment(apart, apart)
    assert str(found.signature) == "PROVENANCE:ENVIRONMENT_RANKS"
    assert "NCCL_NVLS_ENABLE unset against rank 0" in found.message


@pytest.mark.parametrize(("before", "after"), [([], []), (BEFORE, BEFORE), (KNOWN, []), (KNOWN, BEFORE)])
def test_an_environment_that_nobody_read_proves_nothing(
    before: list[RankIdentity], after: list[RankIdentity]
) -> None:
    assert set(names(list(check_environment(before, after)))) == {"PROVENANCE:ENVIRONMENT_UNREAD"}


def during(*notes: dict[str, object] | None, rank: int = 1) -> dict[Verb, list[RankReply]]:
    """Give the replies of both calls; ``notes`` are those of one rank's restore."""
    calm = {"settings": [{"at": "begin", "variables": SETTINGS}]}
    quiet = [RankReply(number, "n", "n", raw=calm) for number in (0, 1)]
    told = [RankReply(n, "n", "n", raw={"settings": list(notes)} if n == rank else calm) for n in (0, 1)]
    return {Verb.PREPARE: quiet, Verb.REBUILD: told}


def test_settings_that_are_the_same_while_hooks_run() -> None:
    assert check_settings(KNOWN, during({"at": "begin", "variables": SETTINGS})) == []


def test_a_setting_for_the_making_alone() -> None:
    other = {**SETTINGS, "NCCL_NVLS_ENABLE": "6b"}
    flipped = during(
        {"at": "begin", "variables": SETTINGS},
        {"at": "new_group", "variables": other},
        {"at": "end", "variables": SETTINGS},
    )
    (found,) = check_settings(KNOWN, flipped)
    assert str(found.signature) == "PROVENANCE:ENVIRONMENT_MEANWHILE"
    assert found.evidence["rank"] == 1
    assert "during rebuild, at new_group NCCL_NVLS_ENABLE has another value" in found.message


@pytest.mark.parametrize(
    "notes", [(), (None,), ({"at": "begin"},), ({"at": "begin", "variables": SETTINGS}, None)]
)
def test_settings_that_nobody_noted_prove_nothing(notes: tuple[dict[str, object] | None, ...]) -> None:
    assert names(list(check_settings(KNOWN, during(*notes)))) == ["PROVENANCE:ENVIRONMENT_UNREAD"]


def test_calls_that_were_not_made_or_answered_prove_nothing() -> None:
    good = during({"at": "begin", "variables": SETTINGS})
    unread = "PROVENANCE:ENVIRONMENT_UNREAD"
    assert names(list(check_settings([], good))) == [unread]
    assert names(list(check_settings(KNOWN, {}))) == [unread] * 4
    assert names(list(check_settings(KNOWN, good | {Verb.REBUILD: good[Verb.REBUILD][:1]}))) == [unread]
    stale = [dataclasses.replace(reply, nonce="m") for reply in good[Verb.REBUILD]]
    assert names(list(check_settings(KNOWN, good | {Verb.REBUILD: stale}))) == [unread] * 2
    assert names(list(check_settings(BEFORE, good))) == [unread] * 4
