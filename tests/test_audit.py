"""The audit of a host: what is left of any run is found, whatever killed it, and nothing else.

Other runs use this machine too, so every test goes by names, pids and places of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from nvsnap_conformance import audit, cli, gpus
from nvsnap_conformance.audit import Audit, Left, look
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.held_folder import DEVICE, RANK_SERVER, new_folder
from nvsnap_conformance.lifecycle.residue import RUN_ID, temporary_prefix
from nvsnap_conformance.outcomes import ExitCode
from nvsnap_conformance.processes import ProcessId
from tests.stand_in_nvml import NVMLError, StandInNvml

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM = Path("/dev/shm")
ONE, TWO = "GPU-1a", "GPU-2b"

HOLDER = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> str:
    """A run id of this test alone, which the test's own process does not have."""
    monkeypatch.delenv(RUN_ID, raising=False)
    return secrets.token_hex(16)


def told(tmp_path: Path, kind: str) -> list[Left]:
    """What an audit finds of a kind, with places of the test's own where it takes them."""
    nothing = StandInNvml()
    return [
        left for left in look(module=nothing, notes=tmp_path, temporary=[tmp_path]).left if left.kind == kind
    ]


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["audit", *words])


# Processes ----------------------------------------------------------------------------------------

STARTER = """
import os, subprocess, sys
run = sys.argv[1]
hold = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'input()'], env={}); " \\
       "print(c.pid, flush=True); c.wait()"
child = subprocess.Popen([sys.executable, "-c", hold], env={"NVSNAP_RUN_ID": run}, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def orphans(run: str) -> Iterator[list[ProcessId]]:
    """Two processes whose starter was killed: one with the run's mark, and its child without it."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        found = [ProcessId.of(int(starter.stdout.readline())) for _ in range(2)]
        orphaned = [process for process in found if process is not None]
        assert len(orphaned) == 2
        starter.kill()
        starter.wait()
        try:
            yield orphaned
        finally:
            for process in orphaned:
                process.send(signal.SIGKILL)


def test_processes_of_a_killed_starter_are_found_until_they_are_ended(
    run: str, orphans: list[ProcessId], tmp_path: Path
) -> None:
    marked, child = orphans
    by_pid = {left.to_do.split()[2].rstrip(","): left for left in told(tmp_path, audit.PROCESS)}
    assert by_pid[str(marked.pid)].what.startswith(f"process {marked.pid} (")
    assert by_pid[str(marked.pid)].what.endswith(f") of run {run} is alive")
    assert "by its parent or pid namespace" in by_pid[str(child.pid)].what
    assert by_pid[str(child.pid)].to_do == f"kill -KILL {child.pid}, unless its run still goes on"
    assert str(os.getpid()) not in by_pid
    for process in orphans:
        process.send(signal.SIGKILL)
    wait_for("their end", lambda: not any(process.alive for process in orphans), Deadline.after(20.0))
    assert not [left for left in told(tmp_path, audit.PROCESS) if run in left.what]


def test_a_job_that_has_a_run_s_id_itself_is_not_what_a_run_left(run: str) -> None:
    """The shell, the command and the rest of its pipeline bear the mark; what stays behind does too."""
    script = (
        "sleep 1000 & echo $!; "
        f"{sys.executable} -m nvsnap_conformance.cli audit --format json | (cat; true); kill %1"
    )
    answer = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, RUN_ID: run}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    sleeper, _, text = answer.stdout.partition("\n")
    ours = [left["what"] for left in json.loads(text)["left"] if f"of run {run}" in left["what"]]
    assert [what.partition(" (")[0] for what in ours] == [f"process {sleeper}"], answer.stdout


# Mounts, and a host of its own --------------------------------------------------------------------

OWN_HOST = """
import json, os, pathlib, sys
from click.testing import CliRunner
from nvsnap_conformance import audit, cli
from nvsnap_conformance.engines import home, linux
audit._TMP = pathlib.Path(os.environ["TMPDIR"])
linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
linux.mount("tmpfs", "/dev/shm", "tmpfs", 0)
def say():
    result = CliRunner().invoke(cli.main, ["audit", "--format", sys.argv[1]])
    print(json.dumps([result.exit_code, result.stdout]))
say()
engines = pathlib.Path(sys.argv[2])
home.mount_point = lambda: engines
below = engines / "a b"
below.mkdir(parents=True)
for place in (below, engines):
    linux.mount("tmpfs", str(place), "tmpfs", 0)
say()
"""


