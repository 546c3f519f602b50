"""The audit of host and run: what is the run's is found, what is another's is left alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvsnap_conformance.engines import home
from nvsnap_conformance.lifecycle.residue import (
    RUN_ID,
    HostSnapshot,
    ResidualProcess,
    Residue,
    added,
    check_residue,
    family,
    files_below,
    listening,
    marked_processes,
    mount_points,
    run_id,
    run_processes,
    temporary_prefix,
)
from nvsnap_conformance.processes import ProcessId

SHM = Path("/dev/shm")

Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> str:
    """A run id of this test alone."""
    monkeypatch.setenv(RUN_ID, uuid.uuid4().hex)
    return run_id()


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Run Python code in a process of some run, which prints a line and stays."""
    with ExitStack() as stack:

        def start(code: str, run: str) -> subprocess.Popen[str]:
            child = subprocess.Popen(
                [sys.executable, "-c", f"{code}\nprint('up', flush=True); import sys; sys.stdin.read()"],
                env={RUN_ID: run},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(child.wait, 20)
            assert child.stdin is not None
            stack.callback(child.stdin.close)
            assert child.stdout is not None
            stack.callback(child.stdout.close)
            assert child.stdout.readline() == "up\n"
            return child

        yield start


def signatures(residue: Residue) -> list[str]:
    """The kinds of what was found; names have a family each, which is the signature's place."""
    kinds = [f"{found.signature.kind}:{found.signature.code}" for found in check_residue(residue)]
    return list(dict.fromkeys(kinds))


def test_run_id_is_made_once_and_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_ID, raising=False)
    assert run_id() == run_id() == os.environ[RUN_ID]


def test_processes_of_the_run_are_known_by_their_mark(run: str, hold: Hold) -> None:
    before = HostSnapshot.take()
    ours, others = hold("", run), hold("", "another-run")
    assert [process.pid for process in run_processes(run)] == [ours.pid]
    left = before.diff(HostSnapshot.take())
    assert [(p.process.pid, bool(p.name)) for p in left.processes] == [(ours.pid, True)]
    assert others.pid not in [process.pid for process in marked_processes(RUN_ID, run)]
    assert signatures(left) == ["RESIDUE:PROCESS"]
    assert before.diff(before).empty


