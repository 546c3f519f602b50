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
    # What the hooks refused was not torn down, and no checkpoint followed.
    tried = [arm for arm in arms if arm.outcome.decided and not _refused_by_the_hooks(arm)]
    whole = [arm for arm in tried if _whole_teardown(arm)]
    stock = [arm for arm in tried if _stock(arm)]
    saved = [arm for arm in whole if arm.outcome is RIGHT]
    unsaved = [arm for arm in whole if arm.outcome is not RIGHT]
    stock_right = [arm for arm in stock if arm.outcome is RIGHT]
    workspace, freed = _workspace(arms)
    alone, only = _alone(tried, stock_right)
    graphs, dropped = _kept_graphs(arms)
    witnesses = [*dict.fromkeys(arm.name for arm in (*saved, *stock))]
    checkpointable: Literal["yes", "no", "not shown"]
    if stock_right:
        checkpointable, witnesses = "no", [arm.name for arm in stock_right]
        text = f"Teardown is not what makes it so: stock comes back right as it is ({_names(stock_right)})."
    elif saved and stock:
        checkpointable = "yes"
        text = (
            f"Yes: with every transport between GPUs torn down the stock configuration comes back right "
            f"({_names(saved)}{f'; but not in {_names(unsaved)}' if unsaved else ''}), "
            f"and without it is not right ({_names(stock)})."
        )
    elif unsaved and not saved:
        checkpointable, witnesses = "no", [arm.name for arm in unsaved]
        text = f"No: with everything torn down the engine still does not come back right ({_names(unsaved)})."
    else:
        checkpointable = "not shown"
        text = "Not shown: it takes a stock arm and one with everything torn down, both decided."
    text += {
        "must go": f" The FlashInfer workspace must go: it decides ({freed}).",
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
    needed, same, against = _split("flashinfer_workspace", "live", "freed", arms)
    if needed and not same and not against:
        ends = sorted({str(_outcome_at(pair, "live").value) for pair in needed})
        return "must go", f"live {' or '.join(ends)}, freed right: {_names_of(needed)}"
    if same and not needed and not against:
        return "no difference seen", _names_of(same)
    return "not shown", ""


def _kept_graphs(
    arms: Sequence[ArmRecord],
) -> tuple[Literal["can be lost", "no difference seen", "not shown"], str]:
    """Compare captured graphs kept and dropped, where nothing else differs and one of the two came back."""
    lost, same, against = _split("cuda_graphs", "kept", "dropped", arms)
    if lost and not against:
        return "can be lost", _names_of(lost)
    if same and not lost and not against:
        return "no difference seen", ""
    return "not shown", ""


def _split(
    factor: str, there: str, gone: str, arms: Sequence[ArmRecord]
) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Return the telling pairs of two levels: right only once it is gone, either way, and only with it."""
    told = _telling(factor, {there, gone}, arms)
    needed = [pair for pair in told if _outcome_at(pair, there) is not RIGHT]
    against = [pair for pair in told if _outcome_at(pair, gone) is not RIGHT]
    return needed, [pair for pair in told if pair not in needed and pair not in against], against


def _telling(factor: str, levels: set[str], arms: Sequence[ArmRecord]) -> list[Pair]:
    """Return the pairs of these two levels of ``factor`` of which one came back right."""
    return [pair for pair in pairs_of(factor, arms) if set(pair.levels) == levels and RIGHT in pair.outcomes]


def _names_of(pairs: Sequence[Pair]) -> str:
    return ", ".join(f"{pair.one}/{pair.other}" for pair in map(_worse_first, pairs))


def _outcome_at(pair: Pair, level: str) -> ArmOutcome:
    return pair.outcomes[pair.levels.index(level)]


def _alone(
    tried: Sequence[ArmRecord], stock_right: Sequence[ArmRecord]
) -> tuple[Literal["enough", "not enough", "not shown"], str]:
    """Judge freeing the workspace and touching nothing else; where stock is right, that says nothing."""
    only = [
        arm
        for arm in tried
        if (arm.factors.nccl, arm.factors.custom_all_reduce) == (Nccl.LIVE, CustomAllReduce.LIVE)
        and arm.factors.flashinfer_workspace is FlashInferWorkspace.FREED
    ]
    if not only or stock_right:
        return "not shown", ""
    return ("enough" if all(arm.outcome is RIGHT for arm in only) else "not enough"), _names(only)


def _refused_by_the_hooks(arm: ArmRecord) -> bool:
    return arm.outcome is ArmOutcome.REFUSED and arm.phase == "prepare"


def _names(arms: Sequence[ArmRecord]) -> str:
    return ", ".join(arm.name for arm in arms)
