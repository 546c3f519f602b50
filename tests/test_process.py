"""EngineProcess over real programs: launch, look, enter, end; isolated and not."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import home, process
from nvsnap_conformance.engines.channel import Channel
from nvsnap_conformance.engines.namespaces import isolation_gap
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.engines.supervision import LAUNCH_ID
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.lifecycle.residue import RUN_ID, HostSnapshot, marked_processes
from nvsnap_conformance.processes import ProcessId

needs_isolation = pytest.mark.skipif(
    isolation_gap() is not None, reason=f"no right to make namespaces: {isolation_gap()}"
)
ISOLATED = pytest.param(True, id="isolated", marks=needs_isolation)
PLAIN = pytest.param(False, id="plain")

ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}

# Ends with status 0 at SIGTERM; says when it is up.
TIDY = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
while True: signal.pause()
"""

DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True: signal.pause()
"""

# Forks twice and leaves the session, as a daemon does; the root ends at SIGTERM and the daemon does not.
DAEMON = """
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", os.getpid(), flush=True)
        while True: signal.pause()
    os._exit(0)
os.wait()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True: signal.pause()
"""

Launch = Callable[..., EngineProcess]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Launch Python code, or an argv, and close it afterwards."""
    with ExitStack() as stack:
        count = iter(range(100))

        def start(code: str | list[str], *, isolate: bool = True, up: bool = True) -> EngineProcess:
            workdir = tmp_path / f"launch-{next(count)}"
            workdir.mkdir()
            argv = [sys.executable, "-c", code] if isinstance(code, str) else code
            engine = stack.enter_context(
                EngineProcess.launch(argv, env=ENV, workdir=workdir, isolate=isolate)
            )
            if up:
                wait_for(
                    "the program",
                    lambda: "up" in engine.log_tail(),
                    Deadline.after(20),
                    detail=engine.log_tail,
                )
            return engine

        yield start


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_environment_is_what_was_given_and_the_log_is_private(launch: Launch, isolate: bool) -> None:
    engine = launch("import os; print(sorted(os.environ), os.getcwd(), 'up')", isolate=isolate)
    wait_for("its end", lambda: engine.poll() is not None, soon())

    assert engine.log_tail() == f"{sorted([*ENV, 'TMPDIR', RUN_ID, LAUNCH_ID])} {engine.home_inside} up"
    assert stat.S_IMODE(engine.log_path.stat().st_mode) == 0o600
    assert engine.log_path == engine.workdir / "engine.log"


@needs_isolation
def test_isolated_engine_sees_only_itself(launch: Launch) -> None:
    engine = launch(
        "import os, socket; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()), os.getppid(),"
        "os.getsid(0), os.listdir('/dev/shm'), sorted(os.listdir('/proc/self/fd')), "
        "sorted(name for _, name in socket.if_nameindex()), 'up')"
    )
    assert engine.isolation == {"pid", "mount", "network", "ipc"}
    # Descriptor 3 is the listing's own.
    assert engine.log_tail() == "[1, 9000] 1 9000 [] ['0', '1', '2', '3'] ['lo'] up"


def test_plain_engine_claims_nothing_and_has_no_descriptors_of_ours(launch: Launch) -> None:
    engine = launch("import os; print(sorted(os.listdir('/proc/self/fd')), 'up')", isolate=False)
    assert engine.isolation == frozenset()
    assert engine.log_tail() == "['0', '1', '2', '3'] up"


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_sockets_fit_into_tmpdir_however_long_the_workdir_is(tmp_path: Path, isolate: bool) -> None:
    workdir = tmp_path / ("w" * 120)
    workdir.mkdir()
    code = (
        "import socket, tempfile, os; s = socket.socket(socket.AF_UNIX); "
        f"s.bind(os.path.join(tempfile.gettempdir(), 'n' * {107 - home.TMPDIR_LIMIT - 1})); print('up')"
    )
    engine = EngineProcess.launch([sys.executable, "-c", code], env=ENV, workdir=workdir, isolate=isolate)
    with engine:
        wait_for("its end", lambda: engine.poll() is not None, soon())
        assert engine.log_tail() == "up"
        assert engine.audit().tmp_files == ("n" * (107 - home.TMPDIR_LIMIT - 1),)
        extra = engine.home.extra_tmp
        assert (extra is None) == isolate
    assert extra is None or not extra.exists()


