"""Sampling real processes in every state: always data, never an exception, and nothing changed after."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.hang import procfs, pyspy
from nvsnap_conformance.hang import sample as sampling
from nvsnap_conformance.hang.model import Member, Role, Rung, Sample
from nvsnap_conformance.processes import ProcessId
from tests.planted import victims

SECONDS = 20.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making namespaces needs root")


def member(identity: ProcessId, rank: int = 0) -> Member:
    return Member(
        identity.pid, identity.create_time, Role.RANK, rank, namespace_pid=procfs.namespace_pid(identity.pid)
    )


def look(*members: Member, native: bool = False, with_locals: bool = False) -> list[Sample]:
    taken = sampling.sample_round(
        members,
        index=0,
        began=time.monotonic(),
        deadline=Deadline.after(SECONDS),
        native=native,
        with_locals=with_locals,
    )
    return list(taken.samples)


def functions(sample: Sample) -> list[str]:
    return [f.name for t in sample.threads if t.main for f in t.frames]


def test_sleeping_and_spinning_processes_show_their_frames() -> None:
    with victims.python(victims.SLEEPER) as (one, _), victims.python(victims.SPINNER) as (two, _):
        samples = look(member(one), member(two, 1))
    assert [s.rung for s in samples] == [Rung.BLOCKING, Rung.BLOCKING]
    assert all(functions(s) == ["<module>"] for s in samples)
    assert samples[1].reading is not None
    assert samples[1].reading.state == "R"


def test_native_frames_are_read_when_asked() -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        victims.in_state(one.pid, "S")
        (sample,) = look(member(one), native=True)
    assert sample.rung is Rung.NATIVE
    assert any(f.native for t in sample.threads for f in t.frames)


def test_native_frames_are_read_for_the_named_processes_only() -> None:
    with victims.python(victims.SLEEPER) as (one, _), victims.python(victims.SLEEPER) as (two, _):
        taken = sampling.sample_round(
            [member(one), member(two, 1)],
            index=0,
            began=time.monotonic(),
            deadline=Deadline.after(SECONDS),
            native=True,
            native_pids=frozenset({two.pid}),
        )
    assert [s.rung for s in taken.samples] == [Rung.BLOCKING, Rung.NATIVE]


def test_locals_are_read_only_when_asked() -> None:
    code = "import signal\ndef f(word):\n    print('up', flush=True)\n    signal.pause()\nf('swordfish')"
    with victims.python(code) as (one, _):
        (plain,) = look(member(one))
        (asked,) = look(member(one), with_locals=True)
    assert all(f.locals is None for t in plain.threads for f in t.frames)
    assert {"word": "'swordfish'"} in [f.locals for t in asked.threads for f in t.frames] or any(
        "swordfish" in str(f.locals) for t in asked.threads for f in t.frames
    )


def test_process_that_sleeps_in_c_with_the_gil_held_is_read() -> None:
    with victims.python(victims.NATIVE) as (one, _):
        victims.in_state(one.pid, "S")
        (sample,) = look(member(one))
    assert sample.rung is Rung.BLOCKING
    assert functions(sample)[0] == "<module>"


def test_stopped_process_is_read_without_attaching_and_stays_stopped() -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        os.kill(one.pid, signal.SIGSTOP)
        victims.in_state(one.pid, "T")
        (sample,) = look(member(one), native=True)
        assert procfs.state_of(one.pid) == "T"
    assert sample.rung is Rung.NONBLOCKING
    assert functions(sample) == ["<module>"]
    assert not sample.torn
    assert any("stopped" in p for p in sample.problems)


def test_process_under_another_tracer_is_read_without_attaching() -> None:
    """Another tracer (gdb, CRIU) owns it: attaching would fail with EPERM."""
    seize, libc = 0x4206, ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    with victims.python(victims.SLEEPER) as (one, _):
        assert libc.ptrace(seize, one.pid, None, None) == 0, os.strerror(ctypes.get_errno())
        (sample,) = look(member(one))
    assert sample.rung is Rung.NONBLOCKING
    assert sample.reading is not None
    assert sample.reading.tracer == os.getpid()
    assert any("traced by pid" in p for p in sample.problems)


def test_zombie_is_data() -> None:
    with victims.python(victims.PARENT_OF_ZOMBIE) as (_, line):
        zombie = ProcessId.of(int(line))
        assert zombie is not None
        (sample,) = look(member(zombie))
    assert sample.rung is Rung.PROC
    assert sample.reading is not None
    assert sample.reading.state == "Z"
    assert sample.threads == ()


def test_uninterruptible_process_is_not_attached_to() -> None:
    with victims.python(victims.UNINTERRUPTIBLE) as (one, _):
        victims.in_state(one.pid, "D")
        (sample,) = look(member(one))
    assert sample.rung is Rung.PROC
    assert sample.reading is not None
    assert sample.reading.state == "D"
    assert any("uninterruptible" in p for p in sample.problems)


@needs_root
def test_kernel_stack_of_an_uninterruptible_process_is_read() -> None:
    with victims.python(victims.UNINTERRUPTIBLE) as (one, _):
        victims.in_state(one.pid, "D")
        (sample,) = look(member(one))
    assert sample.reading is not None
    assert sample.reading.kernel_stack or sample.reading.wchan


def test_process_that_is_no_python_is_data() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        identity = ProcessId.of(process.pid)
        assert identity is not None
        (sample,) = look(member(identity))
    finally:
        process.kill()
        process.wait()
    assert sample.rung is Rung.PROC
    assert any("python" in p for p in sample.problems)


def test_starting_interpreter_is_data() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        identity = ProcessId.of(process.pid)
        assert identity is not None
        (sample,) = look(member(identity))
    finally:
        process.kill()
        process.wait()
    assert sample.rung in (Rung.BLOCKING, Rung.NONBLOCKING, Rung.PROC)
    assert sample.reading is not None


def test_process_that_is_gone_is_data() -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        known = member(one)
    (sample,) = look(known)
    assert sample.rung is Rung.GONE
    assert sample.problems == ("the process is gone",)


def test_reused_pid_is_told_from_the_process_that_had_it() -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        impostor = member(ProcessId(one.pid, one.create_time - 1000.0))
        (sample,) = look(impostor)
    assert sample.rung is Rung.GONE
    assert "another process" in sample.problems[0]


@needs_root
def test_process_in_own_namespaces_is_sampled_from_inside() -> None:
    """From outside thread ids are wrong and native dumps fail."""
    prefix = [
        shutil.which("unshare") or "unshare",
        "--pid",
        "--mount",
        "--fork",
        "--mount-proc",
        "--kill-child",
    ]
    with victims.python(victims.SLEEPER, prefix=prefix) as (outer, _):
        (inner,) = victims.children(outer.pid)
        identity = ProcessId.of(inner)
        assert identity is not None
        known = member(identity)
        assert known.namespace_pid == 1
        (sample,) = look(known, native=True)
    assert sample.rung is Rung.NATIVE
    assert [t.main for t in sample.threads] == [True]
    assert "<module>" in functions(sample)


def fake_sampler(folder: Path, body: str) -> Path:
    path = folder / "py-spy"
    path.write_text(f"#!{sys.executable} -IS\nimport ctypes, os, signal, sys, time\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_stuck_sampler_is_killed_and_the_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler killed between attach and wait leaves its target stopped: that is undone."""
    body = "os.kill(int(sys.argv[sys.argv.index('--pid') + 1]), signal.SIGSTOP)\nsignal.pause()"
    path = fake_sampler(tmp_path, body)
    monkeypatch.setattr(pyspy, "program", lambda: path)
    with victims.python(victims.SLEEPER) as (one, _):
        taken = sampling.sample_round(
            [member(one)], index=0, began=time.monotonic(), deadline=Deadline.after(2.0)
        )
        wait_for("the target to run on", lambda: procfs.state_of(one.pid) == "S", Deadline.after(10.0))
    (sample,) = taken.samples
    assert sample.rung is Rung.PROC
    assert any("killed after" in p for p in sample.problems)
    assert any("continued it" in p for p in sample.problems)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("print('Process 1: python'); sys.exit(1)", "exit 1"),
        ("print('no json at all')", "no JSON"),
        ("print('[1, {}, null]')", "malformed"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "exit -11"),
        ("sys.stdout.buffer.write(bytes(range(256)) * 1000)", "no JSON"),
    ],
    ids=["header and failure", "text", "wrong shape", "crash", "binary"],
)
def test_failing_sampler_is_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    path = fake_sampler(tmp_path, body)
    monkeypatch.setattr(pyspy, "program", lambda: path)
    with victims.python(victims.SLEEPER) as (one, _):
        (sample,) = look(member(one))
    assert sample.threads == ()
    assert any(says in p for p in sample.problems), sample.problems


