"""The kill matrix: every mutant is caught by the clause meant for it, and every case catches one.

One run of the suite over all mutants on the default target, with real engines, by two workers.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.catalogue import load_catalogue
from nvsnap_conformance.mutants import Mutant, load_mutants
from nvsnap_conformance.outcomes import Outcome
from nvsnap_conformance.report.record import read_results
from nvsnap_conformance.session.judge import is_kill

if TYPE_CHECKING:
    from nvsnap_conformance.report.model import RunRecord

SECONDS = 1800


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    out = tmp_path_factory.mktemp("matrix")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "nvsnap_conformance.cli",
            "run",
            "--mutant",
            "all",
            "--out",
            str(out),
            "--",
            "-n",
            "2",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 1, f"a run over known-bad implementations must fail:\n{done.stdout[-6000:]}"
    return read_results(out / "results.json")


def test_every_clause_has_a_mutant() -> None:
    assert load_mutants().uncovered() == ()


@pytest.mark.parametrize("mutant", load_mutants().mutants.values(), ids=lambda mutant: mutant.name)
def test_the_mutant_is_killed_by_the_clauses_meant_for_it(matrix: RunRecord, mutant: Mutant) -> None:
    (record,) = [record for record in matrix.mutants if record.name == mutant.name]
    told = [
        f"{case.nodeid}: {case.outcome} {case.signature} {case.message[:300]}"
        for case in matrix.cases
        if case.mutant == mutant.name
    ]
    assert record.survived == [], "\n".join(told)
    assert record.killed_by == sorted(mutant.kills)


@pytest.mark.parametrize("case", load_catalogue().cases, ids=lambda case: case.nodeid)
def test_the_case_kills_a_mutant(matrix: RunRecord, case: object) -> None:
    nodeid = getattr(case, "nodeid", "")
    signatures = {name: mutant.signature for name, mutant in load_mutants().mutants.items()}
    seen = [record for record in matrix.cases if record.nodeid.partition("[")[0].endswith(nodeid)]
    assert seen, "the case did not run under any mutant"
    killed = [r.mutant for r in seen if r.mutant and is_kill(r, signatures[r.mutant])]
    assert killed, "\n".join(f"{r.mutant}: {r.outcome} {r.signature} {r.message[:200]}" for r in seen)


def test_no_mutant_breaks_the_machine_or_the_suite(matrix: RunRecord) -> None:
    broken = [
        f"{case.nodeid}: {case.message[:300]}"
        for case in matrix.cases
        if case.outcome in {Outcome.ENVIRONMENT, Outcome.UNKNOWN, Outcome.BLOCKED, Outcome.BAD_EXPECTATION}
    ]
    assert broken == []
    assert matrix.missing == []
