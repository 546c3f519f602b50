"""The terminal summary: one line a clause, then what is missing, then the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from nvsnap_conformance.errors import NvsnapError
    from nvsnap_conformance.report.model import ClauseRecord, RunRecord

_COLOUR = {
    Outcome.PASSED: {"green": True},
    Outcome.XFAILED: {"yellow": True},
    Outcome.SKIPPED: {"yellow": True},
}
_NOTE_LINES = 6


def write_summary(
    reporter: pytest.TerminalReporter,
    record: RunRecord,
    folder: Path,
    troubles: Sequence[NvsnapError] = (),
) -> None:
    """Write the summary of a finished record to pytest's terminal; ``troubles`` are the run's, of no case."""
    reporter.write_sep("=", "clauses")
    by_clause: dict[str, list[ClauseRecord]] = {}
    for clause in record.clauses:
        by_clause.setdefault(clause.clause, []).append(clause)
    for name, own in by_clause.items():
        for outcome in dict.fromkeys(clause.outcome for clause in own):
            arms = " ".join(clause.arm for clause in own if clause.outcome is outcome)
            reporter.write(f"{outcome.value:>16}  ", **_COLOUR.get(outcome, {"red": True}))
            reporter.write_line(f"{name:<28} {arms}")
    machine: set[tuple[str, str]] = set()
    for clause in record.clauses:
        if not clause.outcome.conformant:
            key = (clause.arm, clause.note.partition("\n")[0])
            again = ", as above" if key in machine else ""
            reporter.write_line(f"{clause.clause} on {clause.arm}: {clause.outcome.value}{again}", red=True)
            if again:
                continue
            if clause.outcome is Outcome.ENVIRONMENT:
                machine.add(key)
            for line in clause.note.splitlines()[:_NOTE_LINES]:
                reporter.write_line(f"    {line}")
    for clause in record.clauses:
        if clause.outcome.conformant and clause.note and f"{clause.clause}@{clause.arm}" in record.missing:
            # What kept an expectation from being judged is noted last.
            why = clause.note.splitlines()[-1]
            reporter.write_line(f"{clause.clause} on {clause.arm}: {why}", yellow=True)
    told: set[str] = set()
    for clause in record.clauses:
        if clause.outcome is Outcome.SKIPPED and clause.must_run and clause.note not in told:
            told.add(clause.note)
            reporter.write_line(f"{clause.clause} was skipped: {clause.note}", yellow=True)
    for case in record.cases:
        if case.expectation:
            reporter.write_line(f"expected: {', '.join(case.clauses)} on {case.arm} [{case.signature}]")
            reporter.write_line(f"    {case.expectation}")
    for mutant in record.mutants:
        if mutant.survived:
            reporter.write_line(f"mutant {mutant.name} SURVIVED {', '.join(mutant.survived)}", red=True)
        if mutant.untried:
            reporter.write_line(f"mutant {mutant.name} not tried by {', '.join(mutant.untried)}", yellow=True)
        if mutant.killed_by:
            reporter.write_line(f"mutant {mutant.name} killed by {', '.join(mutant.killed_by)}")
    if record.missing:
        reporter.write_line("must-run clauses not executed:", red=True)
        missing: dict[str, list[str]] = {}
        for pair in record.missing:
            clause_id, _, arm = pair.partition("@")
            missing.setdefault(clause_id, []).append(arm)
        for clause_id, where in missing.items():
            reporter.write_line(f"    {clause_id:<28} {' '.join(where)}")
    good = record.exit_code == 0
    for engine in record.engines:
        reporter.write_line(
            f"engine {engine.distribution} for {engine.arm}: {engine.start}, "
            f"ready in {engine.seconds_to_ready:.1f} s, "
            f"isolated by {', '.join(engine.isolation) or 'session only'}"
        )
    for trouble in troubles:
        for line in f"error: {trouble}".splitlines():
            reporter.write_line(line, red=True)
    reporter.write_line(f"record: {folder}")
    reporter.write_sep("=", f"verdict: {record.verdict}", green=good, red=not good, bold=True)
