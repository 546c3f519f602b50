"""An engine and a driver that are none, for the experiment's own tests and for a rehearsal without a GPU.

Their physics is what was measured on two H200 (driver 580.159.04, vLLM 0.31.0, TP=2; docs/evidence): with a
live FlashInfer workspace or NCCL over peer-to-peer the checkpoint succeeds and the restore answers
NOT_SUPPORTED, with a mapping of a peer's memory by CUDA IPC INVALID_VALUE, and the processes are lost;
destroying NCCL under a captured graph that holds its collective never returns; graphs that hold a custom
all-reduce which was closed and made again read addresses that are no longer theirs, which ends the engine.
"""

# ruff: noqa: ARG002 - the interfaces are the suite's, and a stand-in waits for nothing

from __future__ import annotations

import hashlib
import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from nvsnap_conformance.checkpoint.device_failure import DeviceFailure, Fate
from nvsnap_conformance.checkpoint.protocol import CheckpointResult
from nvsnap_conformance.engines.protocol import (
    Completion,
    Health,
    LaunchConfig,
    Rank,
    RankReply,
    RequestFailed,
)
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.experiments.record import (
    Conditions,
    CustomAllReduce,
    FlashInferWorkspace,
    Nccl,
    PinnedCopy,
)
from nvsnap_conformance.hooks.injection import INJECT
from nvsnap_conformance.lifecycle.observe import Diagnosis
from nvsnap_conformance.outcomes import Outcome, Signature
from nvsnap_conformance.processes import ProcessId
from nvsnap_conformance.targets.model import HooksSection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import HooksSpec
    from nvsnap_conformance.experiments.apparatus import Say
    from nvsnap_conformance.experiments.gpu_memory import GpuMemory
    from nvsnap_conformance.experiments.plan import Arm, Plan

MIB = 1 << 20
CONTEXT_BYTES = 877 * MIB
WORKSPACE_BYTES = 518 * MIB
"""What a rank holds by itself, and what the workspace adds (both measured)."""

NOT_SUPPORTED = ("CUDA_ERROR_NOT_SUPPORTED", 801)
INVALID_VALUE = ("CUDA_ERROR_INVALID_VALUE", 1)
ILLEGAL_STATE = ("CUDA_ERROR_ILLEGAL_STATE", 401)

ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered (cudaErrorIllegalAddress)"

_pids = itertools.count(4_300_000)
"""Above the largest pid that Linux gives (4194304), so that no stand-in is ever taken for a process."""


@dataclass
class RankState:
    """What one rank holds. ``graphs`` names the all-reduce in its captured graphs, ``None`` without any.

    ``addresses_hold`` turns false once the graphs compute with addresses that are no longer theirs.
    """

    process: ProcessId
    nccl: str
    ipc: str
    workspace: str
    graphs: str | None
    addresses_hold: bool = True
    driver: str = "RUNNING"
    alive: bool = True
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """GPU memory in bytes."""
        if not self.alive or self.driver == "CHECKPOINTED":
            return 0
        return CONTEXT_BYTES + (WORKSPACE_BYTES if self.workspace == "live" else 0)


class StandInProcess:
    """Stands for the engine's process tree."""

    clock_offset = 0.0

    def __init__(self, ranks: list[RankState]) -> None:
        self._ranks = ranks
        self.closed = False
        self.log = ""

    def log_position(self) -> int:
        """Return how much was logged."""
        return len(self.log)

    def log_since(self, position: int) -> str:
        """Return what was logged since."""
        return self.log[position:]

    def tree(self) -> list[ProcessId]:
        """Return the living ranks."""
        return [rank.process for rank in self._ranks if rank.alive]

    def namespace_pid(self, process: ProcessId) -> int:
        """Return the pid as the engine sees it."""
        return process.pid

    def close(self) -> None:
        """End all ranks."""
        self.closed = True
        for rank in self._ranks:
            rank.alive = False