def test_missing_sampler_names_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvsnap_conformance.errors import EnvironmentFailure

    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFailure, match="py-spy is not there"):
        pyspy.program()


def test_nothing_of_the_sampler_outlives_the_one_who_asked(tmp_path: Path) -> None:
    """Kill -9 of the asking process takes helper and sampler along."""
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nsignal.pause()"
    path = fake_sampler(tmp_path, body)
    asking = f"""
import sys, time
from pathlib import Path
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.hang import pyspy, sample
from nvsnap_conformance.hang.model import Member, Role
from nvsnap_conformance.processes import ProcessId
pyspy.program = lambda: Path({str(path)!r})
one = ProcessId.of(int(sys.argv[1]))
print("up", flush=True)
member = Member(one.pid, one.create_time, Role.RANK, 0, namespace_pid=one.pid)
sample.sample_round([member], index=0, began=time.monotonic(), deadline=Deadline.after(600))
"""
    root = str(Path(__file__).parent.parent)
    with victims.python(victims.SLEEPER) as (one, _):
        with victims.python(asking, str(one.pid), env={"PYTHONPATH": root}) as (asker, _):
            written = wait_for(
                "the sampler to start",
                lambda: (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else None,
                Deadline.after(20.0),
            )
            sampler = ProcessId.of(int(written))
            assert sampler is not None
            helpers = [ProcessId.of(pid) for pid in victims.children(asker.pid)]
            os.kill(asker.pid, signal.SIGKILL)
            wait_for("the sampler to end", lambda: not sampler.alive, Deadline.after(10.0))
            for helper in helpers:
                assert helper is not None
                victims.wait_gone(helper)
        assert one.alive


def test_kernel_counters_grow_with_work_and_not_with_spinning() -> None:
    touching = (
        "import mmap\nprint('up', flush=True)\nwhile True:\n"
        "    with mmap.mmap(-1, 1 << 20) as new:\n        new.write(b'x' * (1 << 20))"
    )
    with victims.python(touching) as (one, _), victims.python(victims.SPINNER) as (two, _):
        before, spun_before = faults(one.pid), faults(two.pid)
        wait_for("page faults", lambda: faults(one.pid) > before + 1000, Deadline.after(20.0))
        assert faults(two.pid) - spun_before < 100
    assert procfs.read(one.pid) is None


def faults(pid: int) -> int:
    reading = procfs.read(pid)
    assert reading is not None
    return reading.faults


def test_tree_seconds_count_children() -> None:
    code = (
        "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "print('up', flush=True)\np.wait()"
    )
    with victims.python(code) as (one, _):

        def child_burns() -> bool:
            table = procfs.CpuTable()
            used = table.tree_seconds(one.pid) > table.own_seconds(one.pid) + 0.1
            return used and table.tree_runnable(one.pid) == 1

        wait_for("the child's CPU time", child_burns, Deadline.after(20.0))


def test_waiting_for_a_core_is_counted_and_sleeping_is_not() -> None:
    core = {min(os.sched_getaffinity(0))}
    with (
        victims.python(victims.SLEEPER) as (sleeper, _),
        victims.python(victims.SPINNER) as (one, _),
        victims.python(victims.SPINNER) as (two, _),
    ):
        for spinner in (one, two):
            os.sched_setaffinity(spinner.pid, core)
        before = procfs.queued_seconds(one.pid)
        asleep = procfs.queued_seconds(sleeper.pid)
        assert before >= 0
        wait_for(
            "one to wait for the other's core",
            lambda: procfs.queued_seconds(one.pid) > before + 0.2,
            Deadline.after(SECONDS),
        )
        assert procfs.queued_seconds(sleeper.pid) == asleep
        reading = procfs.read(one.pid)
        assert reading is not None
        assert reading.runnable
        assert reading.queued_seconds > before
    assert procfs.queued_seconds(one.pid) == -1.0
