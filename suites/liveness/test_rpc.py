"""The engine's RPC: every reply belongs to the call that was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import RequestFailed
from nvsnap_conformance.lifecycle.accounting import check_every_rank
from nvsnap_conformance.outcomes import Outcome, finding, require

if TYPE_CHECKING:
    from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RankReply
    from nvsnap_conformance.session.arms import Arm

CALLS = 5
RPC_SECONDS = 30.0


@pytest.mark.clause("RPC-REPLY-IN-STEP")
def test_replies_are_in_step(engine: EngineHandle, hooks: HooksSpec, arm: Arm) -> None:
    """A row of calls is answered by every rank with the nonce of its own call."""
    deadline = Deadline.after(RPC_SECONDS)
    for number in range(1, CALLS + 1):
        replies = engine.rpc("status", hooks=hooks, deadline=deadline)
        require(check_every_rank(replies, ranks=arm.tensor_parallel, verb=f"status, call {number}"))


@pytest.mark.spoils_engine
@pytest.mark.clause("RPC-REPLY-IN-STEP")
def test_replies_are_in_step_after_a_failed_call(engine: EngineHandle, hooks: HooksSpec, arm: Arm) -> None:
    """One call that fails on every rank must not leave replies behind for the next calls to find."""
    deadline = Deadline.after(RPC_SECONDS)
    with pytest.raises(RequestFailed):
        engine.raw_rpc("nvsnap_no_such_method", deadline=deadline)
    answered: list[tuple[int, list[RankReply]]] = []
    refusals: list[str] = []
    for number in range(1, CALLS + 1):
        try:
            answered.append((number, engine.rpc("status", hooks=hooks, deadline=deadline)))
        except RequestFailed as error:
            # The left-over failure of another rank comes back as this call's own: judged by what follows.
            refusals.append(f"call {number}: {error}")
    found = [
        problem
        for number, replies in answered
        for problem in check_every_rank(
            replies, ranks=arm.tensor_parallel, verb=f"call {number} after a failed one"
        )
    ]
    if refusals and not found:
        found.append(
            finding(
                f"valid calls were refused after a failed one: {'; '.join(refusals)}",
                "RPC:REFUSED",
                outcome=Outcome.FAILED,
            )
        )
    require(found)