@needs_isolation
def test_paths_inside_are_the_same_for_every_engine(launch: Launch) -> None:
    code = (
        "import os, tempfile; open(tempfile.mkstemp()[1], 'w').write('x'); print('up', os.environ['TMPDIR'])"
    )
    engines = [launch(code) for _ in range(2)]
    assert engines[0].log_tail() == engines[1].log_tail() == f"up {home.mount_point() / 'tmp'}"
    for engine in engines:
        (file,) = (engine.home_outside / "tmp").iterdir()
        assert engine.outside(engine.inside(file)) == file
        assert engine.inside(file).parent == home.mount_point() / "tmp"
        assert engine.inside(Path("/etc")) == Path("/etc")
    assert list(home.mount_point().iterdir()) == []


SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(NAME)
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 8000), Handler)
print("up", flush=True)
server.serve_forever()
"""


def fetch(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return sock.makefile("rb").read().rsplit(b"\r\n\r\n", 1)[1]


@needs_isolation
def test_engines_listen_on_one_port_in_parallel_and_clients_reach_their_own(launch: Launch) -> None:
    engines = [launch(f"NAME = b'engine {i}'\n{SERVE}") for i in range(3)]
    pools = [engine.network_executor(2) for engine in engines]
    futures = [pool.submit(fetch, 8000) for pool in pools for _ in range(4)]
    assert [future.result() for future in futures] == [b"engine %d" % (i // 4) for i in range(12)]
    assert all("127.0.0.1:8000" in engine.audit().ports for engine in engines)

    engines[0].terminate(soon())
    with pytest.raises(RuntimeError):
        pools[0].submit(fetch, 8000)
    assert pools[1].submit(fetch, 8000).result() == b"engine 1"


@needs_isolation
def test_client_of_a_dead_engine_is_refused(launch: Launch) -> None:
    engine = launch(f"NAME = b''\n{SERVE}")
    pool = engine.network_executor(1)
    engine.root.send(signal.SIGKILL)
    wait_for("its end", lambda: engine.poll() is not None, soon())
    with pytest.raises(ConnectionRefusedError):
        pool.submit(fetch, 8000).result()


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_free_port_is_free_where_the_engine_runs(launch: Launch, isolate: bool) -> None:
    engine = launch(TIDY, isolate=isolate)
    port = engine.free_port()

    def bind() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))

    engine.network_executor(1).submit(bind).result()


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_daemon_is_in_the_tree_and_goes_with_it(launch: Launch, isolate: bool) -> None:
    engine = launch(DAEMON, isolate=isolate)
    root, daemon = engine.tree()
    assert root == engine.root
    inner = int(engine.log_tail().split()[1])
    assert engine.namespace_pid(daemon) == inner
    assert engine.host_pid(inner) == daemon.pid
    assert engine.host_pid(1) is None

    ending = engine.terminate(Deadline.after(0.5))
    assert not ending.graceful
    assert ending.exit_status == 0
    assert ending.killed == (daemon,)
    assert [left.process for left in ending.residue.processes] == [daemon]
    assert not daemon.alive
    assert engine.tree() == []
    with pytest.raises(EnvironmentFailure, match="gone"):
        engine.namespace_pid(daemon)


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_tidy_program_ends_gracefully_and_leaves_nothing(launch: Launch, isolate: bool) -> None:
    engine = launch(TIDY, isolate=isolate)
    ending = engine.terminate(soon())
    assert (ending.graceful, ending.exit_status, ending.killed) == (True, 0, ())
    assert ending.residue.empty
    assert engine.terminate(soon()) is ending
    engine.close()


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_program_that_ignores_sigterm_is_killed_and_reported(launch: Launch, isolate: bool) -> None:
    engine = launch(DEAF, isolate=isolate)
    ending = engine.terminate(Deadline.after(0.5))
    assert (ending.graceful, ending.exit_status) == (False, -signal.SIGKILL)
    assert ending.killed == (engine.root,)


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_stopped_program_still_ends_gracefully(launch: Launch, isolate: bool) -> None:
    engine = launch(TIDY, isolate=isolate)
    for member in engine.tree():
        member.send(signal.SIGSTOP)
    assert engine.terminate(soon()).graceful


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
@pytest.mark.parametrize(("code", "status"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 0", 0)])
def test_exit_status(launch: Launch, isolate: bool, code: str, status: int) -> None:
    engine = launch(
        ["sh", "-c", f"echo up; while [ ! -e gate ]; do sleep 0.01; done; {code}"], isolate=isolate
    )
    assert engine.poll() is None
    (engine.home_outside / "gate").touch()
    wait_for("its end", lambda: engine.poll() is not None, soon())
    assert engine.exit_status == status
    assert engine.terminate(soon()).graceful


@needs_isolation
def test_audit_finds_everything_an_engine_leaves(launch: Launch) -> None:
    before = HostSnapshot.take()
    engine = launch(
        """
