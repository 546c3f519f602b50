"""What the hooks must refuse, hold and report by themselves, one situation at a time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.protocol import RequestFailed, Unavailable
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.hooks import contract
from nvsnap_conformance.lifecycle import accounting, oracle
from nvsnap_conformance.lifecycle.driver import Variant
from nvsnap_conformance.lifecycle.observe import check_completed
from nvsnap_conformance.outcomes import Finding, finding, require

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from nvsnap_conformance.engines.protocol import Completion, EngineHandle, HooksSpec
    from nvsnap_conformance.lifecycle.observe import CycleObservation
    from nvsnap_conformance.session.arms import Arm

SECONDS = 60.0
HELD_SECONDS = 5.0
"""How long a request is watched while its engine is prepared."""


@pytest.mark.clause("HOOKS-LOADER-ACTIVE")
def test_one_loader_is_active_on_every_rank(engine: EngineHandle, hooks: HooksSpec, arm: Arm) -> None:
    """Every rank names one loader with file and version, the same on all, and no second copy."""
    deadline = Deadline.after(SECONDS)
    replies = engine.rpc("identify", hooks=hooks, deadline=deadline)
    found = accounting.check_every_rank(replies, ranks=arm.tensor_parallel, verb="identify")
    loaders = set()
    for reply in replies:
        value = reply.value if isinstance(reply.value, dict) else {}
        loader = value.get("loader") or {}
        if not loader.get("file") or not loader.get("version"):
            found.append(finding(f"rank {reply.rank} names no loader: {value}", "LOADER:UNNAMED"))
        loaders.add((loader.get("file"), loader.get("version")))
        if value.get("copies"):
            found.append(
                finding(f"rank {reply.rank} can import other copies: {value['copies']}", "LOADER:COPIES")
            )
    if len(loaders) > 1:
        found.append(finding(f"ranks run different loaders: {sorted(map(str, loaders))}", "LOADER:DIFFER"))
    require(found)


@pytest.mark.clause("HOOKS-PREPARE-RESTORE-PAIR")
def test_unpaired_calls_are_refused(engine: EngineHandle, hooks: HooksSpec, arm: Arm) -> None:
    """Restore on a serving engine and a second prepare are refused, and change nothing."""
    require(
        contract.unpaired_calls(engine, hooks, ranks=arm.tensor_parallel, deadline=Deadline.after(SECONDS))
    )


@pytest.mark.clause("HOOKS-ERROR-IS-VALUE")
def test_a_failing_hook_answers_as_a_value(engine: EngineHandle, hooks: HooksSpec, arm: Arm) -> None:
    """A hook that fails on the last rank answers with that rank's error, and later replies are in step."""
    require(contract.failing_call(engine, hooks, ranks=arm.tensor_parallel, deadline=Deadline.after(SECONDS)))


@pytest.mark.clause("HOOKS-VERSION-GATE")
def test_unknown_engine_version_is_refused(engine: EngineHandle, hooks: HooksSpec, arm: Arm) -> None:
    """Hooks that meet an engine version that they do not know refuse, and touch nothing."""
    require(
        contract.unknown_version(engine, hooks, ranks=arm.tensor_parallel, deadline=Deadline.after(SECONDS))
    )


@pytest.mark.clause("HOOKS-REQUEST-HELD")
def test_a_request_at_a_prepared_engine_is_held(
    engine: EngineHandle, hooks: HooksSpec, run_cycle: Callable[..., CycleObservation]
) -> None:
    """A request sent while prepared waits or gets 503; no forward pass runs; afterwards it is right."""
    deadline = Deadline.after(2 * SECONDS)
    prompt = oracle.PROMPTS[0]
    request: list[Future[Completion]] = []
    found: list[Finding] = []

    def between(moment: str) -> None:
        if moment == "prepared":
            request.append(engine.submit(prompt, max_tokens=oracle.MAX_TOKENS, deadline=deadline))
            wait_for(
                "the request to reach the engine",
                lambda: request[0].done() or engine.waiting_requests(deadline) > 0,
                Deadline.after(SECONDS / 3),
            )
            _watch_while_held(engine, hooks, request[0])
        elif request[0].done() and request[0].exception() is None:
            found.append(
                finding("a request was answered while the engine was prepared", "HELD:ANSWERED_PREPARED")
            )

    observation = run_cycle(Variant.HOOKS_ONLY, between=between)
    found += check_completed(observation)
    require(found + _check_forwards(engine, hooks, deadline))
    try:
        answer = request[0].result(timeout=max(0.1, deadline.remaining()))
    except Unavailable:
        answer = engine.generate([prompt], max_tokens=oracle.MAX_TOKENS, deadline=deadline)[0]
    except RequestFailed as error:
        require([finding(f"the held request failed after resume: {error}", "HELD:FAILED")])
        return
    reference = oracle.Answers((observation.reference.completions[0],))
    require(oracle.check_answers(reference, oracle.Answers((answer,)), what="the held request"))


def _watch_while_held(engine: EngineHandle, hooks: HooksSpec, request: Future[Completion]) -> None:
    """Keep the engine prepared until the request gets somewhere, or has been held for a while.

    An engine that does not hold it schedules it at once; on a busy machine that may take a moment.
    """

    def moved() -> bool:
        try:
            replies = engine.rpc("forwards", hooks=hooks, deadline=Deadline.after(HELD_SECONDS))
        except (RequestFailed, DeadlineExceeded):
            return True  # the workers no longer answer: something reached them
        met = [reply.value["while_prepared"] for reply in replies if isinstance(reply.value, dict)]
        return request.done() or any(met)

    with contextlib.suppress(DeadlineExceeded):
        wait_for("the request to get anywhere", moved, Deadline.after(HELD_SECONDS))


def _check_forwards(engine: EngineHandle, hooks: HooksSpec, deadline: Deadline) -> list[Finding]:
    replies = engine.rpc("forwards", hooks=hooks, deadline=deadline)
    return [
        finding(
            f"rank {reply.rank}: {reply.value['while_prepared']} forward passes ran on a prepared worker",
            "HELD:FORWARD_PREPARED",
        )
        for reply in replies
        if not isinstance(reply.value, dict) or reply.value["while_prepared"]
    ]
