"""``nvsnap-conformance compare``: two run records, or a record and expected outcomes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from nvsnap_conformance.report.compare import Disagreement, Facts


@click.command()
@click.argument("left", type=click.Path(path_type=Path), metavar="A")
@click.argument("right", type=click.Path(path_type=Path), metavar="B")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def compare(left: Path, right: Path, form: str) -> None:
    """List every disagreement between A and B.

    Each is a run record (its folder or results.json) or an experiment's page (teardown.json); one of them
    may be a file of expected outcomes (TOML). Exit codes: 0 they agree, 1 they do not, 2 one of them cannot
    be read.
    """
    from nvsnap_conformance.errors import UsageError  # noqa: PLC0415 - not for --help
    from nvsnap_conformance.report.compare import compare as find  # noqa: PLC0415
    from nvsnap_conformance.report.compare import not_expected  # noqa: PLC0415
    from nvsnap_conformance.report.compare_input import read_side  # noqa: PLC0415

    if left.suffix == right.suffix == ".toml":
        raise UsageError(
            "two files of expected outcomes cannot be compared",
            next_step="name a run record as one of the two",
        )
    one, other = read_side(left), read_side(right)
    found, notes = find(one, other), not_expected(one, other)
    click.echo(_as_json(one, other, found, notes) if form == "json" else _as_text(one, other, found, notes))
    sys.exit(1 if found else 0)


def _as_json(one: Facts, other: Facts, found: list[Disagreement], notes: list[str]) -> str:
    from nvsnap_conformance.report.compare import FORMAT  # noqa: PLC0415

    return json.dumps(
        {
            "format": FORMAT,
            "left": one.source,
            "right": other.source,
            "equal": not found,
            "disagreements": [disagreement.as_json() for disagreement in found],
            "not_expected": notes,
        },
        indent=1,
    )


def _as_text(one: Facts, other: Facts, found: list[Disagreement], notes: list[str]) -> str:
    lines = [f"A: {one.source}", f"B: {other.source}"]
    lines += [str(disagreement) for disagreement in found]
    lines += [f"not in the expectations: {', '.join(notes)}"] if notes else []
    lines.append(f"{len(found)} disagreements" if found else "they agree")
    return "\n".join(lines)
