"""How an engine ends: by a dead rank, by SIGTERM, and by the suite's own teardown."""

from __future__ import annotations

import signal
import sys
import uuid
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.engines.protocol import Completion, Health, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.fixtures.arms import implementation
from nvsnap_conformance.lifecycle.driver import Variant
from nvsnap_conformance.lifecycle.observe import check_completed
from nvsnap_conformance.lifecycle.residue import RUN_ID, HostSnapshot, check_residue
from nvsnap_conformance.outcomes import Outcome, finding, require

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from nvsnap_conformance.lifecycle.observe import CycleObservation
    from nvsnap_conformance.session.arms import Arm
    from nvsnap_conformance.session.pool import LiveEngine

END_SECONDS = 40.0
"""Allowance for a program to come up, or to end by itself, in seconds."""

FAIL_SECONDS = 20.0
"""Allowance for a front to notice a dead rank, in seconds. Users report waits of minutes without an end
(vLLM issues 41530, 46611); vLLM 0.32 on CPU was measured to end in about a second."""

REQUEST_TOKENS = 128


@pytest.mark.takes_spoiled_engine
@pytest.mark.ends_engine
@pytest.mark.clause("LIVE-NO-HALF-ALIVE")
def test_front_fails_when_a_rank_dies(live_engine: LiveEngine) -> None:
    """After SIGKILL of the last rank the front answers unhealthy or not at all, and requests end."""
    engine = live_engine.handle
    deadline = Deadline.after(FAIL_SECONDS)
    running = engine.submit(
        live_engine.baseline.completions[0].prompt, max_tokens=REQUEST_TOKENS, deadline=deadline
    )
    victim = live_engine.ranks[-1]
    assert victim.process.send(signal.SIGKILL), f"{victim} was gone before it was killed"
    late = engine.submit(
        live_engine.baseline.completions[1].prompt, max_tokens=REQUEST_TOKENS, deadline=deadline
    )
    found = []
    try:
        wait_for(
            "the front to stop answering as healthy",
            lambda: engine.health(deadline.sooner(5.0)) is not Health.SERVING,
            deadline,
        )
    except DeadlineExceeded:
        found.append(
            finding(
                f"{FAIL_SECONDS:.0f} s after rank {victim.rank} was killed the front still answers healthy",
                "LIVENESS:HALF_ALIVE",
            )
        )
    for name, request in (("running", running), ("new", late)):
        if not _ended(request, deadline):
            found.append(
                finding(
                    f"a {name} request still waits {FAIL_SECONDS:.0f} s after rank {victim.rank} was killed",
                    "LIVENESS:REQUEST_WAITS",
                    outcome=Outcome.HANG,
                )
            )
    require(found)


def _ended(request: Future[Completion], deadline: Deadline) -> bool:
    """Whether a request ends by the deadline, in an answer or in a failure; a wait is neither."""
    try:
        request.result(timeout=max(0.1, deadline.remaining()))
    except (TimeoutError, DeadlineExceeded):
        return False
    except RequestFailed:
        return True
    return True


@pytest.mark.ends_engine
@pytest.mark.clause("ENGINE-LEAVES-NOTHING")
def test_engine_leaves_nothing_after_sigterm(
    live_engine: LiveEngine, run_cycle: Callable[..., CycleObservation]
) -> None:
    """After a cycle SIGTERM ends the engine by itself, and nothing is left in its own namespaces."""
    found = check_completed(run_cycle(Variant.HOOKS_ONLY))
    ending = live_engine.handle.process.terminate(Deadline.after(END_SECONDS))
    found += check_residue(ending.residue)
    if ending.killed:
        found.append(
            finding(
                "not all of the engine ended by SIGTERM in time; SIGKILL was needed",
                "RESIDUE:NEEDED_KILL",
            )
        )
    require(found)


UNTIDY = """
import signal, socket, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("/dev/shm/nvsnap-untidy", "w").write("x" * 4096)
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("untidy: up", flush=True)
signal.pause()
"""


@pytest.mark.clause("SUITE-LEAVES-NOTHING")
def test_suite_leaves_nothing_of_an_untidy_program(
    host_arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with a daemon, shared memory and a listener, deaf to SIGTERM, is gone after close."""
    # A run of its own for the audit: workers beside this one start engines at the same time.
    monkeypatch.setenv(RUN_ID, uuid.uuid4().hex)
    owner = implementation(host_arm.mutant, "process", EngineProcess)
    before = HostSnapshot.take()
    process = owner.launch([sys.executable, "-c", UNTIDY], env={"PATH": "/usr/bin:/bin"}, workdir=tmp_path)
    try:
        wait_for(
            "the untidy program to come up",
            lambda: "untidy: up" in process.log_path.read_text(),
            Deadline.after(END_SECONDS),
            detail=lambda: process.log_tail(20),
        )
        process.close()
        left = before.diff(HostSnapshot.take())
    finally:
        EngineProcess.close(process)
    require(check_residue(left, of="the suite"))
