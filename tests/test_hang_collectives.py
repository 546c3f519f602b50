"""The registry of frames: what it knows, and how it refuses a malformed file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.hang.collectives import Kind, bare_name, load
from nvsnap_conformance.hang.model import Frame

if TYPE_CHECKING:
    from pathlib import Path

KNOWN = [
    (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3), "c10d.collective"),
    (Frame("init_process_group", "torch/distributed/distributed_c10d.py", 3), "c10d.rendezvous"),
    (Frame("recv", "torch/distributed/distributed_c10d.py", 3), "c10d.p2p"),
    (Frame("c10d::TCPStore::doWait(c10::ArrayRef<...>)", "libtorch_cpu.so", 0, True), "c10d.store_native"),
    (Frame("gloo::transport::uv::UnboundBuffer::waitRecv", "libtorch_cpu.so", 0, True), "c10d.work_native"),
    (Frame("ncclCommInitRankConfig", "libnccl.so.2", 0, True), "nccl.init"),
    (
        Frame("PyNcclWrapper.ncclCommInitRank", "vllm/distributed/device_communicators/pynccl_wrapper.py", 1),
        "nccl.init",
    ),
    (
        Frame(
            "_CPUSHMDistributed.all_reduce", "vllm/distributed/device_communicators/cpu_communicator.py", 275
        ),
        "vllm.shm_all_reduce",
    ),
    (
        Frame("MessageQueue.wait_until_ready", "vllm/distributed/device_communicators/shm_broadcast.py", 1),
        "vllm.mq_ready",
    ),
    (Frame("WorkerProc.worker_busy_loop", "vllm/v1/executor/multiproc_executor.py", 1), "vllm.worker_idle"),
    (Frame("EngineCoreProc._process_input_queue", "vllm/v1/engine/core.py", 1), "vllm.core_idle"),
    (
        Frame(
            "MultiprocExecutor.collective_rpc.<locals>.get_response",
            "vllm/v1/executor/multiproc_executor.py",
            1,
        ),
        "vllm.core_waits_for_ranks",
    ),
    (
        Frame("MNNVLAllReduceFusionWorkspace.__init__", "flashinfer/comm/trtllm_mnnvl_ar.py", 1),
        "flashinfer.mnnvl_workspace",
    ),
    (
        Frame("trtllm_create_ipc_workspace_for_all_reduce_fusion", "flashinfer/comm/trtllm_ar.py", 1),
        "flashinfer.trtllm_workspace",
    ),
    (Frame("exchange_fds", "flashinfer/comm/fd_exchange.py", 1), "flashinfer.fd_exchange"),
    (Frame("cuMulticastAddDevice", "libcuda.so.1", 0, True), "driver.multicast_team"),
    (Frame("cuMemImportFromShareableHandle", "libcuda.so.1", 0, True), "driver.import"),
    (Frame("request_export", "libcuinterpose.so", 0, True), "cuinterpose.export_request"),
    (Frame("cudaStreamSynchronize", "libcudart.so.13", 0, True), "device.synchronize"),
    (Frame("cuLaunchKernelEx", "libcuda.so.1", 0, True), "device.launch"),
    (Frame("synchronize", "torch/cuda/__init__.py", 1), "device.synchronize"),
    (
        Frame("recv_requests", "sglang/srt/managers/scheduler_components/request_receiver.py", 1),
        "sglang.idle",
    ),
    (Frame("_compile.<locals>.compile_inner", "torch/_dynamo/convert_frame.py", 1), "phase.compile"),
    (Frame("GPUModelRunner.capture_model", "vllm/v1/worker/gpu_model_runner.py", 1), "phase.capture"),
    (
        Frame("DefaultModelLoader.load_weights", "vllm/model_executor/model_loader/default_loader.py", 1),
        "phase.weights",
    ),
    (Frame("Queue.get", "queue.py", 171), "wait.queue"),
    (Frame("Thread.join", "threading.py", 1), "wait.lock"),
    (Frame("clock_nanosleep", "libc.so.6", 0, True), "wait.sleep"),
    (Frame("at::native::add_kernel", "libtorch_cpu.so", 0, True), "compute.native"),
]


@pytest.mark.parametrize(("frame", "entry"), KNOWN, ids=[f"{e}:{f.name}" for f, e in KNOWN])
def test_known_frames(frame: Frame, entry: str) -> None:
    found = load().match(frame)
    assert found is not None
    assert found.id == entry


@pytest.mark.parametrize(
    "frame",
    [
        Frame("all_reduce", "app/job/main.py", 3),
        Frame("all_reduce", "my_torch/distributed/distributed_c10d.py", 3),
        Frame("get", "app/cache.py", 3),
        Frame("wait", "app/threading.pyx", 3),
        Frame("xcudaLaunchKernel", "libx.so", 0, True),
    ],
)
def test_a_name_alone_is_not_enough(frame: Frame) -> None:
    assert load().match(frame) is None


def test_every_family_that_was_asked_for_is_there() -> None:
    families = {entry.family for entry in load().entries}
    assert {
        "torch.distributed",
        "nccl",
        "flashinfer",
        "vllm cpu shared memory",
        "vllm shm broadcast",
    } <= families
    assert {"cuinterpose", "cuda driver", "c10d store", "torch.compile", "graph capture"} <= families
    assert {"weight load", "sglang scheduler loop", "custom all-reduce", "vllm engine core"} <= families
    assert set(Kind) == {entry.kind for entry in load().entries}


def test_branches_exclude_each_other_in_pairs() -> None:
    arms: dict[str, list[str]] = {}
    for entry in load().entries:
        if entry.branches:
            assert entry.kind is Kind.ARM
            arms.setdefault(entry.branches, []).append(entry.id)
    assert arms
    assert all(len(ids) > 1 for ids in arms.values())


def test_bare_names() -> None:
    assert bare_name("A.f.<locals>.g") == "g"
    assert bare_name("f") == "f"


ENTRY = "version = 1\n[[frame]]\nid='a.b'\nfamily='x'\nkind='idle'\nfunctions=['f']\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_users_entries_come_first_and_replace_shipped_ones(tmp_path: Path) -> None:
    path = write(
        tmp_path / "frames.toml",
        'version = 1\n[[frame]]\nid = "acme.ring"\nfamily = "acme"\nkind = "collective"\n'
        'functions = ["ring_reduce"]\nfiles = ["acme/ring.py"]\n'
        '[[frame]]\nid = "wait.queue"\nfamily = "queue"\nkind = "idle"\n'
        'functions = ["get"]\nfiles = ["queue.py"]\n',
    )
    registry = load(path)
    ring = registry.match(Frame("ring_reduce", "acme/ring.py", 1))
    queue = registry.match(Frame("Queue.get", "queue.py", 1))
    assert ring is not None
    assert ring.kind is Kind.COLLECTIVE
    assert queue is not None
    assert queue.kind is Kind.IDLE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version = 2\n", "version 1"),
        ("version = 1\n[[frames]]\n", "frames"),
        ("version = 1\n[[frame]]\nid = 'a.b'\n", "family"),
        ("version = 1\n[[frame]]\nid='A'\nfamily='x'\nkind='idle'\nfunctions=['f']\n", "id"),
        ("version = 1\n[[frame]]\nid='a.b'\nfamily='x'\nkind='sleepy'\nfunctions=['f']\n", "kind"),
        ("version = 1\n[[frame]]\nid='a.b'\nfamily='x'\nkind='idle'\n", "matches no frame"),
        ("version = 1\n[[frame]]\nid='a.b'\nfamily='x'\nkind='idle'\nfunctions=['*']\n", "every frame"),
        (f"{ENTRY}speed=3\n", "speed"),
        (ENTRY + ENTRY.removeprefix("version = 1\n"), "twice"),
        ("version = ", "no valid TOML"),
        ("", "version is missing"),
        ("version = true\n", "version is True"),
        ("version = 1.0\n", "version is 1.0"),
        ("version = 1\nframe = 5\n", "frame is no list"),
        ("version = 1\nframe = {id = 'a.b'}\n", "frame is no list"),
        ("version = 1\nframe = [5]\n", "frame 1"),
    ],
)
def test_malformed_file_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path / "frames.toml", text)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_file_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "frames.toml"
    path.write_bytes(b"version = 1\n# \xff\xfe\n")
    with pytest.raises(UsageError, match=r"frames\.toml cannot be read: .*utf-8"):
        load(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        load(tmp_path / "none.toml")
