"""A whole engine in an image: dumped once, restored several times, with requests under way, and refused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.checkpoint.criu_failure import CriuFailure
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import Health, NotConnected, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.fixtures.images import RESTORES
from nvsnap_conformance.lifecycle import images, oracle
from nvsnap_conformance.outcomes import Outcome, finding, require

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from nvsnap_conformance.checkpoint.protocol import HostCheckpointer
    from nvsnap_conformance.engines.protocol import Completion
    from nvsnap_conformance.lifecycle.images import ImageObservation
    from nvsnap_conformance.session.pool import LiveEngine

SECONDS = 180.0
SPANNING_TOKENS = 192
"""Many, so that few connections are opened meanwhile: one that is only half open at the freeze makes CRIU
refuse, and the dump is tried again. An engine of the default target takes 256 in all."""
SPANNING_REQUESTS = 4
"""Requests that are kept under way; an engine of the default target runs four at a time."""


class SteadyLoad:
    """Keeps a number of requests under way: whenever one ends, the next is sent, until it is stopped."""

    def __init__(self, send: Callable[[], Future[Completion]], width: int) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._stopped = False
        self._under_way: set[Future[Completion]] = set()
        for _ in range(width):
            self._next()

    def _next(self) -> None:
        with self._lock:
            if self._stopped:
                return
            request = self._send()
            self._under_way.add(request)
        request.add_done_callback(self._ended)

    def _ended(self, request: Future[Completion]) -> None:
        with self._lock:
            if self._stopped:
                return
            self._under_way.discard(request)
        self._next()

    def stop(self) -> list[Future[Completion]]:
        """Send no more, and return what is under way now."""
        with self._lock:
            self._stopped = True
            return [request for request in self._under_way if not request.done()]


@pytest.mark.clause("IMAGE-RESTORES-REPEAT")
def test_every_restore_answers_alike(image: ImageObservation) -> None:
    """Three restores from one image give the tokens and log probabilities of before."""
    require(images.check_restores_repeat(image, restores=RESTORES))


@pytest.mark.clause("IMAGE-IS-A-RESTORE")
def test_every_restore_is_a_restore(image: ImageObservation) -> None:
    """Each rank is a new process with the planted nonce and the same weights, every time."""
    require(images.check_each_is_a_restore(image))


@pytest.mark.clause("IMAGE-HOLDS-STATE")
def test_the_image_holds_the_engine_s_memory(image: ImageObservation) -> None:
    """The image is no smaller than the memory that no file holds, and all of that comes back."""
    require(image.state_findings)


@pytest.mark.clause("IMAGE-SPANS-REQUESTS")
def test_a_request_spans_dump_and_restore(
    live_engine: LiveEngine, image_checkpointer: HostCheckpointer, image_folder: Path
) -> None:
    """A request that runs while the engine is dumped gets its answer from the restored engine."""
    engine = live_engine.handle
    deadline = Deadline.after(SECONDS)
    prompt = live_engine.baseline.completions[1].prompt
    reference = engine.generate([prompt], max_tokens=SPANNING_TOKENS, deadline=deadline)[0]
    load = SteadyLoad(
        lambda: engine.submit(prompt, max_tokens=SPANNING_TOKENS, deadline=deadline), SPANNING_REQUESTS
    )
    try:
        image_checkpointer.dump(engine.process, image_folder, deadline)
    finally:
        spanning = load.stop()  # the engine is gone, so none of these can have been answered by it
    image_checkpointer.load(engine.process, image_folder, deadline)
    live_engine.ranks = engine.ranks(deadline)
    found = []
    answered = 0
    for request in spanning:
        try:
            answer = request.result(timeout=max(0.1, deadline.remaining()))
        except NotConnected:
            continue  # sent when the dumped engine was gone already, so it was never under way
        except (RequestFailed, DeadlineExceeded, TimeoutError) as error:
            found.append(finding(f"a request that spanned the dump failed: {error}", "SPAN:LOST"))
            continue
        if answer.tokens != reference.tokens:
            found.append(finding(f"a request that spanned the dump got {answer.tokens}", "SPAN:TOKENS"))
        answered += 1
    if not answered and not found:
        found.append(finding("no request was under way at the dump", "SPAN:NOTHING", outcome=Outcome.UNKNOWN))
    require(found)


@pytest.mark.clause("IMAGE-FAILED-DUMP-SERVES")
def test_a_failed_dump_leaves_the_engine_serving(
    live_engine: LiveEngine,
    image_checkpointer: HostCheckpointer,
    image_folder: Path,
    debugger: Callable[[int], None],
) -> None:
    """A debugger on one rank fails the dump; the engine serves as if nothing had been."""
    engine = live_engine.handle
    deadline = Deadline.after(SECONDS)
    found = []
    debugger(live_engine.ranks[-1].process.pid)
    try:
        image_checkpointer.dump(engine.process, image_folder, deadline)
        found.append(finding("a dump that could not be was reported as a success", "DUMP:FALSE_SUCCESS"))
    except CriuFailure as failure:
        if failure.engine_runs is not True:
            found.append(finding(f"the failed dump took the engine along: {failure}", "DUMP:ENGINE_LOST"))
    require(found)
    if engine.health(deadline) is not Health.SERVING:
        require([finding("after a failed dump the engine does not serve", "DUMP:ENGINE_LOST")])
    again = oracle.take_answers(engine, deadline)
    require(oracle.check_answers(live_engine.baseline, again, what="after a failed dump"))
