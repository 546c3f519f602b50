"""The experiment's page: Markdown for people, and the same as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from nvsnap_conformance.experiments.bandwidth import speeds
from nvsnap_conformance.report.record import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nvsnap_conformance.experiments.record import ArmRecord
    from nvsnap_conformance.report.model import RunRecord

FORMAT = "nvsnap-experiment-answer/1"
MARKDOWN, JSON = "teardown.md", "teardown.json"

MOMENTS = ("live", "prepared", "checkpointed", "restored", "rebuilt")
_REASON = 300


def write_page(folder: Path, record: RunRecord) -> None:
    """Write ``teardown.md`` and ``teardown.json`` into ``folder``, each replaced whole."""
    write_whole(folder / MARKDOWN, as_markdown(record))
    write_whole(folder / JSON, as_json(record))


def as_markdown(record: RunRecord) -> str:
    """Return the page as Markdown."""
    experiment = record.experiment
    assert experiment is not None  # a record of an experiment
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - Markdown, and every value is the suite's own
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": _seconds, "memory": _memory, "cut": _cut}
    counted = Counter(experiment.conditions.gpus)
    return environment.get_template("page.md.j2").render(
        record=record,
        experiment=experiment,
        conditions=experiment.conditions,
        answer=experiment.answer,
        undecided=undecided(record),
        always_degraded=always_degraded(experiment.arms),
        speeds=_speeds(record),
        gpus=", ".join(f"{number}x {name}" for name, number in counted.items()) or "none",
    )


def as_json(record: RunRecord) -> str:
    """Return the answer as JSON: conditions, one outcome for each arm, and what follows."""
    experiment = record.experiment
    assert experiment is not None  # a record of an experiment
    return (
        json.dumps(
            {
                "format": FORMAT,
                "question": experiment.question,
                "answer": experiment.answer.model_dump(mode="json"),
                "conditions": experiment.conditions.model_dump(mode="json")
                | {"degraded": record.degraded, "always_degraded": always_degraded(experiment.arms)},
                "undecided": undecided(record),
                "arms": [
                    arm.model_dump(mode="json", include={"name", "outcome", "phase", "error", "factors"})
                    for arm in experiment.arms
                ],
                "speeds": _speeds(record),
                "conclusions": [c.model_dump(mode="json") for c in experiment.conclusions],
            },
            indent=1,
        )
        + "\n"
    )


def undecided(record: RunRecord) -> list[str]:
    """Return the planned arms without an outcome."""
    experiment = record.experiment
    assert experiment is not None  # a record of an experiment
    decided = {arm.name for arm in experiment.arms if arm.outcome.decided}
    return [name for name in experiment.planned if name not in decided]


def always_degraded(arms: Sequence[ArmRecord]) -> list[str]:
    """Return what was off in every arm that got so far."""
    told = [set(arm.degraded) for arm in arms if "control" in arm.seconds]
    return sorted(set.intersection(*told)) if told else []


def _speeds(record: RunRecord) -> list[dict[str, Any]]:
    experiment = record.experiment
    assert experiment is not None  # a record of an experiment
    # A stand-in moves nothing, however fast.
    if experiment.pinned_copy is None or experiment.conditions.stand_in:
        return []
    alone = [settling.arms[0] for settling in experiment.settling if len(settling.arms) == 1]
    return speeds(experiment.arms, alone, experiment.pinned_copy)


def _seconds(seconds: Mapping[str, float], verb: str) -> str:
    return f"{seconds[verb]:.2f} s" if verb in seconds else "-"


def _memory(arm: ArmRecord) -> str:
    held = [
        [r.bytes for r in arm.gpu_memory if r.moment == moment and r.bytes is not None] for moment in MOMENTS
    ]
    if not any(held):
        return "not read"
    return " → ".join(str(max(values) >> 20) if values else "?" for values in held)


def _cut(text: str) -> str:
    return text if len(text) <= _REASON else text[: _REASON - 1] + "…"
