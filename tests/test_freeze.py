"""Freezing real process trees: stopped thread by thread, continued whole, undone when it cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.checkpoint import freeze
from nvsnap_conformance.checkpoint.freeze import FreezeCheckpointer, check_all_stopped, read_states
from nvsnap_conformance.checkpoint.freeze_mutants import FreezeReportsOnly, FreezeSkipsOne
from nvsnap_conformance.checkpoint.protocol import ProcessState
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, UsageError
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from pathlib import Path

# A root with a thread, a child in a session of its own, and its child: each counts in a file. The sleep only
# keeps them from taking all cores: nothing waits for it.
TREE = """
import os, signal, threading, time
def count(name):
    number = 0
    while True:
        number += 1
        with open(name + ".new", "w") as file: file.write(str(number))
        os.rename(name + ".new", name)
        time.sleep(0.001)
if os.fork() == 0:
    os.setsid()
    count("grandchild" if os.fork() == 0 else "child")
threading.Thread(target=count, args=("thread",), daemon=True).start()
count("root")
"""

# Starts a new child all the time; the children end by themselves.
FORKING = """
import os, time
open("forking", "w")
while True:
    if os.fork() == 0:
        time.sleep(0.05)
        os._exit(0)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
"""

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def launch(code: str, *files: str) -> EngineProcess:
            engine = stack.enter_context(
                EngineProcess.launch([sys.executable, "-c", code], env={}, workdir=tmp_path)
            )
            for name in files:
                wait_for(name, (engine.home_outside / name).exists, soon(), detail=engine.log_tail)
            return engine

        yield launch


def soon() -> Deadline:
    return Deadline.after(20)


COUNTERS = ("root", "thread", "child", "grandchild")


def counts(engine: EngineProcess) -> list[int]:
    return [int((engine.home_outside / name).read_text()) for name in COUNTERS]


def test_every_thread_is_stopped_and_runs_again(start: Start, tmp_path: Path) -> None:
    engine = start(TREE, *COUNTERS)
    members = engine.tree()
    frozen = FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    assert {state.process for state in frozen.states} == set(members)
    assert frozen.states == read_states(engine.tree())
    assert sorted(len(state.threads) for state in frozen.states) == [1, 1, 2]
    assert check_all_stopped(read_states(engine.tree())) == []

    before = counts(engine)
    # Another checkpointer, so that nothing but the folder carries over.
    running = FreezeCheckpointer().load(engine, tmp_path / "image", soon())
    assert {state.process for state in running.states} == set(members)
    assert not any(state.stopped for state in running.states)
    wait_for(
        "all four to count on",
        lambda: all(now > then for now, then in zip(counts(engine), before, strict=True)),
        soon(),
    )


def test_stopped_tree_makes_no_progress(start: Start, tmp_path: Path) -> None:
    engine = start(TREE, *COUNTERS)
    FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    then = counts(engine)
    # As long as a free-running process takes for a hundred steps, by that process's own count.
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    with EngineProcess.launch([sys.executable, "-c", TREE], env={}, workdir=other_folder) as other:
        wait_for("a hundred steps", lambda: _count(other.home_outside / "root") > 100, soon())
        assert other.root.alive
    assert counts(engine) == then


def _count(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def test_children_that_appear_meanwhile_are_stopped_too(start: Start, tmp_path: Path) -> None:
    engine = start(FORKING, "forking")
    result = FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    assert check_all_stopped(read_states(engine.tree())) == []
    assert {state.process for state in result.states} == set(engine.tree())
    assert result.details["scans"] > 1


def test_child_born_after_a_look_at_the_tree_is_not_missed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(TREE, *COUNTERS)
    members = engine.tree()
    # What two looks see if the last member is born after the second, by a parent that is stopped by then.
    looks = iter([members, members[:-1], members[:-1]])
    tree = engine.tree
    monkeypatch.setattr(engine, "tree", lambda: next(looks, None) or tree())
    result = FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    assert [state.process for state in result.states] == members
    assert check_all_stopped(read_states(members)) == []


def test_freeze_that_cannot_succeed_is_undone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(TREE, *COUNTERS)
    monkeypatch.setattr(freeze, "ATTEMPT_SECONDS", 0.05)
    members = engine.tree()

    def adversary(processes: Iterable[ProcessId]) -> tuple[ProcessState, ...]:
        """Let one process run on, as somebody else's SIGCONT does, whenever the freezer is about to look."""
        members[-1].send(SIGCONT)
        wait_for("it to run on", lambda: not read_states(members[-1:])[0].stopped, soon(), interval=0.001)
        return read_states(processes)

    with monkeypatch.context() as patch:
        patch.setattr(freeze, "read_states", adversary)
        with pytest.raises(DeadlineExceeded, match="it runs again"):
            FreezeCheckpointer().dump(engine, tmp_path / "image", Deadline.after(0.4))
    wait_for("all to run", lambda: not any(state.stopped for state in read_states(members)), soon())
    assert not (tmp_path / "image").exists()


