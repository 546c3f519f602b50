"""Bundles made of nothing: any number of ranks, any stacks, for laws and for scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nvsnap_conformance.hang.model import Bundle, Frame, Member, Reading, Role, Round, Rung, Sample, Thread

Stack = tuple[Frame, ...]

WORKER = (
    Frame("<module>", "<string>", 1),
    Frame("spawn_main", "multiprocessing/spawn.py", 122),
    Frame("WorkerProc.worker_main", "vllm/v1/executor/multiproc_executor.py", 944),
    Frame("WorkerProc.worker_busy_loop", "vllm/v1/executor/multiproc_executor.py", 1041),
)
WORK = (
    *WORKER,
    Frame("WorkerProc._execute_worker_rpc", "vllm/v1/executor/multiproc_executor.py", 1055),
    Frame("GPUModelRunner.execute_model", "vllm/v1/worker/gpu_model_runner.py", 3000),
    Frame("LlamaModel.forward", "vllm/model_executor/models/llama.py", 400),
)
IDLE = (
    *WORKER,
    Frame("MessageQueue.dequeue", "vllm/distributed/device_communicators/shm_broadcast.py", 971),
    Frame("MessageQueue.acquire_read", "vllm/distributed/device_communicators/shm_broadcast.py", 864),
    Frame("SpinCondition.wait", "vllm/distributed/device_communicators/shm_broadcast.py", 210),
)
C10D = "torch/distributed/distributed_c10d.py"
CORE_IDLE = (
    Frame("EngineCoreProc.run_busy_loop", "vllm/v1/engine/core.py", 1551),
    Frame("EngineCoreProc._process_input_queue", "vllm/v1/engine/core.py", 1588),
    Frame("Queue.get", "queue.py", 171),
    Frame("Condition.wait", "threading.py", 327),
)
CORE_WAITS = (
    Frame("EngineCoreProc.run_busy_loop", "vllm/v1/engine/core.py", 1555),
    Frame("EngineCore.step", "vllm/v1/engine/core.py", 670),
    Frame("FutureWrapper.result", "vllm/v1/executor/multiproc_executor.py", 98),
    Frame("FutureWrapper._wait_for_response", "vllm/v1/executor/multiproc_executor.py", 103),
    Frame(
        "MultiprocExecutor.collective_rpc.<locals>.get_response",
        "vllm/v1/executor/multiproc_executor.py",
        440,
    ),
    Frame("MessageQueue.dequeue", "vllm/distributed/device_communicators/shm_broadcast.py", 971),
    Frame("MessageQueue.acquire_read", "vllm/distributed/device_communicators/shm_broadcast.py", 864),
)


def collective(name: str, base: Stack = WORK, line: int = 3252) -> Stack:
    """A wait in a collective of torch.distributed, called from ``base``."""
    return (*base, Frame("wrapper", "torch/distributed/c10d_logger.py", 83), Frame(name, C10D, line))


def at(
    function: str, line: int = 10, base: Stack = WORK, file: str = "vllm/model_executor/layers/linear.py"
) -> Stack:
    """Code that the registry does not know."""
    return (*base, Frame(function, file, line))


def arm(which: str) -> Stack:
    """The workspace creation of FlashInfer through one of its two arms, down to a gathering."""
    line = {"mnnvl": 226, "trtllm": 233}[which]
    inner = {
        "mnnvl": (
            Frame("MNNVLAllReduceFusionWorkspace.__init__", "flashinfer/comm/trtllm_mnnvl_ar.py", 160),
            Frame("SymmDeviceMemory._setup_multicast", "flashinfer/comm/mnnvl.py", 1130),
        ),
        "trtllm": (
            Frame("trtllm_create_ipc_workspace_for_all_reduce_fusion", "flashinfer/comm/trtllm_ar.py", 560),
        ),
    }[which]
    base = (
        *WORK,
        Frame("get_fi_ar_workspace", "vllm/distributed/device_communicators/flashinfer_all_reduce.py", line),
        Frame("create_allreduce_fusion_workspace", "flashinfer/comm/allreduce.py", 600),
        *inner,
    )
    return collective("all_gather_object", base)


def member(rank: int, *, world: int | None = None, groups: Mapping[str, int] | None = None) -> Member:
    """A rank as the adapter names it."""
    return Member(
        1000 + rank,
        1.0,
        Role.RANK,
        rank,
        "synthetic",
        f"Worker_TP{rank}",
        1000 + rank,
        None,
        dict(groups or {}),
    )


def front(title: str = "VLLM::EngineCore", pid: int = 500) -> Member:
    """The engine core."""
    return Member(pid, 1.0, Role.CORE, title=title, namespace_pid=pid)


def sample(
    pid: int,
    index: int,
    stack: Stack | None,
    *,
    rung: Rung = Rung.BLOCKING,
    cpu: float = 0.0,
    faults: float = 0.0,
    switches: float = 0.0,
    state: str = "S",
    wchan: str = "",
    queued: float | None = None,
    tree_cpu: float | None = None,
    tree_runnable: int = 0,
    extra: Sequence[Thread] = (),
) -> Sample:
    """One sample; rates are per second, rounds one second apart."""
    if rung is Rung.GONE:
        return Sample(pid, float(index), rung, problems=("the process is gone",))
    reading = Reading(
        state,
        wchan=wchan,
        cpu_seconds=cpu * index,
        tree_cpu_seconds=(tree_cpu if tree_cpu is not None else cpu) * index,
        switches=int(switches * index),
        faults=int(faults * index),
        read_bytes=0,
        queued_seconds=-1.0 if queued is None else queued * index,
        tree_runnable=tree_runnable,
    )
    threads = () if stack is None else (Thread(pid, "MainThread", stack, main=True), *extra)
    return Sample(pid, float(index), rung if stack is not None else Rung.PROC, reading, threads)


def bundle(
    stacks: Mapping[int, Sequence[Stack | None]],
    *,
    fronts: Sequence[tuple[Member, Sequence[Stack | None]]] = (),
    world: int | None = None,
    groups: Mapping[int, Mapping[str, int]] | None = None,
    evidence: Mapping[str, object] | None = None,
    **rates: object,
) -> Bundle:
    """A bundle of ranks with one stack per round each; ``rates`` go to every rank's samples.

    A rate may be a mapping of rank to value.
    """
    members = [member(rank, groups=(groups or {}).get(rank)) for rank in stacks]
    rounds = max((len(s) for s in [*stacks.values(), *(mine for _, mine in fronts)]), default=0)

    def of(rank: int) -> dict[str, object]:
        found = {}
        for name, value in rates.items():
            if isinstance(value, Mapping):
                if rank in value:
                    found[name] = value[rank]
            else:
                found[name] = value
        return found

    taken = []
    for index in range(rounds):
        samples = [
            sample(1000 + rank, index, mine[index], **of(rank))  # type: ignore[arg-type]
            for rank, mine in stacks.items()
            if index < len(mine)
        ]
        samples += [sample(one.pid, index, mine[index]) for one, mine in fronts if index < len(mine)]
        taken.append(Round(index, False, tuple(samples)))
    return Bundle(
        "test",
        "2026-01-01T00:00:00.000+00:00",
        "synthetic",
        world,
        (*members, *(one for one, _ in fronts)),
        tuple(taken),
        evidence=dict(evidence or {}),
    )
