"""CRIU over small real programs: dump, restore again and again, and everything that can stand in the way."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nvsnap_conformance.checkpoint import criu
from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure, Kind
from nvsnap_conformance.checkpoint.criu_manifest import FILES, IMAGES, MANIFEST, Manifest
from nvsnap_conformance.checkpoint.criu_preflight import check_before_dump, outside_connections
from nvsnap_conformance.checkpoint.freeze import check_all_stopped, read_states
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import linux
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.engines.supervision import LAUNCH_ID
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.lifecycle.residue import RUN_ID, run_id
from tests.criu_programs import COUNTER, HESITANT, PORT, Launch, ask, inside, launch, needs_criu, soon

__all__ = ["launch"]

pytestmark = needs_criu


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_one_image_is_restored_again_and_again(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    before, root = inside(process), process.root
    secret, count, _ = ask(process)
    dumped = CriuCheckpointer().dump(process, folder, soon())

    assert not process.tree()
    assert process.poll() == -signal.SIGKILL
    assert check_all_stopped(dumped.states) == []
    assert {state.process for state in dumped.states} >= {root}
    assert len(dumped.states) == 2
    seen = [root]
    for number in range(1, 4):
        loaded = CriuCheckpointer().load(process, folder, soon())
        assert process.poll() is None
        assert inside(process) == before == loaded.details["processes"]
        assert process.root not in seen
        seen.append(process.root)
        again, counted, _ = ask(process, b"say")
        assert again == secret
        assert int(counted) > int(count)
        assert (process.home.tmp_outside / "note").read_text() == secret
        assert process.inside_mounts(Path("/dev/shm/kept")).read_text() == secret
        with (process.home.tmp_outside / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        wait_for("its line", lambda: "said" in process.log_tail(), soon())
        # The log is as at the dump and one line; what came after the last dump is kept beside it.
        assert process.log_tail() == "up\nsaid"
        kept = sorted(path.name for path in process.workdir.glob("engine.log.*"))
        assert kept == [f"engine.log.{n}" for n in range(1, number)]
    process.root.send(signal.SIGTERM)
    wait_for("its end", lambda: process.poll() is not None, soon())
    assert process.exit_status == -signal.SIGTERM


def test_details_say_what_is_in_the_image(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    details = CriuCheckpointer().dump(process, folder, soon()).details
    manifest = Manifest.read(folder)
    assert details["criu"] == manifest.criu
    assert set(details["criu"]) == {"program", "version", "build_id"}
    assert len(details["criu"]["build_id"]) == 40
    assert details["memory_bytes"] >= 0.9 * details["anonymous_bytes"] > 1 << 20
    assert details["log_bytes"] == len("up\n")
    assert manifest.ports == [PORT]
    assert manifest.root_pid in manifest.processes
    assert sum(map(len, manifest.processes.values())) == 3  # two processes, one of them with two threads


def test_image_is_restored_into_new_namespaces_many_at_once(
    launch: Launch, folder: Path, tmp_path: Path
) -> None:
    process = launch(COUNTER)
    secret = ask(process)[0]
    CriuCheckpointer().dump(process, folder, soon())
    process.close()

    def restored(number: int) -> tuple[list[str], list[int], str]:
        workdir = tmp_path / f"copy-{number}"
        workdir.mkdir()
        with EngineProcess.vacant(workdir=workdir, root_pid=Manifest.read(folder).root_pid) as copy:
            with pytest.raises(EnvironmentFailure, match="nothing has been restored"):
                _ = copy.root
            assert copy.poll() is None
            CriuCheckpointer().load(copy, folder, soon())
            answer = ask(copy, b"say")
            wait_for("its line", lambda: "said" in copy.log_tail(), soon())
            return answer, inside(copy), copy.log_tail()

    with ThreadPoolExecutor(3) as executor:
        copies = list(executor.map(restored, range(3)))
    assert {answer[0] for answer, _, _ in copies} == {secret}
    assert len({tuple(pids) for _, pids, _ in copies}) == 1
    assert {log for _, _, log in copies} == {"up\nsaid"}


def test_restored_program_can_be_dumped_for_new_namespaces(
    launch: Launch, folder: Path, tmp_path: Path
) -> None:
    process = launch(COUNTER)
    secret = ask(process)[0]
    CriuCheckpointer().dump(process, folder, soon())
    pid = Manifest.read(folder).root_pid
    for generation in ("first", "second", "third"):
        workdir = tmp_path / generation
        workdir.mkdir()
        with EngineProcess.vacant(workdir=workdir, root_pid=pid) as copy:
            CriuCheckpointer().load(copy, folder, soon())
            assert ask(copy)[0] == secret
            folder = tmp_path / f"{generation}-image"
            CriuCheckpointer().dump(copy, folder, soon())
            assert min(Manifest.read(folder).ids) >= pid


def test_restored_processes_have_the_marks_of_this_run_and_launch(
    launch: Launch, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_ID, "a" * 32)
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    monkeypatch.setenv(RUN_ID, "b" * 32)
    with EngineProcess.vacant(workdir=tmp_path, root_pid=Manifest.read(folder).root_pid) as copy:
        CriuCheckpointer().load(copy, folder, soon())
        words = [Path(f"/proc/{m.pid}/environ").read_text().split("\0") for m in copy.tree()]
        assert len(words) == 2
        launches = set()
        for environment in words:
            marks = dict(word.split("=", 1) for word in environment if "=" in word)
            assert marks[RUN_ID] == run_id() == "b" * 32
            launches.add(marks[LAUNCH_ID])
            assert marks["PATH"] == "/usr/bin:/bin"
        assert launches == {copy._supervision._launch_id}


def test_clock_of_a_restored_program_is_known(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    assert process.clock_offset == 0.0
    CriuCheckpointer().dump(process, folder, soon())
    CriuCheckpointer().load(process, folder, soon())
    assert process.clock_offset < 0.0
    began = time.monotonic()
    told = float(ask(process)[2]) - process.clock_offset
    assert began <= told <= time.monotonic()


def test_restored_program_has_the_priority_of_this_run(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    for member in process.tree():
        for thread in Path(f"/proc/{member.pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
    CriuCheckpointer().dump(process, folder, soon())
    CriuCheckpointer().load(process, folder, soon())
    threads = [int(t.name) for m in process.tree() for t in Path(f"/proc/{m.pid}/task").iterdir()]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads] == [own] * 3


# What stands in the way of a dump ----------------------------------------------------------------


def runs_on(process: EngineProcess, failure: CriuFailure, secret: str) -> None:
    assert failure.engine_runs is True
    assert "the engine runs on" in str(failure)
    assert ask(process)[0] == secret


def test_connection_to_somebody_else_is_named(launch: Launch, folder: Path) -> None:
    process = launch(
        "import socket, sys\n"
        "print('up', flush=True)\n"
        f"listener = socket.create_server(('127.0.0.1', {PORT}))\n"
        "out = socket.create_connection(('127.0.0.1', int(listener.accept()[0].recv(9))))\n"
        "print('connected', flush=True)\n"
        "out.recv(1)\n"
        "out.close()\n"
        "print('closed', flush=True)\n"
        "listener.accept()\n"
    )
    pool = process.network_executor(1)
    with pool.submit(socket.create_server, ("127.0.0.1", 0)).result(60) as listener:
        port = listener.getsockname()[1]

        def tell() -> None:
            with socket.create_connection(("127.0.0.1", PORT)) as connection:
                connection.sendall(str(port).encode())

        wait_for("its port", lambda: f":{PORT}" in str(process.audit().ports), soon())
        pool.submit(tell).result(60)
        accepted, _ = listener.accept()
        wait_for("its connection", lambda: "connected" in process.log_tail(), soon())
        with pytest.raises(CriuFailure, match=f"127.0.0.1:{port}") as caught:
            CriuCheckpointer().dump(process, folder, soon())
        assert caught.value.kind is Kind.EXTERNAL_TCP
        assert process.root.alive
        accepted.sendall(b"x")
        wait_for("its close", lambda: "closed" in process.log_tail(), soon())
        accepted.close()
    wait_for("no connection", lambda: not outside_connections(process), soon())
    CriuCheckpointer().dump(process, folder, soon())


def test_requests_span_dump_and_restore(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    pool = process.network_executor(1)
    client = pool.submit(socket.create_connection, ("127.0.0.1", PORT)).result(60)
    with client:
        wait_for("the connection to be accepted", lambda: bool(outside_connections(process)), soon())
        with pytest.raises(CriuFailure) as caught:
            CriuCheckpointer(clients=False).dump(process, folder, soon())
        assert caught.value.kind is Kind.CLIENTS
        port = client.getsockname()[1]
        assert f"127.0.0.1:{port}" in str(caught.value)

        details = CriuCheckpointer().dump(process, folder, soon()).details
        assert details["clients"] == [f"127.0.0.1:{port}"]
        CriuCheckpointer().load(process, folder, soon())
        client.settimeout(60)
        client.sendall(b"get")
        secret = client.makefile().read().split()[0]
    assert ask(process)[0] == secret


def test_connection_that_is_not_accepted_is_named(launch: Launch, folder: Path) -> None:
    process = launch(HESITANT)
    pool = process.network_executor(1)
    client = pool.submit(socket.create_connection, ("127.0.0.1", PORT)).result(60)
    with client:
        with pytest.raises(CriuFailure) as caught:
            CriuCheckpointer().dump(process, folder, soon())
        assert caught.value.kind is Kind.IN_FLIGHT
        assert caught.value.engine_runs is True
        assert not (folder / MANIFEST).exists()
        (process.home_outside / "gate").write_text("go")
        client.settimeout(60)
        assert client.recv(16) == b"at last"
    wait_for("no connection", lambda: not outside_connections(process), soon())
    CriuCheckpointer().dump(process, folder, soon())


RING = """
import ctypes, errno, signal
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 8, ctypes.create_string_buffer(120))
print("up", errno.errorcode.get(ctypes.get_errno()) if ring < 0 else ring, flush=True)
signal.pause()
"""


def test_isolated_program_gets_no_io_uring_ring(launch: Launch, folder: Path) -> None:
    process = launch(RING)
    assert process.log_tail() in {"up ENOSYS", "up EPERM"}
    assert process.io_uring in {"refused by a seccomp filter", "not offered by the kernel"}
    CriuCheckpointer().dump(process, folder, soon())
    CriuCheckpointer().load(process, folder, soon())  # with its seccomp filter


@pytest.mark.skipif(not linux.io_uring_offered(), reason="this kernel or container offers no io_uring")
def test_io_uring_ring_is_named(launch: Launch) -> None:
    process = launch(RING, isolate=False)
    assert process.io_uring == "allowed"
    with pytest.raises(CriuFailure, match="io_uring") as caught:
        check_before_dump(process, clients=True)
    assert caught.value.kind is Kind.IO_URING
    assert str(process.root.pid) in str(caught.value)


@pytest.mark.parametrize("fault", ["no-space", "deadline"])
def test_files_that_cannot_be_saved_undo_the_dump(
    launch: Launch, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    process = launch(COUNTER)
    secret, count, _ = ask(process)

    def fail(*_: object) -> None:
        assert check_all_stopped(read_states(process.tree())) == []
        if fault == "deadline":
            raise DeadlineExceeded("too late")
        raise CriuFailure(Kind.NO_SPACE, "full")

    monkeypatch.setattr(criu, "save_files", fail)
    with pytest.raises((CriuFailure, DeadlineExceeded)) as caught:
        CriuCheckpointer().dump(process, folder, soon())
    monkeypatch.undo()
    if isinstance(caught.value, CriuFailure):
        runs_on(process, caught.value, secret)
    assert int(ask(process)[1]) > int(count)
    assert not (folder / MANIFEST).exists()
    CriuCheckpointer().dump(process, folder, soon())
    CriuCheckpointer().load(process, folder, soon())
    assert ask(process)[0] == secret


def test_deadline_of_a_dump_holds(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    with pytest.raises(DeadlineExceeded):
        CriuCheckpointer().dump(process, folder, Deadline.after(0.0))
    assert not (folder / MANIFEST).exists()


def test_program_without_namespaces_is_refused(launch: Launch, folder: Path) -> None:
    process = launch("print('up', flush=True); input()", isolate=False)
    with pytest.raises(EnvironmentFailure, match="namespaces of its own"):
        CriuCheckpointer().dump(process, folder, soon())


def test_image_that_would_be_hidden_is_refused(launch: Launch) -> None:
    process = launch(COUNTER)
    with pytest.raises(UsageError, match="/dev/shm"):
        CriuCheckpointer().dump(process, Path("/dev/shm/nvsnap-image"), soon())
    assert not Path("/dev/shm/nvsnap-image").exists()
    assert process.root.alive


# What stands in the way of a restore -------------------------------------------------------------


def test_running_program_is_replaced_by_a_restore(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    for _ in range(5):  # each meets the pids and ports of the one before, which has just been killed
        CriuCheckpointer().load(process, folder, soon())
    assert len(process.tree()) == 2


def test_second_dump_replaces_the_first(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    first = (folder / MANIFEST).read_text()
    CriuCheckpointer().load(process, folder, soon())
    ask(process, b"say")
    CriuCheckpointer().dump(process, folder, soon())
    assert json.loads((folder / MANIFEST).read_text())["log_bytes"] > json.loads(first)["log_bytes"]
    CriuCheckpointer().load(process, folder, soon())
    assert process.log_tail() == "up\nsaid"


def test_image_of_another_criu_is_refused(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    raw = json.loads((folder / MANIFEST).read_text())
    raw["criu"]["version"] = "4.2.99"
    (folder / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(CriuFailure, match=r"4\.2\.99") as caught:
        CriuCheckpointer().load(process, folder, soon())
    assert caught.value.kind is Kind.OTHER_CRIU


def test_missing_shared_memory_is_named_and_nothing_runs(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    shm = folder / FILES / "shm/kept"
    content = shm.read_text()
    shm.unlink()
    with pytest.raises(CriuFailure, match="dev/shm/kept") as caught:
        CriuCheckpointer().load(process, folder, soon())
    assert caught.value.kind is Kind.FILE_MISSING
    assert not process.tree()
    shm.write_text(content)
    CriuCheckpointer().load(process, folder, soon())
    assert ask(process)[0] == content


LOW_LIMITS = """
import resource, sys
from pathlib import Path
from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_manifest import Manifest
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.process import EngineProcess
workdir, folder = map(Path, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with EngineProcess.vacant(workdir=workdir, root_pid=Manifest.read(folder).root_pid) as copy:
    try:
        CriuCheckpointer().load(copy, folder, Deadline.after(60))
    except CriuFailure as failure:
        print(failure.kind)
    else:
        print("restored")
"""


def test_limit_that_cannot_be_set_again_is_named(launch: Launch, folder: Path, tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("the limit is at its lowest already")
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    (tmp_path / "copy").mkdir()
    words = [sys.executable, "-c", LOW_LIMITS, str(tmp_path / "copy"), str(folder)]
    told = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff"))
    may_raise = int(effective.split()[1], 16) >> 24 & 1  # CAP_SYS_RESOURCE
    assert told.stdout.strip() == ("restored" if may_raise else "rlimit")


def test_damage_that_sizes_do_not_show_fails_the_restore(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    (pagemap,) = (folder / IMAGES).glob(f"pagemap-{Manifest.read(folder).root_pid}.img")
    pagemap.write_bytes(os.urandom(pagemap.stat().st_size))
    with pytest.raises(CriuFailure) as caught:
        CriuCheckpointer().load(process, folder, soon())
    assert caught.value.kind is Kind.IMAGE_DAMAGED
    assert not process.tree()


def test_closed_engine_cannot_be_loaded(launch: Launch, folder: Path) -> None:
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    process.close()
    with pytest.raises(EnvironmentFailure, match="closed"):
        CriuCheckpointer().load(process, folder, soon())


def test_kill_of_the_suite_takes_a_restored_program_along(
    launch: Launch, folder: Path, tmp_path: Path
) -> None:
    process = launch(COUNTER)
    CriuCheckpointer().dump(process, folder, soon())
    process.close()
    code = """
import signal, sys
from pathlib import Path
from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_manifest import Manifest
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.process import EngineProcess
workdir, folder = map(Path, sys.argv[1:])
copy = EngineProcess.vacant(workdir=workdir, root_pid=Manifest.read(folder).root_pid)
CriuCheckpointer().load(copy, folder, Deadline.after(60))
print(*(member.pid for member in copy.tree()), flush=True)
signal.pause()
"""
    (tmp_path / "copy").mkdir()
    suite = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "copy"), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    try:
        assert suite.stdout is not None
        pids = [int(word) for word in suite.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        suite.kill()
        suite.wait()
    wait_for("the end of all", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), soon())