def on_a_host_of_its_own(form: str, tmp_path: Path) -> list[tuple[int, str]]:
    """Audit in own pid and mount namespaces: as they are, and with two mounts where engines have theirs."""
    words = ["unshare", "--pid", "--fork", "--mount", "--mount-proc"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("pid and mount namespaces need root, and a container that lets it make them")
    (tmp_path / "tmp").mkdir()
    env = {name: value for name, value in os.environ.items() if name != RUN_ID}
    env |= {"TMPDIR": str(tmp_path / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    answer = subprocess.run(
        [*words, sys.executable, "-c", OWN_HOST, form, str(tmp_path / "engine")],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return [tuple(json.loads(line)) for line in answer.stdout.splitlines()]


def test_a_clean_host_is_clean_and_one_with_an_engine_s_mounts_is_not(tmp_path: Path) -> None:
    (clean, first), (dirty, second) = on_a_host_of_its_own("text", tmp_path)
    assert (clean, dirty) == (ExitCode.CONFORMANT, ExitCode.NOT_CONFORMANT), first + second
    unseen, nothing = first.splitlines()
    assert unseen.startswith("GPUs were not looked at: ")
    assert nothing == "nothing is left"
    engines = tmp_path / "engine"
    assert second.splitlines() == [
        f"tmpfs is mounted over {engines} -> umount {engines}",
        f"tmpfs is mounted over {engines}/a b -> umount '{engines}/a b'",
        unseen,
        "2 things are left",
    ]


def test_the_same_as_json(tmp_path: Path) -> None:
    (clean, first), (dirty, second) = on_a_host_of_its_own("json", tmp_path)
    assert (clean, dirty) == (ExitCode.CONFORMANT, ExitCode.NOT_CONFORMANT)
    assert json.loads(first)["left"] == []
    assert json.loads(first)["gpus_unseen"]
    assert [(left["kind"], set(left)) for left in json.loads(second)["left"]] == [
        (audit.MOUNT, {"kind", "what", "to_do"})
    ] * 2


# Shared memory ------------------------------------------------------------------------------------


def test_abandoned_shared_memory_is_found_by_the_names_of_engines(tmp_path: Path) -> None:
    unique = secrets.token_hex(8)
    left = [f"psm_{unique}", f"sem.mp-{unique}", f"vllm_dist_{unique}", f"nccl-{unique}", f"nvsnap-{unique}"]
    others, used = [f"other-{unique}", f"spsm_{unique}"], [f"nvsnap-open-{unique}", f"nvsnap-mapped-{unique}"]
    hold = (
        "import mmap, os, sys; one = os.open(sys.argv[1], os.O_RDWR); two = os.open(sys.argv[2], os.O_RDWR); "
        f"area = mmap.mmap(two, 4096); os.close(two); {HOLDER}"
    )
    try:
        for name in (*left, *others, *used):
            (SHM / name).write_bytes(bytes(4096))
        with subprocess.Popen(
            [sys.executable, "-c", hold, *(str(SHM / name) for name in used)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as holder:  # fmt: skip
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
            found = [thing for thing in told(tmp_path, audit.SHM) if unique in thing.what]
            holder.kill()
        assert [thing.to_do for thing in found] == [
            f"rm /dev/shm/{name}, unless it is another program's" for name in sorted(left)
        ]
        after = [thing for thing in told(tmp_path, audit.SHM) if unique in thing.what]
        assert len(after) == len(left) + len(used)
    finally:
        for name in (*left, *others, *used):
            (SHM / name).unlink(missing_ok=True)


# Folders ------------------------------------------------------------------------------------------


def test_folders_that_nobody_locks_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server, lock = new_folder(RANK_SERVER)
    device, other = new_folder(DEVICE)
    other.close()
    (tmp_path / "nvsnap-suite-0-0123456789ab").mkdir()
    (found,) = [left for left in told(tmp_path, audit.FOLDER) if str(tmp_path) in left.what]
    assert found.to_do == f"rm -r {device}"
    lock.close()
    assert len([left for left in told(tmp_path, audit.FOLDER) if str(tmp_path) in left.what]) == 2
    assert server.is_dir()


def test_a_run_s_folder_is_left_unless_the_run_or_a_process_has_it(run: str, tmp_path: Path) -> None:
    folder = Path(f"{temporary_prefix(run)}left")
    folder.mkdir()

    def found() -> bool:
        return f"rm -r {folder}" in [left.to_do for left in told(tmp_path, audit.FOLDER)]

    try:
        assert found()
        for env, cwd in (({RUN_ID: run}, tmp_path), ({}, folder)):
            with subprocess.Popen(
                [sys.executable, "-c", HOLDER], env=env, cwd=cwd,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            ) as holder:  # fmt: skip
                assert holder.stdout is not None
                assert holder.stdout.readline() == "up\n"
                assert not found()
                holder.kill()
            assert found()
    finally:
        folder.rmdir()


# GPUs ---------------------------------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    return StandInNvml(ONE, TWO)


def on_gpus(nvml: StandInNvml, notes: Path, seconds: float = 0.0) -> list[str]:
    found = look(module=nvml, notes=notes, temporary=[], settle=Deadline.after(seconds))
    assert found.gpus_unseen == ""
    assert nvml.open == 0
    return [left.what for left in found.left if left.kind == audit.GPU]


def test_gpus_are_left_where_a_lease_would_refuse_them(nvml: StandInNvml, tmp_path: Path) -> None:
    assert on_gpus(nvml, tmp_path) == []
    nvml.device(ONE).processes = 2
    nvml.device(TWO).used = 5 << 30
    busy, leak = on_gpus(nvml, tmp_path)
    assert busy == f"GPU 0 is not idle: {ONE}: 2 processes use it"
    assert leak.startswith(f"GPU 1 is not idle: {TWO}: 5120 MiB are in use, by no process")
    nvml.device(ONE).processes, nvml.device(ONE).used = 0, 304 << 20
    nvml.device(TWO).used = 4 << 20
    assert on_gpus(nvml, tmp_path) == []
    (tmp_path / f"{ONE}.json").write_text(json.dumps({"baseline": 4 << 20, "used": 304 << 20}))
    (note,) = on_gpus(nvml, tmp_path)
    assert "the memory of an earlier run has not come back" in note


def test_only_visible_gpus_are_looked_at(
    nvml: StandInNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.device(ONE).processes = 1
    monkeypatch.setenv(gpus.VISIBLE, "1")
    assert on_gpus(nvml, tmp_path) == []


def test_memory_that_comes_back_is_waited_for(
    nvml: StandInNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.device(ONE).used = 5 << 30
    looks = iter(range(10))
    original = nvml.nvmlDeviceGetComputeRunningProcesses

    def settle(device: object) -> list[int]:
        if next(looks) == 3:
            nvml.device(ONE).used = 4 << 20
        return original(nvml.device(ONE))

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", settle)
    assert on_gpus(nvml, tmp_path, seconds=20.0) == []


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "later"])
def test_a_gpu_that_no_longer_answers_is_left(
    late: bool, nvml: StandInNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [nvml.nvmlDeviceGetMemoryInfo] * (2 if late else 0)

    def lost(device: object) -> object:
        if answers:
            return answers.pop()(nvml.device(ONE))
        raise NVMLError("GPU is lost")

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lost)
    found = look(module=nvml, notes=tmp_path, temporary=[], settle=Deadline.after(0.0))
    what = [left.what for left in found.left if left.kind == audit.GPU]
    assert what
    assert all("GPU is lost" in text for text in what)


# The command --------------------------------------------------------------------------------------


def test_without_a_driver_the_rest_is_looked_at_unless_gpus_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "load_pynvml", lambda: StandInNvml(broken=True))
    result = call()
    assert result.exit_code in {ExitCode.CONFORMANT, ExitCode.NOT_CONFORMANT}  # whatever else is on the host
    assert (
        "GPUs were not looked at: GPUs cannot be looked at: NVML answers Driver Not Loaded" in result.output
    )
    strict = call("--gpus")
    assert strict.exit_code == ExitCode.ENVIRONMENT
    for words in ("error: no GPU was looked at", "likely cause: ", "next step: "):
        assert words in strict.output
    assert json.loads(call("--gpus", "--format", "json").stdout)["gpus_unseen"]


def test_gpus_that_can_be_looked_at_satisfy_the_flag(
    nvml: StandInNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "load_pynvml", lambda: nvml)
    monkeypatch.setenv("NVS_CACHE_DIR", str(tmp_path))
    assert call("--gpus").exit_code in {ExitCode.CONFORMANT, ExitCode.NOT_CONFORMANT}


def test_one_thing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "look", lambda: Audit((Left(audit.SHM, "x is there", "rm x"),)))
    result = call("--gpus")
    assert (result.exit_code, result.output) == (
        ExitCode.NOT_CONFORMANT,
        "x is there -> rm x\n1 thing is left\n",
    )


def test_names_that_do_not_print_are_escaped() -> None:
    assert audit._line("a\nb\x1b[2J\u2028\ud800 é") == "a\\nb\\x1b[2J\\u2028\\ud800 é"


def test_a_host_that_cannot_be_looked_at_is_no_clean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[Left]:
        raise PermissionError("no")

    monkeypatch.setattr(audit, "_processes", refuse)
    result = call()
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "what runs have left cannot be looked at" in result.output


def test_words_that_are_no_option_are_refused() -> None:
    assert call("--gpu-s").exit_code == call("everything").exit_code == ExitCode.USAGE