class StandInEngine:
    """An engine of ranks that hold what an arm's launch gives them, behind the suite's own interface."""

    version = "0.31.0"

    def __init__(self, config: LaunchConfig, arm: Arm) -> None:
        self.config = config
        self.state = [self._rank(arm) for _ in range(config.tensor_parallel)]
        self.process: Any = StandInProcess(self.state)
        self._before: list[RankState] = []
        self._paused = False
        self._severed = arm.nccl is Nccl.SEVERED
        self._custom = arm.custom_all_reduce is not CustomAllReduce.OFF

    @staticmethod
    def _rank(arm: Arm) -> RankState:
        workspace = "absent" if arm.flashinfer_workspace is FlashInferWorkspace.OFF else "live"
        ipc = "absent" if arm.custom_all_reduce is CustomAllReduce.OFF else "open"
        # The order in which vLLM's communicator looks for an all-reduce.
        used = "flashinfer" if workspace == "live" else "custom" if ipc == "open" else "nccl"
        return RankState(
            ProcessId(next(_pids), time.time()),
            "sockets" if arm.nccl is Nccl.SEVERED else "p2p",
            ipc,
            workspace,
            None if arm.cuda_graphs == "none" else used,
        )

    # What the suite asks of an engine ---------------------------------------------------------------

    def ready(self, deadline: Deadline) -> None:
        """Be ready."""

    def ranks(self, deadline: Deadline) -> list[Rank]:
        """Return the ranks; raise where one is gone."""
        self._require_all("the ranks")
        return [Rank(number, rank.process, None, "stand-in") for number, rank in enumerate(self.state)]

    def health(self, deadline: Deadline) -> Health:
        """Serve as long as all ranks live."""
        return Health.SERVING if all(rank.alive for rank in self.state) else Health.UNHEALTHY

    def generate(self, prompts: Sequence[str], *, max_tokens: int, deadline: Deadline) -> list[Completion]:
        """Answer each prompt with tokens that follow from it; a rank that replays stale graphs is lost."""
        for rank in self.state:
            if not rank.addresses_hold:
                self.process.log += f"{ILLEGAL_ADDRESS}\n"
                rank.alive = False
        self._require_all("a completion")
        return [self._complete(prompt, max_tokens) for prompt in prompts]

    def submit(self, prompt: str, *, max_tokens: int, deadline: Deadline) -> Future[Completion]:
        """Answer at once."""
        future: Future[Completion] = Future()
        future.set_result(self.generate([prompt], max_tokens=max_tokens, deadline=deadline)[0])
        return future

    def rpc(self, method: str, *, hooks: HooksSpec, deadline: Deadline, **arguments: Any) -> list[RankReply]:
        """Answer for every rank, as the loader does."""
        self._require_all(f"{method} on every rank")
        return [
            self._reply(number, rank, method, hooks.options, arguments)
            for number, rank in enumerate(self.state)
        ]

    def raw_rpc(self, method: str, *, deadline: Deadline, args: Sequence[Any] = ()) -> list[Any]:
        """Have no methods of its own."""
        raise RequestFailed(f"a stand-in has no {method}", status=None)

    def quiesce(self, deadline: Deadline) -> None:
        """Pause."""
        self._paused = True

    def sleep(self, level: int, deadline: Deadline) -> None:
        """Have no sleep mode: no arm asks for it."""
        raise RequestFailed(f"a stand-in has no sleep of level {level}", status=None)

    def wake(self, deadline: Deadline, *, reload: bool) -> None:
        """Have no sleep mode."""
        raise RequestFailed("a stand-in has no sleep mode", status=None)

    def resume(self, deadline: Deadline) -> None:
        """Go on."""
        self._require_all("resume")
        self._paused = False

    def paused(self, deadline: Deadline) -> bool:
        """Whether it is paused."""
        return self._paused

    def waiting_requests(self, deadline: Deadline) -> int:
        """Have none."""
        return 0

    def communication_environment(self) -> dict[str, str]:
        """Return what the launch has set."""
        severed = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"} if self._severed else {}
        custom = "1" if self._custom else "0"
        return {"backend": "nccl", "NCCL_NVLS_ENABLE": "0", "custom_all_reduce": custom, **severed}

    def stop(self, deadline: Deadline) -> None:
        """End."""
        self.process.close()

    # The hooks, the observer, and the marks of provenance ---------------------------------------------

    def _reply(
        self, number: int, rank: RankState, method: str, options: Mapping[str, Any], given: Mapping[str, Any]
    ) -> RankReply:
        nonce = "stand-in"
        error: dict[str, str] | None = None
        value: Any = None
        try:
            value = self._call(rank, method, options, given)
        except _HookError as refused:
            error = {"type": type(refused).__name__, "message": str(refused), "traceback": ""}
        return RankReply(number, nonce, nonce, value=value, error=error, raw={})

    def _call(
        self, rank: RankState, method: str, options: Mapping[str, Any], given: Mapping[str, Any]
    ) -> Any:
        if method == "snapshot":
            return {"resources": self.inventory(rank)}
        if method == "plant":
            rank.memory["nonce"] = given["nonce"]
            return {"nonce": given["nonce"]}
        if method == "recall":
            return {"nonce": rank.memory.get("nonce")}
        if method == "weights_checksum":
            return {"sha256": "0" * 64, "hashed_elements": 1}
        if method == "prepare":
            return self.prepare(rank, options["teardown"])
        if method == "restore":
            return self.rebuild(rank, options["teardown"])
        if method == "recapture":
            return self.recapture(rank)
        raise _HookError(f"a stand-in has no {method}")

    def inventory(self, rank: RankState) -> dict[str, dict[str, Any]]:
        """Return what the observer sees."""
        held = {
            "tp:0/nccl-communicator": ("nccl-communicator", rank.nccl in ("p2p", "sockets", "suspended")),
            "tp:0/custom-allreduce": ("custom-allreduce", rank.ipc == "open"),
            "flashinfer/normal": ("flashinfer-workspace", rank.workspace == "live"),
            "cuda-graphs": ("cuda-graphs", rank.graphs is not None),
        }
        return {name: {"kind": kind, "live": True} for name, (kind, live) in held.items() if live}

    def prepare(self, rank: RankState, teardown: Mapping[str, str]) -> dict[str, Any]:
        """Take down what the option names."""
        if teardown["nccl"] == "suspended":
            raise BadOption("ncclCommSuspend needs NCCL 2.29.7, this is 2.28.9")
        rank.memory["was"] = (rank.nccl, rank.ipc, rank.workspace, rank.graphs)
        if teardown["cuda-graphs"] == "dropped":
            rank.graphs = None
        if teardown["flashinfer-workspace"] == "freed" and rank.workspace == "live":
            rank.workspace = "freed"
        if rank.ipc == "open" and teardown["custom-allreduce"] != "live":
            rank.ipc = "closed" if teardown["custom-allreduce"] == "closed" else "peers-mapped"
        if teardown["nccl"] == "destroyed":
            if rank.graphs == "nccl":
                raise DeadlineExceeded("prepare: ncclCommDestroy waits for a captured graph")
            rank.nccl = "destroyed"
        return {"state": "prepared", "problem": None, "resources": []}

    def rebuild(self, rank: RankState, teardown: Mapping[str, str]) -> dict[str, Any]:
        """Bring back what was taken down."""
        if rank.graphs == "custom" and rank.ipc == "closed":
            rank.addresses_hold = False
        rank.nccl, rank.ipc, rank.workspace, graphs = rank.memory["was"]
        rank.graphs = graphs if teardown["cuda-graphs"] == "kept" else None
        return {"state": "serving", "problem": None, "resources": []}

    def recapture(self, rank: RankState) -> dict[str, Any]:
        """Capture the graphs that were dropped."""
        rank.graphs = rank.memory["was"][3]
        graphs = {"state": "captured", "wanted": 3, "captured": 3, "problem": None}
        return {"state": "serving", "problem": None, "graphs": graphs}

    def _complete(self, prompt: str, number: int) -> Completion:
        words = (hashlib.sha256(prompt.encode() + bytes([index])).digest() for index in range(number))
        tokens = tuple(int.from_bytes(word[:2], "big") % 1000 for word in words)
        return Completion(prompt, tokens, tuple(-0.5 for _ in tokens), " ".join(map(str, tokens)))

    def _require_all(self, what: str) -> None:
        dead = [number for number, rank in enumerate(self.state) if not rank.alive]
        if dead:
            raise RequestFailed(f"{what}: ranks {dead} are gone", status=None)


