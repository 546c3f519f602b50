"""What the arms say together: one-factor comparisons, and the answer to the question.

Two arms are compared only where they differ in one factor and nothing else, and only where both are decided.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Literal

from nvsnap_conformance.experiments.record import (
    FACTORS,
    Answer,
    ArmOutcome,
    ArmRecord,
    CustomAllReduce,
    FactorConclusion,
    FlashInferWorkspace,
    Nccl,
    Pair,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

RIGHT = ArmOutcome.RIGHT


def pairs_of(factor: str, arms: Sequence[ArmRecord]) -> list[Pair]:
    """Return the pairs of decided arms that differ in ``factor`` alone, in the arms' order."""
    decided = [arm for arm in arms if arm.outcome.decided]
    return [
        Pair(
            one=one.name,
            other=other.name,
            levels=(getattr(one.factors, factor).value, getattr(other.factors, factor).value),
            outcomes=(one.outcome, other.outcome),
        )
        for one, other in combinations(decided, 2)
        if one.factors.differing(other.factors) == (factor,)
    ]


def conclusions(arms: Sequence[ArmRecord]) -> list[FactorConclusion]:
    """Return one conclusion for each factor."""
    return [_conclusion(factor, pairs_of(factor, arms)) for factor in FACTORS]


def _conclusion(factor: str, pairs: list[Pair]) -> FactorConclusion:
    label = FACTORS[factor]
    differ = [pair for pair in pairs if pair.outcomes[0] is not pair.outcomes[1]]
    same = [pair for pair in pairs if pair.outcomes[0] is pair.outcomes[1]]
    kind: Literal["matters", "no difference seen", "not shown"]
    if differ:
        kind, statement = "matters", f"{label} matters: {_told(differ)}"
        statement += f"; no difference: {_told(same)}" if same else ""
    elif same:
        kind, statement = "no difference seen", f"{label}: no difference seen: {_told(same)}"
    else:
        kind, statement = "not shown", f"{label}: not shown, for no two decided arms differ in it alone"
    return FactorConclusion(factor=factor, conclusion=kind, statement=statement, pairs=differ, same=same)


def _told(pairs: Sequence[Pair]) -> str:
    """Return the pairs in words, those that show the same thing together, the worse outcome first."""
    groups: dict[str, list[str]] = {}
    for pair in map(_worse_first, pairs):
        (one, other), (before, after) = pair.levels, pair.outcomes
        text = (
            f"{one} and {other} both end {before}"
            if before is after
            else f"{one} ends {before} where {other} ends {after}"
        )
        groups.setdefault(text, []).append(f"{pair.one}/{pair.other}")
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in groups.items())


def _worse_first(pair: Pair) -> Pair:
    """Return the pair in an order that does not depend on that of its arms."""
    first, second = [
        (outcome is RIGHT, level) for outcome, level in zip(pair.outcomes, pair.levels, strict=True)
    ]
    if first <= second:
        return pair
    return Pair(one=pair.other, other=pair.one, levels=pair.levels[::-1], outcomes=pair.outcomes[::-1])


def answer(arms: Sequence[ArmRecord]) -> Answer:
    """Return the answer as far as the arms decide it."""
    decided = [arm for arm in arms if arm.outcome.decided]
    whole = [arm for arm in decided if _whole_teardown(arm)]
    stock = [arm for arm in decided if _stock(arm)]
    saved = [arm for arm in whole if arm.outcome is RIGHT]
    workspace, freed = _workspace(arms)
    alone, only = _alone(decided)
    graphs, dropped = _kept_graphs(arms)
    witnesses = [*dict.fromkeys(arm.name for arm in (*saved, *stock))]
    checkpointable: Literal["yes", "no", "not shown"]
    if saved and stock and not any(arm.outcome is RIGHT for arm in stock):
        checkpointable = "yes"
        text = (
            f"Yes: with every transport between GPUs torn down the stock configuration comes back right "
            f"({_names(saved)}), and without it is not right ({_names(stock)})."
        )
    elif whole and not saved:
        checkpointable, witnesses = "no", [arm.name for arm in whole]
        text = f"No: with everything torn down the engine still does not come back right ({_names(whole)})."
    elif any(arm.outcome is RIGHT for arm in stock):
        checkpointable, witnesses = "no", [arm.name for arm in stock]
        text = f"Teardown is not what makes it so: stock comes back right as it is ({_names(stock)})."
    else:
        checkpointable = "not shown"
        text = "Not shown: it takes a stock arm and one with everything torn down, both decided."
    text += {
        "must go": f" The FlashInfer workspace must go: it decides between lost and right ({freed}).",
        "no difference seen": f" Freeing the FlashInfer workspace made no difference ({freed}).",
        "not shown": " Whether the FlashInfer workspace must go is not shown.",
    }[workspace]
    text += {
        "enough": f" Freeing it alone is enough ({only}).",
        "not enough": f" Freeing it alone, with NCCL and custom all-reduce live, is not enough ({only}).",
        "not shown": "",
    }[alone]
    text += {
        "can be lost": " Captured graphs may have to go too: kept they did not come back right where dropped "
        f"and captured again they did ({dropped}).",
        "no difference seen": "",
        "not shown": "",
    }[graphs]
    return Answer(
        checkpointable=checkpointable,
        workspace=workspace,
        workspace_alone=alone,
        kept_graphs=graphs,
        statement=text,
        witnesses=witnesses,
    )


