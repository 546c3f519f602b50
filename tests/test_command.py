"""Checkpointing by programs: a stand-in for ``cuda-checkpoint`` over real processes."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.checkpoint import stand_in_driver
from nvsnap_conformance.checkpoint.command import CommandDevice, CommandHost
from nvsnap_conformance.checkpoint.device_checks import check_device_order, check_known_end, check_memory
from nvsnap_conformance.checkpoint.device_failure import DeviceFailure, Fate
from nvsnap_conformance.checkpoint.device_ranks import DeviceRanks
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("driver", {driver!r})
driver = importlib.util.module_from_spec(spec); spec.loader.exec_module(driver)
verb, pid = sys.argv[1], int(sys.argv[2])
if verb == "state":
    error, state = driver.cuCheckpointProcessGetState(pid)
    print("" if state is None else state.name.removeprefix("CU_PROCESS_STATE_").lower())
else:
    (error,) = driver._step(pid, verb)
if error:
    print(f"could not {{verb}}: {{error.name}}", file=sys.stderr)
sys.exit(int(error) % 251)
"""


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[str]]:
    program = tmp_path / "checkpointer.py"
    program.write_text(PROGRAM.format(driver=stand_in_driver.__file__))
    return {
        verb: [sys.executable, "-I", "-S", str(program), verb, "{pid}"]
        for verb in ("state", "lock", "checkpoint", "restore", "unlock")
    }


@pytest.mark.parametrize("with_state", [True, False])
def test_a_cycle_by_programs(commands: dict[str, list[str]], with_state: bool) -> None:
    if not with_state:
        del commands["state"]
    with DeviceRanks("stand-in") as ranks:
        if not with_state:
            ranks._processes.pop().kill()  # nobody asks whether it has a context
            ranks._identities.pop()
        seen = ranks.cycle(CommandDevice(commands))
    assert seen.error is None
    assert check_device_order(seen) == check_memory(seen) == []


def test_a_failing_program_is_told_with_its_words_and_rolled_back(commands: dict[str, list[str]]) -> None:
    with DeviceRanks("stand-in", faults={(1, "checkpoint"): "CUDA_ERROR_NOT_SUPPORTED"}) as ranks:
        seen = ranks.cycle(CommandDevice(commands))
    assert seen.failure is not None
    assert str(seen.failure.signature) == f"COMMAND:{801 % 251}@checkpoint"
    assert "could not checkpoint: CUDA_ERROR_NOT_SUPPORTED" in str(seen.failure)
    assert seen.failure.fate is Fate.RUNNING
    assert check_known_end(seen) == []


def test_a_program_that_hangs_is_killed(commands: dict[str, list[str]]) -> None:
    with DeviceRanks("stand-in", faults={(0, "restore"): "HANG"}) as ranks:
        seen = ranks.cycle(CommandDevice(commands))
    assert seen.failure is not None
    assert str(seen.failure.signature) == "COMMAND:HANG@restore"
    assert seen.failure.fate is Fate.KILLED
    assert check_known_end(seen) == []


def test_a_success_that_the_state_does_not_show_is_a_failure(commands: dict[str, list[str]]) -> None:
    commands["checkpoint"] = [sys.executable, "-c", ""]
    with DeviceRanks("stand-in") as ranks:
        seen = ranks.cycle(CommandDevice(commands))
    assert seen.failure is not None
    assert str(seen.failure.signature) == "COMMAND:STATE@checkpoint"


def test_a_program_that_is_missing_rolls_the_others_back(commands: dict[str, list[str]]) -> None:
    commands["checkpoint"] = ["/nonexistent/checkpointer", "{pid}"]
    with DeviceRanks("stand-in") as ranks:
        seen = ranks.cycle(CommandDevice(commands))
    assert isinstance(seen.error, DeviceFailure)
    assert str(seen.error.signature) == "COMMAND:START@checkpoint"
    assert check_known_end(seen) == []


def host(words: list[str]) -> tuple[CommandHost, Any]:
    found = ProcessId.of(os.getpid())
    assert found is not None
    process = SimpleNamespace(root=found, tree=lambda: [found])
    return CommandHost({"dump": words, "load": words}, replaces_processes=False), process


def test_the_host_layer_gets_pid_and_folder(tmp_path: Path) -> None:
    code = "import json, sys; json.dump(sys.argv[1:], open(sys.argv[2] + '/told', 'w'))"
    checkpointer, process = host([sys.executable, "-c", code, "pid={pid}", "{folder}"])
    folder = tmp_path / "image"
    result = checkpointer.dump(process, folder, Deadline.after(20.0))
    assert json.loads((folder / "told").read_text()) == [f"pid={process.root.pid}", str(folder)]
    assert [state.process for state in result.states] == [process.root]


def test_the_host_layer_s_failures_say_the_program_s_words(tmp_path: Path) -> None:
    checkpointer, process = host([sys.executable, "-c", "import sys; sys.exit('no room')"])
    with pytest.raises(EnvironmentFailure, match="the load command ended with 1") as caught:
        checkpointer.load(process, tmp_path, Deadline.after(20.0))
    assert caught.value.cause == "no room"
    hanging, process = host([sys.executable, "-c", "import signal; signal.pause()"])
    with pytest.raises(DeadlineExceeded, match="was killed"):
        hanging.dump(process, tmp_path, Deadline.after(0.5))
    missing, process = host(["/nonexistent/agent"])
    with pytest.raises(EnvironmentFailure, match="cannot be started"):
        missing.dump(process, tmp_path, Deadline.after(1.0))
