"""A shadow engine, checkpointed and held, that serves once the active engine beside it has been killed."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.lifecycle.log_errors import check_log
from nvsnap_conformance.lifecycle.observe import check_completed
from nvsnap_conformance.lifecycle.oracle import Answers, check_answers, take_answers
from nvsnap_conformance.lifecycle.provenance import check_is_restore
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.engines.protocol import EngineHandle
    from nvsnap_conformance.lifecycle.observe import CycleObservation
    from nvsnap_conformance.session.pool import LiveEngine

ANSWERS = 21
"""Consecutive right answers of the promoted engine, as many as the report of ai-dynamo/snapshot counts."""

SECONDS = 120.0
END_SECONDS = 20.0


@pytest.mark.clause("LIFE-SHADOW-PROMOTED")
def test_a_shadow_serves_after_the_active_engine_was_killed(
    engine: EngineHandle, second_engine: LiveEngine, run_cycle: Callable[..., CycleObservation]
) -> None:
    """The shared engine is held as a shadow while the second is killed; then it answers in its place."""
    active = second_engine.handle

    def kill_the_active() -> None:
        require(
            check_answers(
                second_engine.baseline,
                take_answers(active, Deadline.after(SECONDS)),
                what="the active engine",
            )
        )
        for process in active.process.tree():
            process.send(signal.SIGKILL)
        wait_for(
            "the killed engine to be gone", lambda: not active.process.tree(), Deadline.after(END_SECONDS)
        )

    shadow = run_cycle(while_away=kill_the_active)
    found = check_completed(shadow) + check_log(shadow.logged)
    found += check_is_restore(
        shadow.planted, shadow.before, shadow.identities, replaces_processes=shadow.replaces_processes
    )
    require(found)
    deadline = Deadline.after(SECONDS)
    for number in range(ANSWERS):
        before = shadow.reference.completions[number % len(shadow.reference.completions)]
        answer = take_answers(engine, deadline, prompts=[before.prompt])
        require(
            check_answers(
                Answers((before,)), answer, what=f"answer {number + 1} of {ANSWERS} of the promoted engine"
            )
        )