def _whole_teardown(arm: ArmRecord) -> bool:
    """Whether every transport was there at launch and was torn down by the hooks."""
    factors = arm.factors
    return (
        factors.nccl in (Nccl.DESTROYED, Nccl.SUSPENDED)
        and factors.custom_all_reduce is CustomAllReduce.CLOSED
        and factors.flashinfer_workspace is FlashInferWorkspace.FREED
    )


def _stock(arm: ArmRecord) -> bool:
    factors = arm.factors
    return (factors.nccl, factors.custom_all_reduce, factors.flashinfer_workspace) == (
        Nccl.LIVE,
        CustomAllReduce.LIVE,
        FlashInferWorkspace.LIVE,
    )


def _workspace(
    arms: Sequence[ArmRecord],
) -> tuple[Literal["must go", "no difference seen", "not shown"], str]:
    """Compare the workspace live and freed, where nothing else differs and one of the two came back."""
    told = _telling("flashinfer_workspace", {"live", "freed"}, arms)
    needed = [pair for pair in told if _outcome_at(pair, "live") is not RIGHT]
    # A pair in which the engine came back with the workspace live, or did not without it, speaks against it.
    against = [pair for pair in told if _outcome_at(pair, "live") is RIGHT]
    if needed and not against:
        return "must go", _names_of(needed)
    if against and not needed:
        return "no difference seen", _names_of(against)
    return "not shown", ""


def _telling(factor: str, levels: set[str], arms: Sequence[ArmRecord]) -> list[Pair]:
    """Return the pairs of these two levels of ``factor`` of which one came back right."""
    return [pair for pair in pairs_of(factor, arms) if set(pair.levels) == levels and RIGHT in pair.outcomes]


def _names_of(pairs: Sequence[Pair]) -> str:
    return ", ".join(f"{pair.one}/{pair.other}" for pair in map(_worse_first, pairs))


def _outcome_at(pair: Pair, level: str) -> ArmOutcome:
    return pair.outcomes[pair.levels.index(level)]


def _alone(decided: Sequence[ArmRecord]) -> tuple[Literal["enough", "not enough", "not shown"], str]:
    """Judge freeing the workspace and touching nothing else."""
    only = [
        arm
        for arm in decided
        if (arm.factors.nccl, arm.factors.custom_all_reduce) == (Nccl.LIVE, CustomAllReduce.LIVE)
        and arm.factors.flashinfer_workspace is FlashInferWorkspace.FREED
    ]
    if not only:
        return "not shown", ""
    return ("enough" if all(arm.outcome is RIGHT for arm in only) else "not enough"), _names(only)


def _kept_graphs(
    arms: Sequence[ArmRecord],
) -> tuple[Literal["can be lost", "no difference seen", "not shown"], str]:
    """Compare captured graphs kept and dropped, where nothing else differs and one of the two came back."""
    told = _telling("cuda_graphs", {"kept", "dropped"}, arms)
    lost = [pair for pair in told if _outcome_at(pair, "kept") is not RIGHT]
    if lost:
        return "can be lost", _names_of(lost)
    return ("no difference seen" if told else "not shown"), ""


def _names(arms: Sequence[ArmRecord]) -> str:
    return ", ".join(arm.name for arm in arms)
