"""``nvsnap-conformance list``: clauses with their cases and mutants, without a GPU and without collecting."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.catalogue import Catalogue
    from nvsnap_conformance.clauses.registry import Clause
    from nvsnap_conformance.mutants import Mutant, Mutants


@click.command("list")
@click.option("--mutants", "show_mutants", is_flag=True, help="List the mutants instead of the clauses.")
@click.option("--profile", metavar="NAME", help="Only what belongs to this profile.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "md"]), default="text", show_default=True
)
def list_(show_mutants: bool, profile: str | None, form: str) -> None:
    """List the clauses with their cases and mutants, or the mutants.

    The cases' marks are read without importing them; a mark that contradicts the registry is an error.
    """
    from nvsnap_conformance.catalogue import load_catalogue  # noqa: PLC0415 - not for --help
    from nvsnap_conformance.clauses.registry import load_registry  # noqa: PLC0415
    from nvsnap_conformance.mutants import load_mutants  # noqa: PLC0415

    registry, mutants = load_registry(), load_mutants()
    chosen = registry.profile(profile).clauses if profile else tuple(registry.clauses)
    clauses = [clause for clause in registry.order() if clause.id in chosen]
    if show_mutants:
        selected = [m for m in mutants.mutants.values() if set(m.kills) & set(chosen)]
        click.echo(_mutants(selected, form))
    else:
        click.echo(_clauses(clauses, load_catalogue(), mutants, form))


def _clauses(clauses: Sequence[Clause], catalogue: Catalogue, mutants: Mutants, form: str) -> str:
    if form == "json":
        return json.dumps([_clause_data(c, catalogue, mutants) for c in clauses], indent=1)
    if form == "md":
        return _table(
            ("Clause", "Level", "Requirement", "TP", "Cases", "Mutants", "Source"),
            [
                (
                    f"`{clause.id}`",
                    clause.level.value,
                    clause.sentence,
                    f"{clause.min_world_size}+",
                    "<br>".join(f"`{case.nodeid}`" for case in catalogue.cases_of(clause.id)),
                    "<br>".join(f"`{mutant.name}`" for mutant in mutants.killers_of(clause.id)),
                    f"[{_project(clause)}]({clause.source.url}): {clause.source.reference}",
                )
                for clause in clauses
            ],
        )
    lines: list[str] = []
    for clause in clauses:
        lines.append(f"{clause.id}  {clause.level.value}  [{', '.join(_memberships(clause))}]")
        lines.append(f"    {clause.sentence}")
        if clause.needs or clause.min_world_size > 1:
            needs = [*clause.needs, *([f"world size {clause.min_world_size}"] * (clause.min_world_size > 1))]
            lines.append(f"    needs: {', '.join(needs)}")
        lines.append(f"    source: {_project(clause)}: {clause.source.reference} ({clause.source.url})")
        lines += [f"    case: {case.nodeid}" for case in catalogue.cases_of(clause.id)]
        killers = ", ".join(mutant.name for mutant in mutants.killers_of(clause.id)) or "none"
        lines.append(f"    mutants: {killers}")
    shown = {clause.id for clause in clauses}
    cases = [case for case in catalogue.cases if shown.intersection(case.clauses)]
    meant = [mutant for mutant in mutants.mutants.values() if shown.intersection(mutant.kills)]
    lines.append(f"{len(clauses)} clauses, {len(cases)} cases, {len(meant)} mutants")
    return "\n".join(lines)


def _clause_data(clause: Clause, catalogue: Catalogue, mutants: Mutants) -> dict[str, Any]:
    return {
        **clause.model_dump(mode="json"),
        "cases": [{"nodeid": c.nodeid, "line": c.line} for c in catalogue.cases_of(clause.id)],
        "mutants": [mutant.name for mutant in mutants.killers_of(clause.id)],
    }


def _project(clause: Clause) -> str:
    """Return the project that a clause's source lies in, with its version where one is stated."""
    return " ".join(filter(None, (clause.source.project, clause.source.version)))


def _memberships(clause: Clause) -> list[str]:
    return [f"{name} (must run)" if clause.must_run_in(name) else name for name in clause.profiles]


def _mutants(mutants: Sequence[Mutant], form: str) -> str:
    if form == "json":
        return json.dumps([mutant.model_dump(mode="json") for mutant in mutants], indent=1)
    if form == "md":
        return _table(
            ("Mutant", "Layer", "What it does", "Must be killed by"),
            [
                (f"`{m.name}`", m.layer, m.summary, "<br>".join(f"`{clause}`" for clause in m.kills))
                for m in mutants
            ],
        )
    lines: list[str] = []
    for mutant in mutants:
        lines.append(f"{mutant.name}  ({mutant.layer}{', dirty' if mutant.dirty else ''})")
        lines.append(f"    {mutant.summary}")
        lines.append(f"    must be killed by: {', '.join(mutant.kills)}")
    lines.append(f"{len(mutants)} mutants")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)
