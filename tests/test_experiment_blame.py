"""What one-factor comparison concludes, by laws over drawn outcomes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvsnap_conformance.experiments import blame
from nvsnap_conformance.experiments.record import (
    ArmOutcome,
    ArmRecord,
    Factors,
)
from tests.experiment_runs import PLAN, as_record

any_factors = st.builds(
    Factors.model_validate,
    st.fixed_dictionaries(
        {
            name: st.sampled_from([level.value for level in field.annotation])  # type: ignore[union-attr]
            for name, field in Factors.model_fields.items()
        }
    ),
)
any_arms = st.lists(any_factors, unique=True, max_size=12).flatmap(
    lambda levels: st.tuples(
        st.just(levels),
        st.lists(st.sampled_from(ArmOutcome), min_size=len(levels), max_size=len(levels)),
    )
)


def records(drawn: tuple[list[Factors], list[ArmOutcome]]) -> list[ArmRecord]:
    base = as_record(PLAN.arm[0], ArmOutcome.RIGHT)
    return [
        base.model_copy(update={"name": f"N{number}", "factors": levels, "outcome": outcome})
        for number, (levels, outcome) in enumerate(zip(*drawn, strict=True))
    ]


@given(any_arms)
def test_blame_never_rests_on_two_factors_or_on_the_unknown(
    drawn: tuple[list[Factors], list[ArmOutcome]],
) -> None:
    arms = records(drawn)
    by_name = {arm.name: arm for arm in arms}
    for conclusion in blame.conclusions(arms):
        assert (conclusion.conclusion == "matters") == bool(conclusion.pairs)
        assert (conclusion.conclusion == "not shown") == (not conclusion.pairs and not conclusion.same)
        for pair in (*conclusion.pairs, *conclusion.same):
            one, other = by_name[pair.one], by_name[pair.other]
            assert one.factors.differing(other.factors) == (conclusion.factor,)
            assert one.outcome.decided
            assert other.outcome.decided


@given(any_arms, st.randoms(use_true_random=False))
def test_the_order_of_the_arms_does_not_matter(
    drawn: tuple[list[Factors], list[ArmOutcome]], random: Any
) -> None:
    arms = records(drawn)
    shuffled = list(arms)
    random.shuffle(shuffled)
    for one, other in zip(blame.conclusions(arms), blame.conclusions(shuffled), strict=True):
        assert one.conclusion == other.conclusion
        assert {frozenset((p.one, p.other)) for p in one.pairs} == {
            frozenset((p.one, p.other)) for p in other.pairs
        }
    first, second = blame.answer(arms), blame.answer(shuffled)
    assert (first.checkpointable, first.workspace, first.workspace_alone, first.kept_graphs) == (
        second.checkpointable,
        second.workspace,
        second.workspace_alone,
        second.kept_graphs,
    )


@given(any_arms)
def test_a_yes_needs_a_witness_on_both_sides(drawn: tuple[list[Factors], list[ArmOutcome]]) -> None:
    arms = records(drawn)
    answer = blame.answer(arms)
    outcome = {arm.name: arm.outcome for arm in arms}
    if answer.checkpointable == "yes":
        assert {outcome[name] is ArmOutcome.RIGHT for name in answer.witnesses} == {True, False}
    if not any(arm.outcome.decided for arm in arms):
        assert answer.checkpointable == answer.workspace == answer.workspace_alone == "not shown"
        assert answer.kept_graphs == "not shown"


@pytest.mark.parametrize(
    ("found", "checkpointable", "workspace", "alone"),
    [
        ({"A": "lost-at-restore", "I": "right"}, "yes", "not shown", "not shown"),
        ({"A": "unknown", "I": "right"}, "not shown", "not shown", "not shown"),
        ({"A": "right", "I": "right"}, "no", "not shown", "not shown"),
        ({"A": "lost-at-restore", "I": "lost-at-restore"}, "no", "not shown", "not shown"),
        ({"A": "lost-at-restore", "B": "right"}, "not shown", "must go", "enough"),
        ({"A": "lost-at-restore", "B": "lost-at-restore"}, "not shown", "not shown", "not enough"),
        ({"D": "right", "E": "right"}, "not shown", "no difference seen", "not shown"),
        ({"D": "hang", "E": "right"}, "not shown", "must go", "not shown"),
        ({"D": "hang", "E": "right", "A": "right", "B": "right"}, "no", "not shown", "not shown"),
        ({"D": "right", "E": "lost-at-restore"}, "not shown", "not shown", "not shown"),
        ({"J": "lost-at-restore", "A": "right"}, "no", "not shown", "not shown"),
        ({"A": "right", "B": "right"}, "no", "no difference seen", "not shown"),
    ],
)
def test_the_answer(found: dict[str, str], checkpointable: str, workspace: str, alone: str) -> None:
    arms = [as_record(arm, ArmOutcome(found[arm.name])) for arm in PLAN.select(tuple(found))]
    answer = blame.answer(arms)
    assert (answer.checkpointable, answer.workspace, answer.workspace_alone) == (
        checkpointable,
        workspace,
        alone,
    )


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ({"Q": "lost-at-restore", "T": "right"}, "can be lost"),
        ({"Q": "wrong-tokens", "T": "right", "J": "right", "R": "right"}, "can be lost"),
        ({"J": "right", "R": "right"}, "no difference seen"),
        ({"J": "right", "R": "hang"}, "not shown"),
        ({"Q": "lost-at-restore", "T": "right", "J": "right", "R": "hang"}, "not shown"),
        ({"P": "lost-at-restore", "S": "lost-at-restore"}, "not shown"),
        ({"Q": "lost-at-restore", "R": "right"}, "not shown"),
        ({"Q": "unknown", "T": "right"}, "not shown"),
    ],
)
def test_kept_graphs_are_compared_with_dropped_ones_alone(found: dict[str, str], kept: str) -> None:
    arms = [as_record(arm, ArmOutcome(found[arm.name])) for arm in PLAN.select(tuple(found))]
    answer = blame.answer(arms)
    assert answer.kept_graphs == kept
    assert ("(Q/T)" in answer.statement) == (kept == "can be lost")


def test_what_the_hooks_refused_was_not_torn_down() -> None:
    refused, stock = (as_record(arm, ArmOutcome.REFUSED) for arm in PLAN.select(("L", "B")))
    arms = [arm.model_copy(update={"phase": "prepare"}) for arm in (refused, stock)]
    answer = blame.answer(arms)
    assert (answer.checkpointable, answer.workspace_alone) == ("not shown", "not shown")


def test_a_whole_teardown_that_did_not_help_is_named_beside_those_that_did() -> None:
    found = {"A": "lost-at-restore", "I": "right", "J": "lost-at-restore"}
    arms = [as_record(arm, ArmOutcome(found[arm.name])) for arm in PLAN.select(tuple(found))]
    assert "(I; but not in J)" in blame.answer(arms).statement
