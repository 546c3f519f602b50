"""kill -9 of the suite, of a supervisor and of init, at every stage: nothing may be left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import process
from nvsnap_conformance.engines.channel import Channel
from nvsnap_conformance.engines.namespaces import isolation_gap
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.lifecycle.residue import RUN_ID, HostSnapshot, Residue, run_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(process.__file__).parents[2]

ISOLATED = pytest.param(
    True,
    id="isolated",
    marks=pytest.mark.skipif(
        isolation_gap() is not None, reason=f"no right to make namespaces: {isolation_gap()}"
    ),
)
PLAIN = pytest.param(False, id="plain")

# A stand-in for the suite: launches a program with a daemon, and dies at the stage that it is told.
SUITE = '''
import os, signal, sys
from pathlib import Path
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import supervision
from nvsnap_conformance.engines.channel import Channel
from nvsnap_conformance.engines.process import EngineProcess

STAGE, GROUP, ISOLATE, WORKDIR = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True", Path(sys.argv[4])

def at(stage):
    if stage == STAGE:
        print("dying", flush=True)
        os.killpg(0, signal.SIGKILL) if GROUP else os.kill(os.getpid(), signal.SIGKILL)

spawn, send, receive = supervision.spawn_helper, Channel.send, Channel.receive

def spawn_helper(*args, **kwargs):
    helper = spawn(*args, **kwargs)
    at("spawned")
    return helper

def send_and_die(self, **message):
    send(self, **message)
    at("described" if "argv" in message else message["op"])

def receive_and_die(self, timeout):
    message = receive(self, timeout)
    if message is not None:
        at(message["event"])
    return message

supervision.spawn_helper, Channel.send, Channel.receive = spawn_helper, send_and_die, receive_and_die

ENGINE = """
import os, signal, socket
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("/dev/shm/nvsnap-test-%d" % os.getpid(), "w") if os.getppid() == 1 else None
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        print("up", flush=True)
        while True: signal.pause()
    os._exit(0)