class _HookError(Exception):
    """A hook's error, which the loader would turn into a value."""


class BadOption(_HookError):  # noqa: N818 - the hooks' own name
    """The hooks refuse what they are asked for."""


class StandInCheckpointer:
    """A driver's checkpoint, with the answers that were measured."""

    name = "stand-in"

    def __init__(self, ranks: Mapping[int, RankState]) -> None:
        """``ranks`` are those of all engines, by pid."""
        self._ranks = ranks
        self._calls: list[dict[str, Any]] = []

    def answer(self, verb: str, rank: RankState) -> tuple[str, int]:
        """Return the driver's answer to ``verb`` for one rank, by name and number."""
        if verb == "restore" and rank.ipc in ("open", "peers-mapped"):
            return INVALID_VALUE
        if verb == "restore" and (rank.workspace == "live" or rank.nccl in ("p2p", "suspended")):
            return NOT_SUPPORTED
        return ("CUDA_SUCCESS", 0)

    def lock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Lock."""
        self._calls = []
        return self._verb("lock", pids, "LOCKED")

    def checkpoint(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Checkpoint."""
        return self._verb("checkpoint", pids, "CHECKPOINTED")

    def restore(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Restore."""
        return self._verb("restore", pids, "LOCKED")

    def unlock(self, pids: list[int], deadline: Deadline) -> CheckpointResult:
        """Unlock."""
        return self._verb("unlock", pids, "RUNNING")

    def abandon(self) -> Fate | None:
        """Have nothing to roll back: a failed verb has seen to that."""
        return None

    def _verb(self, verb: str, pids: list[int], after: str) -> CheckpointResult:
        began = time.monotonic()
        calls: list[dict[str, Any]] = []
        for pid in pids:
            rank = self._ranks[pid]
            result, code = self.answer(verb, rank)
            if code == 0:
                rank.driver = after
            calls.append({
                "pid": pid, "verb": verb, "result": result, "code": code, "state": rank.driver,
                "began": began, "ended": time.monotonic(),
            })  # fmt: skip
        self._calls += calls
        bad = [call for call in calls if call["code"]]
        if bad:
            lost = verb in ("restore", "unlock")
            for pid in pids:
                self._ranks[pid].alive = not lost
                self._ranks[pid].driver = "RUNNING"
            texts = "; ".join(f"process {call['pid']}: {verb} answered {call['result']}" for call in bad)
            raise DeviceFailure(
                f"{verb} failed on {texts}",
                signature=f"CUDA:{bad[0]['code']}@{verb}",
                fate=Fate.KILLED if lost else Fate.RUNNING,
                calls=self._calls,
            )
        return CheckpointResult(verb, time.monotonic() - began, (), {"calls": calls})


class StandInMemory:
    """GPU memory of the stand-ins' ranks; what is left over of an engine stays on its device."""

    source = "stand-in"

    def __init__(self, ranks: Mapping[int, RankState]) -> None:
        self._ranks = ranks

    def of_ranks(self, pids: Sequence[int]) -> list[int | None]:
        """Return what each rank holds."""
        return [self._ranks[pid].bytes for pid in pids]

    def of_devices(self) -> dict[str, int] | None:
        """Return the sum, as one device's."""
        return {"stand-in": sum(rank.bytes for rank in list(self._ranks.values()))}


class StandInApparatus:
    """The apparatus of a rehearsal. ``engine`` and ``driver`` may be variants of the stand-ins, for tests."""

    def __init__(
        self,
        tensor_parallel: int = 2,
        *,
        engine: type[StandInEngine] = StandInEngine,
        driver: type[StandInCheckpointer] = StandInCheckpointer,
    ) -> None:
        self._size = tensor_parallel
        self._engine = engine
        self._driver = driver
        self._ranks: dict[int, RankState] = {}
        self.engines: list[StandInEngine] = []
        self.hooks: HooksSpec = HooksSection().spec()
        self.memory: GpuMemory = StandInMemory(self._ranks)
        self.conditions = Conditions(
            target="stand-in",
            engine=f"stand-in of vllm {engine.version}",
            driver="stand-in of 580.159.04",
            gpus=["stand-in"] * tensor_parallel,
            tensor_parallel=tensor_parallel,
            checkpointer=driver.name,
            stand_in=True,
        )

    def __enter__(self) -> Self:
        """Take nothing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give nothing back."""

    def start(self, plan: Plan, arm: Arm, workdir: Path, say: Say) -> StandInEngine:
        """Return an engine at once."""
        args, env = plan.launch(arm, (), {})
        config = LaunchConfig(
            python=INJECT, model=INJECT, tensor_parallel=self._size, workdir=workdir, args=args, env=env
        )
        engine = self._engine(config, arm)
        self.engines.append(engine)
        self._ranks |= {rank.process.pid: rank for rank in engine.state}
        return engine

    def pinned_copy(self, workdir: Path) -> PinnedCopy:
        """Return what was measured on an H200: 55.2 GB/s to the host, 55.1 GB/s back."""
        return PinnedCopy(d2h=55.2e9, h2d=55.1e9)

    def checkpointer(self) -> StandInCheckpointer:
        """Return a driver for one arm."""
        return self._driver(self._ranks)

    def diagnose(self, engine: Any, ranks: list[Rank], folder: Path, reason: str) -> Diagnosis:
        """Say that all ranks have settled in one place: a stand-in that does not answer is stuck."""
        return Diagnosis(
            Signature("HANG", "ALL_TOGETHER"),
            Outcome.HANG,
            f"{reason}: all ranks are at ncclCommDestroy",
            None,
        )