def test_folder_that_cannot_be_written_undoes_the_freeze(start: Start, tmp_path: Path) -> None:
    engine = start(TREE, *COUNTERS)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        FreezeCheckpointer().dump(engine, tmp_path / "file", soon())
    wait_for("all to run", lambda: not any(s.stopped for s in read_states(engine.tree())), soon())


def test_refuses_what_is_stopped_or_gone(start: Start, tmp_path: Path) -> None:
    engine = start(TREE, *COUNTERS)
    FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    with pytest.raises(EnvironmentFailure, match="cannot freeze") as caught:
        FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    assert "stopped already" in caught.value.cause
    assert check_all_stopped(read_states(engine.tree())) == []
    engine.close()
    with pytest.raises(EnvironmentFailure, match="cannot freeze") as caught:
        FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    assert "no process" in caught.value.cause


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"processes": 1}', '{"processes": [[1]]}'])
def test_load_of_no_checkpoint_is_a_usage_error(start: Start, tmp_path: Path, content: str | None) -> None:
    engine = start(TREE, *COUNTERS)
    if content is not None:
        (tmp_path / freeze.MANIFEST).write_text(content)
    with pytest.raises(UsageError, match="no frozen engine"):
        FreezeCheckpointer().load(engine, tmp_path, soon())


def test_death_while_frozen_is_reported_and_the_others_run(start: Start, tmp_path: Path) -> None:
    engine = start(TREE, *COUNTERS)
    FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    *others, victim = engine.tree()
    victim.send(SIGKILL)
    wait_for("its end", lambda: not victim.alive, soon())
    with pytest.raises(EnvironmentFailure, match=str(victim.pid)):
        FreezeCheckpointer().load(engine, tmp_path / "image", soon())
    wait_for("the others to run", lambda: not any(s.stopped for s in read_states(others)), soon())


def test_process_that_stays_stopped_after_load_is_a_timeout(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(TREE, *COUNTERS)
    FreezeCheckpointer().dump(engine, tmp_path / "image", soon())
    victim = engine.tree()[-1]
    send = ProcessId.send

    def withheld(self: ProcessId, signum: int) -> bool:
        return self != victim and send(self, signum)  # type: ignore[arg-type]

    monkeypatch.setattr(ProcessId, "send", withheld)
    with pytest.raises(DeadlineExceeded, match="run again"):
        FreezeCheckpointer().load(engine, tmp_path / "image", Deadline.after(0.2))


@pytest.mark.parametrize("mutant", [FreezeSkipsOne, FreezeReportsOnly])
def test_mutants_claim_success_and_are_caught(
    start: Start, tmp_path: Path, mutant: type[FreezeCheckpointer]
) -> None:
    engine = start(TREE, *COUNTERS)
    result = mutant().dump(engine, tmp_path / "image", soon())
    assert check_all_stopped(result.states) == []
    assert {state.process for state in result.states} == set(engine.tree())
    found = check_all_stopped(read_states(engine.tree()))
    assert {str(finding.signature) for finding in found} == {"FREEZE:NOT_STOPPED"}
    assert len(found) == (1 if mutant is FreezeSkipsOne else 3)
    mutant().load(engine, tmp_path / "image", soon())
    assert not any(state.stopped for state in read_states(engine.tree()))


def test_check_counts_missing_and_half_stopped_as_failures() -> None:
    here = ProcessId(1, 1.0)
    assert [str(f.signature) for f in check_all_stopped(())] == ["FREEZE:NOT_STOPPED@nothing-observed"]
    half = ProcessState(here, "T", {1: "T", 2: "S"})
    gone = ProcessState(here, "X")
    traced = ProcessState(here, "t", {1: "t", 2: "T"})
    found = check_all_stopped((half, gone, traced))
    assert len(found) == 2
    assert "{2: 'S'}" in found[0].message
    assert "gone" in found[1].message


def test_state_of_a_process_that_is_gone(start: Start) -> None:
    engine = start(TREE, *COUNTERS)
    member = engine.tree()[-1]
    engine.close()
    assert read_states([member]) == (ProcessState(member, "X"),)


def test_state_of_a_reused_pid_is_not_taken_for_the_old_process(start: Start) -> None:
    engine = start(TREE, *COUNTERS)
    engine.root.send(SIGSTOP)
    wait_for("its stop", lambda: read_states([engine.root])[0].stopped, soon())
    other = ProcessId(engine.root.pid, engine.root.create_time - 100)
    assert read_states([other]) == (ProcessState(other, "X"),)