while True: signal.pause()
"""
engine = EngineProcess.launch([sys.executable, "-c", ENGINE], env={}, workdir=WORKDIR, isolate=ISOLATE)
wait_for("the engine", lambda: "up" in engine.log_tail(), Deadline.after(20), detail=engine.log_tail)
print(engine.root.pid, flush=True)
at("running")
if STAGE == "forked-copy":
    if os.fork() == 0:
        sys.stdin.read()  # a copy of the suite that holds every descriptor
        os._exit(0)
    at("forked-copy")
if STAGE == "inside":
    spawn_inside = Channel.receive
    def die_inside(self, timeout):
        wait_for("the helper", lambda: (WORKDIR / "inside").exists(), Deadline.after(20))
        at("inside")
    Channel.receive = die_inside
    both = "touch inside; sleep 1000 & setsid sleep 1000"
    engine.run_inside(["sh", "-c", both], timeout=100, cwd=str(WORKDIR))
if STAGE == "terminating":
    audit = EngineProcess.audit
    def die_auditing(self):
        audit(self)
        at("terminating")
    EngineProcess.audit = die_auditing
    engine.terminate(Deadline.after(0.1))
engine.close()
print("not killed", flush=True)
'''

STAGES = [
    "spawned",
    "described",
    "init",
    "namespaces",
    "forked",
    "go",
    "started",
    "running",
    "forked-copy",
    "inside",
    "terminating",
    "end",
]


class Victim:
    """A stand-in suite with its own run id."""

    def __init__(self, workdir: Path, *, stage: str, group: bool, isolate: bool) -> None:
        self.run = uuid.uuid4().hex
        self.before = HostSnapshot.take(self.run)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUITE, stage, str(group), str(isolate), str(workdir)],
            cwd=ROOT,
            env={**os.environ, RUN_ID: self.run},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def await_death(self) -> str:
        assert self.process.stdout is not None
        # A copy of the suite may hold the pipe, so its end cannot be waited for.
        self.process.wait(60)
        os.set_blocking(self.process.stdout.fileno(), False)
        return self.process.stdout.read() or ""

    def left(self) -> Residue:
        return self.before.diff(HostSnapshot.take(self.run))


DEATHS = [
    *[pytest.param(stage, False, True, id=stage, marks=ISOLATED.marks) for stage in STAGES],
    *[
        pytest.param(stage, False, False, id=f"{stage}-plain")
        for stage in STAGES
        if stage not in {"init", "namespaces"}  # which a plain launch has not
    ],
    *[
        pytest.param(stage, True, True, id=f"{stage}-group", marks=ISOLATED.marks)
        for stage in ("described", "go", "inside")
    ],
    *[pytest.param(stage, True, False, id=f"{stage}-group-plain") for stage in ("go", "inside")],
]


@pytest.mark.parametrize(("stage", "group", "isolate"), DEATHS)
def test_nothing_outlives_a_killed_suite(tmp_path: Path, stage: str, group: bool, isolate: bool) -> None:
    victim = Victim(tmp_path, stage=stage, group=group, isolate=isolate)
    copies = 1 if stage == "forked-copy" else 0
    try:
        assert victim.await_death().splitlines()[-1] == "dying"
        assert victim.process.returncode == -signal.SIGKILL
        wait_for(
            "the end of the run's processes",
            lambda: len(run_processes(victim.run)) == copies,
            Deadline.after(20),
            detail=lambda: str(run_processes(victim.run)),
        )
    finally:
        assert victim.process.stdin is not None
        victim.process.stdin.close()
    wait_for(
        "nothing to be left",
        lambda: victim.left().empty,
        Deadline.after(20),
        detail=lambda: str(victim.left()),
    )


def _kill_at(monkeypatch: pytest.MonkeyPatch, event: str, victim: str) -> None:
    """Let a launch lose its supervisor or its init at the moment when ``event`` is reported."""
    receive = Channel.receive
    pids: dict[str, int] = {}

    def receive_and_kill(self: Channel, timeout: float | None) -> dict[str, Any] | None:
        message = receive(self, timeout)
        if message is not None:
            (launching,) = process._live
            supervisor = launching._supervision._supervisor
            assert supervisor is not None
            pids["supervisor"] = supervisor.pid
            if message["event"] == "init":
                pids["init"] = message["pid"]
            if message["event"] == event and victim in pids:
                os.kill(pids[victim], signal.SIGKILL)
        return message

    monkeypatch.setattr(Channel, "receive", receive_and_kill)


@pytest.fixture
def clean_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """See afterwards that the run, which gets an id of its own, has left nothing."""
    monkeypatch.setenv(RUN_ID, uuid.uuid4().hex)
    before = HostSnapshot.take()
    yield
    wait_for(
        "nothing to be left",
        lambda: before.diff(HostSnapshot.take()).empty,
        Deadline.after(20),
        detail=lambda: str(before.diff(HostSnapshot.take())),
    )


@pytest.mark.usefixtures("clean_host")
@pytest.mark.parametrize(
    ("victim", "event", "isolate"),
    [
        *[
            pytest.param(victim, event, True, id=f"{victim}-{event}", marks=ISOLATED.marks)
            for victim in ("supervisor", "init")
            for event in ("init", "namespaces", "forked")
        ],
        pytest.param("supervisor", "forked", False, id="supervisor-forked-plain"),
    ],
)
def test_launch_that_loses_its_supervisor_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, event: str, isolate: bool
) -> None:
    _kill_at(monkeypatch, event, victim)
    with pytest.raises(EnvironmentFailure, match=r"ended or fell silent|was killed"):
        EngineProcess.launch(["sleep", "1000"], env={"PATH": "/bin"}, workdir=tmp_path, isolate=isolate)
    assert not process._live


@pytest.mark.usefixtures("clean_host")
@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_interrupted_launch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolate: bool
) -> None:
    receive = Channel.receive

    def interrupted(self: Channel, timeout: float | None) -> dict[str, Any] | None:
        message = receive(self, timeout)
        if message is not None and message["event"] == "forked":
            raise KeyboardInterrupt
        return message

    monkeypatch.setattr(Channel, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EngineProcess.launch(["sleep", "1000"], env={"PATH": "/bin"}, workdir=tmp_path, isolate=isolate)
    assert not process._live


# What a user without rights sees; printed as values that the test compares.
UNPRIVILEGED = """
import os, sys
from pathlib import Path
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.namespaces import isolation_gap
from nvsnap_conformance.engines.process import EngineProcess

gap = isolation_gap()
code = "import os, signal; os.fork(); print('up', flush=True); signal.pause()"
engine = EngineProcess.launch([sys.executable, "-c", code], env={}, workdir=Path(sys.argv[1]))
wait_for("both", lambda: engine.log_tail().count("up") == 2, Deadline.after(20), detail=engine.log_tail)
members = engine.tree()
inside = engine.run_inside(["id", "-u"], timeout=20)
ending = engine.terminate(Deadline.after(0.4))
print("CAP_SYS_ADMIN" in gap, sorted(engine.isolation), len(members), int(inside.stdout) == os.getuid(),
      ending.exit_status, len(ending.killed), any(member.alive for member in members))
"""


NO_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.mark.parametrize("drop", [NO_CAPABILITIES, NOBODY], ids=["no-capabilities", "nobody"])
def test_without_rights_an_engine_is_owned_all_the_same(drop: list[str]) -> None:
    if os.getuid() != 0:
        drop = []
    # The suite's interpreter may lie in a folder that is closed to other users, as pytest's own are.
    python = sys.executable if drop is not NOBODY else "/usr/bin/python3"
    workdir = Path("/tmp") / f"nvsnap-test-{uuid.uuid4().hex[:8]}"
    subprocess.run([*drop, "mkdir", str(workdir)], check=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(workdir),
        "PYTHONPATH": str(Path(psutil.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            [*drop, python, "-c", UNPRIVILEGED, str(workdir)],
            cwd=ROOT,
            env=environment,
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
    finally:
        subprocess.run(["rm", "-rf", str(workdir)], check=True)
    assert done.stdout.split() == ["True", "[]", "2", "True", "-15", "1", "False"], done.stderr
