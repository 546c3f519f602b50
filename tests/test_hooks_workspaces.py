"""The checks over which all-reduce workspaces an engine makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.hooks.workspaces import check_null_multicast, check_switched_off
from nvsnap_conformance.outcomes import Outcome

if TYPE_CHECKING:
    from nvsnap_conformance.outcomes import Finding

REFUSED = {"backend": "trtllm", "null": 1, "used": False, "left": 0, "registered": False}


def names(found: list[Finding]) -> list[str]:
    return [str(one.signature) for one in found]


def test_a_null_pointer_that_is_refused_and_destroyed() -> None:
    assert check_null_multicast({0: REFUSED, 1: REFUSED}, asked="auto") == []
    without = REFUSED | {"backend": None}
    assert check_null_multicast({0: without, 1: without}, asked="mnnvl") == []


@pytest.mark.parametrize(
    ("change", "signature"),
    [
        ({"backend": "mnnvl", "used": True, "left": 1, "registered": True}, "WORKSPACE:NULL_USED"),
        ({"registered": True}, "WORKSPACE:NULL_USED"),
        ({"left": 1}, "WORKSPACE:NULL_LEFT"),
        ({"backend": None}, "WORKSPACE:BACKENDS_DIFFER"),
    ],
)
def test_one_rank_that_does_not(change: dict[str, Any], signature: str) -> None:
    assert names(check_null_multicast({0: REFUSED, 1: REFUSED | change}, asked="auto")) == [signature]


def test_nothing_is_judged_where_no_null_pointer_came() -> None:
    (found,) = check_null_multicast({0: REFUSED, 1: REFUSED | {"null": 0}}, asked="auto")
    assert (str(found.signature), found.outcome) == ("WORKSPACE:UNJUDGED", Outcome.UNKNOWN)


def made(first: int, second: int) -> dict[int, dict[str, Any]]:
    return {rank: {"wanted": True, "workspaces": number} for rank, number in enumerate((first, second))}


def test_a_switch() -> None:
    assert check_switched_off(made(1, 1), made(0, 0)) == []
    assert names(check_switched_off(made(1, 1), made(0, 1))) == ["WORKSPACE:AGAINST_SWITCH"]


def test_nothing_is_judged_where_there_is_nothing_to_switch_off() -> None:
    (found,) = check_switched_off(made(1, 0), made(0, 0))
    assert (str(found.signature), found.outcome) == ("WORKSPACE:UNJUDGED", Outcome.UNKNOWN)