SPAWN = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import atexit, os, subprocess
from nvsnap_conformance.engines import linux
ENTER
child = subprocess.Popen(["sleep", "1000"], env={{}})
atexit.register(child.kill)
"""


def test_descendants_are_the_runs_whatever_their_environment(run: str, hold: Hold) -> None:
    parent = hold(SPAWN.replace("ENTER", ""), run)
    assert len(run_processes(run)) == 2
    assert parent.pid in [process.pid for process in run_processes(run)]


@pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")
def test_everybody_in_the_runs_pid_namespaces_is_the_runs(run: str, hold: Hold) -> None:
    before = HostSnapshot.take()
    holder = hold(SPAWN.replace("ENTER", "linux.unshare(linux.CLONE_NEWPID)"), run)
    (init,) = [process.pid for process in run_processes(run) if process.pid != holder.pid]
    enter = f"linux.setns(os.pidfd_open({init}), linux.CLONE_NEWPID)"
    stranger = hold(SPAWN.replace("ENTER", enter), "another-run")
    found = {process.pid for process in run_processes(run)}
    assert len(found) == 3
    assert {holder.pid, init} < found
    assert stranger.pid not in found
    left = before.diff(HostSnapshot.take())
    assert [name[:5] for name in left.namespaces] == ["pid:["]
    assert signatures(left) == ["RESIDUE:PROCESS", "RESIDUE:NAMESPACE"]


def test_shared_memory_is_the_runs_unless_somebody_else_uses_it(run: str, hold: Hold) -> None:
    name = f"nvsnap-test-{run}"
    before = HostSnapshot.take()
    with ExitStack() as stack:
        for suffix in ("open", "mapped"):
            stack.callback((SHM / f"{name}-{suffix}").unlink, missing_ok=True)
            (SHM / f"{name}-{suffix}").write_bytes(b"x" * 4096)
        stack.callback((SHM / f"sem.{name}").unlink, missing_ok=True)
        (SHM / f"sem.{name}").touch()
        after = HostSnapshot.take()
        left = before.diff(after)
        assert {f"{name}-open", f"{name}-mapped"} <= set(left.shm)
        assert left.semaphores == (f"sem.{name}",)
        assert signatures(left) == ["RESIDUE:SHM", "RESIDUE:SEMAPHORE"]

        hold(f"file = open('/dev/shm/{name}-open')", "another-run")
        hold(
            f"import mmap, os; fd = os.open('/dev/shm/{name}-mapped', os.O_RDWR); "
            "area = mmap.mmap(fd, 4096); os.close(fd)",
            "another-run",
        )
        used = HostSnapshot.take()
        assert not {f"{name}-open", f"{name}-mapped"} & set(before.diff(used).shm)
        # What was seen to be another's stays another's, also once it is abandoned.
        assert not {f"{name}-open", f"{name}-mapped"} & set(used.diff(after).shm)


def test_ports_are_the_runs_unless_somebody_else_listens(run: str, hold: Hold) -> None:
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', {0})); "
        "t = socket.create_server(('::1', {0}), family=socket.AF_INET6)"
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = HostSnapshot.take()
    ours = hold(code.format(port), run)
    left = before.diff(HostSnapshot.take())
    assert left.ports == (f"127.0.0.1:{port}", f"[::1]:{port}")
    assert signatures(left) == ["RESIDUE:PROCESS", "RESIDUE:PORT"]
    assert ours.stdin is not None
    ours.stdin.close()
    ours.wait(20)
    hold(code.format(port), "another-run")
    assert f"127.0.0.1:{port}" in listening(Path("/proc/self/net"))
    assert before.diff(HostSnapshot.take()).ports == ()


def test_temporary_folders_of_the_suite_are_found(run: str) -> None:
    before = HostSnapshot.take()
    folder = Path(f"{temporary_prefix(run)}left")
    folder.mkdir()
    try:
        left = before.diff(HostSnapshot.take())
        assert left.tmp_files == (str(folder),)
        assert signatures(left) == ["RESIDUE:TMP"]
    finally:
        folder.rmdir()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
def test_mounts_are_found_where_engines_have_theirs(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("engine", "engine/tmp/in", "engine-of-another")}
    for place in places.values():
        place.mkdir(parents=True)
    monkeypatch.setattr(home, "mount_point", lambda: tmp_path / "engine")
    before = HostSnapshot.take()
    mounted = []
    try:
        # Below first: a mount over the folder would hide what is in it.
        for name in ("engine/tmp/in", "engine", "engine-of-another"):
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(places[name])], check=True)
            mounted.append(places[name])
        left = before.diff(HostSnapshot.take())
        assert left.mounts == (f"{places['engine']} tmpfs", f"{places['engine/tmp/in']} tmpfs")
        assert signatures(left) == ["RESIDUE:MOUNT"]
    finally:
        for place in reversed(mounted):
            subprocess.run(["umount", str(place)], check=True)
    assert not [mount for mount in mount_points() if str(tmp_path) in mount]


def test_every_kind_of_residue_is_a_finding_and_nothing_is_none() -> None:
    everything = Residue(
        processes=(ResidualProcess(ProcessId(7, 1.0), "python"),),
        shm=tuple(f"vllm_dist_{i}" for i in range(12)),
        semaphores=("sem.x",),
        ports=("127.0.0.1:8000",),
        mounts=("/x tmpfs",),
        tmp_files=("y",),
        namespaces=("pid:[1]",),
    )
    assert signatures(everything) == [
        "RESIDUE:PROCESS",
        "RESIDUE:SHM",
        "RESIDUE:SEMAPHORE",
        "RESIDUE:PORT",
        "RESIDUE:MOUNT",
        "RESIDUE:TMP",
        "RESIDUE:NAMESPACE",
    ]
    found = check_residue(everything, of="the suite")
    assert found[0].message == "the suite: processes still there: 7 python"
    assert "and 2 more" in found[1].message
    assert len(found[1].evidence["left"]) == 12
    assert not everything.empty
    assert Residue().empty
    assert check_residue(Residue()) == []


def test_name_of_a_process_that_is_gone_is_empty() -> None:
    assert ResidualProcess.of(ProcessId(2**22 + 1, 1.0)).name == ""


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_added_counts_repeated_entries(before: list[str], more: list[str]) -> None:
    assert added(before, [*more, *before]) == tuple(sorted(more))
    assert added([*more, *before], before) == ()


def test_files_below_lists_files_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    assert files_below(tmp_path) == ("a/b/", "c/file", "link")
    assert files_below(tmp_path / "missing") == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm_dist_21669863ba731c1720f879c47ac79bd6-tp:0-[0-1]-cpushm_0", "vllm_dist_tp_cpushm"),
        ("11cdd912-cb61-472e-a8c0-e765fc8f1545", "unnamed"),
        ("torchinductor_root/", "torchinductor_root"),
        ("psm_4f7570a3", "psm"),
        ("tmpab1cdefg/", "tmp"),
    ],
)
def test_generated_names_have_a_family(name: str, words: str) -> None:
    assert family(name) == words


def test_a_known_leak_does_not_cover_another() -> None:
    left = Residue(
        shm=("vllm_dist_0123456789abcdef-cpushm_0", "vllm_dist_fedcba9876543210-cpushm_1", "other")
    )
    assert [str(found.signature) for found in check_residue(left)] == [
        "RESIDUE:SHM@vllm_dist_cpushm",
        "RESIDUE:SHM@other",
    ]


def test_a_process_that_has_ended_has_no_mounts() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and a zombie still
    assert mount_points(str(child.pid)) == ()
    child.wait()
    assert mount_points(str(child.pid)) == ()