import ctypes, os, signal, socket, subprocess, tempfile
from multiprocessing import shared_memory, resource_tracker
libc = ctypes.CDLL(None, use_errno=True)
open("/dev/shm/leaked", "w").write("x")
open("/dev/shm/sem.leaked", "w").write("x")
os.makedirs(os.path.join(tempfile.gettempdir(), "empty"))
open(os.path.join(tempfile.gettempdir(), "file"), "w")
assert libc.shmget(0, 4096, 0o1600) >= 0
assert libc.semget(0, 1, 0o1600) >= 0
os.mkdir(os.path.join(tempfile.gettempdir(), "mounted"))
assert libc.mount(b"tmpfs", os.path.join(tempfile.gettempdir(), "mounted").encode(), b"tmpfs", 0, None) == 0
sockets = [socket.create_server(("127.0.0.1", 8000))]
sockets.append(socket.create_server(("::1", 8001), family=socket.AF_INET6))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True: signal.pause()
"""
    )
    found = engine.terminate(Deadline.after(0.3)).residue
    assert found.shm == ("leaked", "sysv-shm:0")
    assert found.semaphores == ("sem.leaked", "sysv-sem:0")
    assert found.ports == ("127.0.0.1:8000", "[::1]:8001")
    assert found.mounts == (f"{home.mount_point()}/tmp/mounted tmpfs",)
    assert found.tmp_files == ("empty/", "file", "mounted/")
    assert [left.process for left in found.processes] == [engine.root]
    assert before.diff(HostSnapshot.take()).empty


def test_plain_audit_finds_ports_and_files(launch: Launch) -> None:
    engine = launch(
        "import signal, socket, tempfile; s = socket.create_server(('127.0.0.1', 0)); tempfile.mkstemp(); "
        "print('up', s.getsockname()[1], flush=True); signal.pause()",
        isolate=False,
    )
    found = engine.audit()
    assert f"127.0.0.1:{engine.log_tail().split()[1]}" in found.ports
    assert len(found.tmp_files) == 1


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_program_that_cannot_be_executed_is_a_typed_error(
    tmp_path: Path, isolate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_ID, f"{tmp_path}")
    with pytest.raises(EnvironmentFailure, match="cannot execute no-such-program") as caught:
        EngineProcess.launch(["no-such-program"], env=ENV, workdir=tmp_path, isolate=isolate)
    assert "No such file" in caught.value.cause
    assert marked_processes(RUN_ID, f"{tmp_path}") == []


@pytest.mark.parametrize(
    ("env", "cwd", "cause"), [({"A": "\0"}, None, "null byte"), ({}, Path("/nowhere"), "/nowhere")]
)
def test_bad_environment_and_folder_are_typed_errors(
    tmp_path: Path, env: dict[str, str], cwd: Path | None, cause: str
) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        EngineProcess.launch([sys.executable, "-c", ""], env=env, workdir=tmp_path, cwd=cwd)
    assert cause in caught.value.cause


def test_bad_arguments_are_usage_errors(tmp_path: Path, launch: Launch) -> None:
    with pytest.raises(UsageError, match="not a command"):
        EngineProcess.launch([], env=ENV, workdir=tmp_path)
    with pytest.raises(UsageError, match="not a folder"):
        EngineProcess.launch(["true"], env=ENV, workdir=tmp_path / "missing")
    engine = launch(TIDY)
    with pytest.raises(UsageError, match="one launch only"):
        EngineProcess.launch(["true"], env=ENV, workdir=engine.workdir)


@needs_isolation
def test_refused_setup_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "mount_point", lambda: tmp_path / "missing")
    monkeypatch.setenv(RUN_ID, f"{tmp_path}")
    with pytest.raises(EnvironmentFailure, match="step 'mounts' was refused") as caught:
        EngineProcess.launch(["true"], env=ENV, workdir=tmp_path)
    assert "isolate=False" in caught.value.next_step
    assert marked_processes(RUN_ID, f"{tmp_path}") == []


def test_long_cache_path_gives_way_to_a_short_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("c" * 60)))
    place = home.mount_point()
    assert len(os.fsencode(place / "tmp")) <= home.TMPDIR_LIMIT
    assert stat.S_IMODE(place.parent.stat().st_mode) & 0o022 == 0


@needs_isolation
def test_run_inside_enters_the_namespaces(launch: Launch) -> None:
    engine = launch(TIDY)
    result = engine.run_inside(
        ["sh", "-c", "echo /proc/[0-9]*; cat; ls /dev/shm; echo bad >&2; exit 4"], timeout=20, input="hello\n"
    )
    out = result.stdout.splitlines()
    assert (result.returncode, result.stderr, out[1]) == (4, "bad\n", "hello")
    assert {"/proc/1", "/proc/9000"} <= set(out[0].split())
    assert len(out[0].split()) <= 5
    # Only the mounts: pids stay the host's, for which that /proc has no name.
    outer = engine.run_inside(["readlink", "/proc/self"], namespaces={"mount"}, timeout=20)
    assert outer.returncode == 1
    with pytest.raises(UsageError, match="user"):
        engine.run_inside(["true"], namespaces={"user"}, timeout=20)


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_run_inside_reports_what_happened(launch: Launch, isolate: bool) -> None:
    engine = launch(TIDY, isolate=isolate)
    assert engine.run_inside(["sh", "-c", "kill -15 $$"], timeout=20).returncode == -signal.SIGTERM
    with pytest.raises(EnvironmentFailure, match="no-such-program"):
        engine.run_inside(["no-such-program"], timeout=20)
    with pytest.raises(UsageError):
        engine.run_inside([], timeout=20)
    engine.close()
    with pytest.raises(EnvironmentFailure, match="closed"):
        engine.run_inside(["true"], timeout=20)


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_run_inside_leaves_nothing(
    launch: Launch, isolate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = launch(TIDY, isolate=isolate)
    started = tmp_path / "started"
    receive = Channel.receive

    def receive_nothing_until_started(self: Channel, timeout: float | None) -> dict[str, Any] | None:
        if timeout != 123:  # the timeout of the run below
            return receive(self, timeout)
        wait_for("the program inside", started.exists, soon())
        return None

    monkeypatch.setattr(Channel, "receive", receive_nothing_until_started)
    program = f"echo stuck >&2; sleep 1000 & setsid sh -c 'touch {started}; sleep 1000'"
    with pytest.raises(DeadlineExceeded, match="killed after 123") as caught:
        engine.run_inside(["sh", "-c", program], timeout=123)
    assert "stuck" in caught.value.cause
    assert engine.tree() == [engine.root]
    assert engine.run_inside(["sh", "-c", "setsid sleep 1000 &"], timeout=20).returncode == 0
    assert engine.tree() == [engine.root]


def test_run_inside_has_a_timeout(launch: Launch) -> None:
    engine = launch(TIDY)
    with pytest.raises(DeadlineExceeded, match=r"killed after 0\.1 s"):
        engine.run_inside(["sleep", "1000"], timeout=0.1)


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_sampler_reads_the_engine_from_inside(launch: Launch, isolate: bool) -> None:
    engine = launch(TIDY, isolate=isolate)
    sampler = Path(sys.executable).with_name("py-spy")
    pid = engine.namespace_pid(engine.root)
    result = engine.run_inside([str(sampler), "dump", "--pid", str(pid), "--nonblocking"], timeout=20)
    assert "<module>" in result.stdout, result.stderr


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_forked_copy_of_the_suite_owns_nothing(launch: Launch, isolate: bool) -> None:
    engine = launch(TIDY, isolate=isolate)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        # This copy holds every descriptor of the launch until the parent has closed the engine.
        try:
            ours.close()
            engine.close()
            theirs.send(b"closed")
            theirs.recv(1)
        finally:
            os._exit(0)
    theirs.close()
    try:
        assert ours.recv(10) == b"closed"
        ending = engine.terminate(soon())
        assert (ending.graceful, ending.exit_status) == (True, 0)
        supervisor = engine._supervision._supervisor
        assert supervisor is not None
        assert supervisor.returncode == 0
    finally:
        ours.close()
        os.waitpid(child, 0)


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_close_from_many_threads(launch: Launch, isolate: bool) -> None:
    engine = launch(DAEMON, isolate=isolate)
    members = engine.tree()
    threads = [threading.Thread(target=engine.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(member.alive for member in members)
    assert engine not in process._live


@pytest.mark.parametrize("isolate", [ISOLATED, PLAIN])
def test_killed_supervisor_takes_the_engine_along(launch: Launch, isolate: bool) -> None:
    engine = launch(DAEMON, isolate=isolate)
    members = engine.tree()
    supervisor = engine._supervision._supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    assert wait_for("the root's end", lambda: engine.poll() is not None, soon())
    assert engine.exit_status == -signal.SIGKILL
    engine.close()
    assert not any(member.alive for member in members)


@needs_isolation
def test_killed_init_takes_the_engine_along(launch: Launch) -> None:
    engine = launch(DAEMON)
    members = engine.tree()
    engine._supervision.top.send(signal.SIGKILL)
    wait_for("the end of all", lambda: not any(member.alive for member in members), soon())
    assert engine.terminate(soon()).residue.empty
    assert engine.exit_status == -signal.SIGKILL


def test_log_tail_is_the_end(launch: Launch) -> None:
    engine = launch("print('x' * 400000); print('last'); print('up')")
    assert engine.log_tail(2) == "last\nup"


def test_engines_are_closed_at_interpreter_exit(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from nvsnap_conformance.engines.process import EngineProcess\n"
        f"engine = EngineProcess.launch(['sleep', '1000'], env={ENV!r}, workdir=Path({str(tmp_path)!r}))\n"
        "print(engine.root.pid, engine.root.create_time)"
    )
    root = Path(process.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, text=True, capture_output=True, timeout=60, check=True
    )
    pid, create_time = done.stdout.split()
    assert not ProcessId(int(pid), float(create_time)).alive
