"""One full lifecycle: quiesce, prepare, host checkpoint, load, rebuild, resume; judged from its record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.checkpoint.freeze import check_all_stopped
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.lifecycle import oracle
from nvsnap_conformance.lifecycle.log_errors import check_log
from nvsnap_conformance.lifecycle.observe import check_completed
from nvsnap_conformance.lifecycle.provenance import check_is_restore, check_weights
from nvsnap_conformance.lifecycle.trace import check_order, wanted
from nvsnap_conformance.lifecycle.transports import check_environment, check_settings
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.engines.protocol import EngineHandle
    from nvsnap_conformance.lifecycle.observe import CycleObservation
    from nvsnap_conformance.session.arms import Arm

REPEATS = 3
ANSWER_SECONDS = 60.0


@pytest.mark.clause("LIFE-CONTROL-STABLE")
def test_control_arm_repeats_its_answers(engine: EngineHandle) -> None:
    """Without any checkpoint the engine gives the same tokens and log probabilities every time."""
    deadline = Deadline.after(ANSWER_SECONDS)
    first = oracle.take_answers(engine, deadline)
    for repeat in range(1, REPEATS):
        again = oracle.take_answers(engine, deadline)
        require(oracle.check_answers(first, again, what=f"control arm, repeat {repeat}"))


@pytest.mark.clause("LIFE-TOKENS-EQUAL")
def test_answers_after_the_cycle_equal_those_before(cycle: CycleObservation) -> None:
    """Tokens equal and log probabilities within the bound, on every repeat after the cycle."""
    found = check_completed(cycle)
    for number, answers in enumerate([*cycle.after, None] if not cycle.after else cycle.after, start=1):
        found += oracle.check_answers(cycle.reference, answers, what=f"after the cycle, repeat {number}")
    require(found)


@pytest.mark.clause("LIFE-ORDER")
def test_trace_obeys_the_state_machine(cycle: CycleObservation, arm: Arm) -> None:
    """Every verb that the target calls for is there, and has ended on all ranks before the next begins."""
    assert arm.target is not None
    layers = arm.target.checkpoint
    required = wanted(
        host=layers.host != "none", device=layers.device != "none", sleeps=layers.sleep_level is not None
    )
    found = check_order(cycle.record.events, ranks=cycle.record.ranks, required=required)
    require(check_completed(cycle) + found)


@pytest.mark.clause("LIFE-ALL-STOPPED")
def test_every_thread_is_stopped_at_the_checkpoint(cycle: CycleObservation) -> None:
    """Between dump and load no thread of any process of the engine runs, by the kernel's word."""
    require(check_completed(cycle) + check_all_stopped(cycle.record.stopped))


@pytest.mark.clause("RESTORE-IS-A-RESTORE")
def test_what_came_back_is_the_same_engine(cycle: CycleObservation) -> None:
    """Each rank still holds the nonce planted before, in the process that is expected to hold it."""
    require(
        check_completed(cycle)
        + check_is_restore(
            cycle.planted, cycle.before, cycle.identities, replaces_processes=cycle.replaces_processes
        )
    )


@pytest.mark.clause("LIFE-WEIGHTS-INTACT")
def test_weights_are_unchanged(cycle: CycleObservation) -> None:
    """A checksum over every rank's weights, packed ones included, is what it was."""
    require(check_completed(cycle) + check_weights(cycle.before, cycle.identities))


@pytest.mark.clause("LIFE-ENVIRONMENT-STABLE")
def test_transports_are_chosen_by_the_same_settings(cycle: CycleObservation) -> None:
    """No rank's variables that decide on transports changed, ever, and all ranks have the same."""
    require(
        check_completed(cycle)
        + check_environment(cycle.before, cycle.identities)
        + check_settings(cycle.before, cycle.record.replies)
    )


@pytest.mark.clause("LIFE-LOG-CLEAN")
def test_no_device_error_is_logged(cycle: CycleObservation) -> None:
    """From prepare to the last answer the engine's log names no error of CUDA or NCCL."""
    require(check_completed(cycle) + check_log(cycle.logged))


@pytest.mark.clause("LIFE-REPEATS")
def test_second_and_third_cycle_answer_alike(
    cycle: CycleObservation, run_cycle: Callable[..., CycleObservation]
) -> None:
    """Two more cycles on the same engine give the answers of the first reference."""
    require(check_completed(cycle))
    for number in (2, 3):
        again = run_cycle()
        found = check_completed(again)
        for answers in again.after:
            found += oracle.check_answers(cycle.reference, answers, what=f"after cycle {number}")
        require(found)


@pytest.mark.clause("LIFE-TEXT-ORACLE")
def test_text_oracle_of_the_target(engine: EngineHandle, arm: Arm) -> None:
    """The completions contain the texts that the target states for its own weights."""
    assert arm.target is not None
    expected = [(entry.prompt, entry.expect) for entry in arm.target.oracle]
    answers = oracle.take_answers(
        engine, Deadline.after(ANSWER_SECONDS), prompts=[prompt for prompt, _ in expected]
    )
    require(oracle.check_text(expected, answers.completions))
