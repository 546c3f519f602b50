"""The experiment's judge: what it has to say in each situation, and what a worse one would say."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.experiments import blame
from nvsnap_conformance.experiments.arm import ArmRun
from nvsnap_conformance.experiments.judge import PEER_REFUSED, REFUSALS, Judge
from nvsnap_conformance.experiments.plan import read_plan
from nvsnap_conformance.experiments.record import ArmOutcome, ArmRecord
from nvsnap_conformance.hooks.injection import INJECT
from tests import experiment_standins
from tests.experiment_standins import SITUATIONS, Situation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nvsnap_conformance.experiments.record import Pair

PLAN = read_plan()


def run(situation: Situation, folder: Path, judge: Judge) -> ArmRecord:
    (arm,) = PLAN.select((situation.arm,))
    return ArmRun(situation.made(), PLAN, arm, folder, judge=judge, say=lambda _: None).run()


def told(record: ArmRecord) -> tuple[str, str | None, str | None]:
    return record.outcome.value, record.phase, record.error


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.name)
def test_what_has_to_be_said(situation: Situation, tmp_path: Path) -> None:
    record = run(situation, tmp_path, Judge())
    assert told(record) == (situation.outcome.value, situation.phase, situation.error), record.reason
    assert record.reason


@pytest.mark.parametrize(
    ("mutant", "situation"),
    [
        pytest.param(mutant, situation, id=f"{mutant.__name__} in {situation.name}")
        for situation in SITUATIONS
        for mutant in situation.mutants
    ],
)
def test_a_worse_judge_is_caught(mutant: type[Judge], situation: Situation, tmp_path: Path) -> None:
    record = run(situation, tmp_path, mutant())
    assert told(record) != (situation.outcome.value, situation.phase, situation.error)


def test_every_worse_judge_is_tried_and_every_step_has_one() -> None:
    judges = [
        thing
        for thing in vars(experiment_standins).values()
        if isinstance(thing, type) and issubclass(thing, Judge) and thing is not Judge
    ]
    tried = {mutant for situation in SITUATIONS for mutant in situation.mutants}
    assert set(judges) == tried
    steps = {name for name, _ in inspect.getmembers(Judge, inspect.isfunction) if not name.startswith("_")}
    replaced = {name for judge in judges for name in vars(judge) if not name.startswith("_")}
    # Those that only put the other steps in their order are replaced whole, or not at all.
    assert steps - replaced == {"cycle", "after"}


def test_refusals_are_errors_of_the_hooks() -> None:
    names = set(
        re.findall(r"^class (\w+)", (INJECT / "nvsnap_hooks" / "errors.py").read_text(), re.MULTILINE)
    )
    # BadOption is that of hooks with options.
    assert {*REFUSALS, PEER_REFUSED} - {"BadOption"} <= names


def test_every_outcome_is_met() -> None:
    assert {situation.outcome for situation in SITUATIONS} == set(ArmOutcome)


# Blame -------------------------------------------------------------------------------------------------


def two_factor_pairs(factor: str, arms: Sequence[ArmRecord]) -> list[Pair]:
    """Compare arms that differ in ``factor``, and perhaps in others as well: a known-bad comparison."""
    return [pair for pair in _pairs(factor, arms, alone=False) if "unknown" not in pair.outcomes]


def undecided_pairs(factor: str, arms: Sequence[ArmRecord]) -> list[Pair]:
    """Compare arms of which one is unknown: a known-bad comparison."""
    return _pairs(factor, arms, alone=True)


def _pairs(factor: str, arms: Sequence[ArmRecord], *, alone: bool) -> list[Pair]:
    from itertools import combinations

    from nvsnap_conformance.experiments.record import Pair

    return [
        Pair(
            one=one.name,
            other=other.name,
            levels=(getattr(one.factors, factor).value, getattr(other.factors, factor).value),
            outcomes=(one.outcome, other.outcome),
        )
        for one, other in combinations(arms, 2)
        if factor in one.factors.differing(other.factors)
        and (not alone or one.factors.differing(other.factors) == (factor,))
    ]


def arms(*, unknown: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> list[ArmRecord]:
    """Return the measured outcomes as records."""
    from tests.experiment_runs import MEASURED, as_record

    return [
        as_record(arm, ArmOutcome.UNKNOWN if arm.name in unknown else MEASURED[arm.name])
        for arm in PLAN.select(only or tuple(MEASURED))
    ]


def conclusions(records: list[ArmRecord]) -> dict[str, str]:
    return {c.factor: c.conclusion for c in blame.conclusions(records)}


def test_blame_of_what_was_measured() -> None:
    assert conclusions(arms()) == {
        "nccl": "matters",
        "custom_all_reduce": "matters",
        "flashinfer_workspace": "matters",
        "cuda_graphs": "matters",
    }


def test_two_factor_pairs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    some = arms(only=tuple("ACDEFGHIJ"))
    right = conclusions(some)
    assert right["nccl"] == "no difference seen"
    monkeypatch.setattr(blame, "pairs_of", two_factor_pairs)
    wrong = conclusions(some)
    assert wrong["nccl"] == "matters"
    assert wrong != right


def test_undecided_pairs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    some = arms(only=("D", "E", "G"), unknown=("E",))
    assert conclusions(some)["flashinfer_workspace"] == "not shown"
    monkeypatch.setattr(blame, "pairs_of", undecided_pairs)
    assert conclusions(some)["flashinfer_workspace"] == "matters"
