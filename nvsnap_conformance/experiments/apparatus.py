"""What an experiment is run with: a target's engines, its device checkpointer, and a view of GPU memory."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from nvsnap_conformance.checkpoint.command import CommandDevice
from nvsnap_conformance.checkpoint.cuda_driver import CudaDriverCheckpointer
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.engines.golden import bring_up
from nvsnap_conformance.engines.protocol import LaunchConfig
from nvsnap_conformance.errors import EnvironmentFailure, TargetError
from nvsnap_conformance.experiments.bandwidth import measure
from nvsnap_conformance.experiments.gpu_memory import GpuMemory, NvmlMemory
from nvsnap_conformance.experiments.record import Conditions
from nvsnap_conformance.gpus import VISIBLE, Lease, lease, load_pynvml, visible
from nvsnap_conformance.models import ensure_model
from nvsnap_conformance.session.diagnosis import diagnose_ranks
from nvsnap_conformance.session.pool import adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from nvsnap_conformance.checkpoint.protocol import DeviceCheckpointer
    from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, Rank
    from nvsnap_conformance.experiments.plan import Arm, Plan
    from nvsnap_conformance.experiments.record import PinnedCopy
    from nvsnap_conformance.lifecycle.observe import Diagnosis
    from nvsnap_conformance.targets.model import Target

    Say = Callable[[str], None]

START_SECONDS = 240.0
"""Allowance for an engine's cold start, in seconds. Measured on 2x H200: 43 to 48 s alone."""

LOOK_SECONDS = 60.0

ENGINE_LIBRARIES = ("torch", "flashinfer-python", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""The distributions of an engine's interpreter on which an outcome can depend."""

LEASE_SECONDS = 60.0
"""Allowance for other runs to give GPUs back, in seconds."""


class Apparatus(Protocol):
    """What the arms of one experiment have in common; a context in which the GPUs are this experiment's."""

    conditions: Conditions
    hooks: HooksSpec
    memory: GpuMemory

    def __enter__(self) -> Self:
        """Take what is needed; conditions and memory are there from here on."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""

    def start(self, plan: Plan, arm: Arm, workdir: Path, say: Say) -> EngineHandle:
        """Bring up an engine for ``arm`` and return it ready to serve.

        Raises ``EngineStartError`` and the like, and leaves nothing behind then.
        """

    def checkpointer(self) -> DeviceCheckpointer:
        """Return a device checkpointer for one arm."""

    def diagnose(self, engine: EngineHandle, ranks: list[Rank], folder: Path, reason: str) -> Diagnosis:
        """Look at an engine from outside."""

    def pinned_copy(self, workdir: Path) -> PinnedCopy:
        """Time copies between GPU and pinned memory; raise ``EnvironmentFailure`` where that fails."""


class TargetApparatus:
    """The apparatus of a target file, at one tensor-parallel size.

    ``at_once`` engines share the GPUs, which is what their leases are for: this holds one for all of them.
    """

    conditions: Conditions
    memory: GpuMemory

    def __init__(self, target: Target, tensor_parallel: int, *, at_once: int, say: Say) -> None:
        """Raise :class:`TargetError` for a target without a device checkpointer, or without this size."""
        if target.checkpoint.device == "none":
            raise TargetError(
                f"the target {target.name} has no device checkpointer",
                cause="the experiment is about what the driver's checkpoint of GPU state survives",
                next_step="name a target with [checkpoint] device, such as vllm-gpu, or try --rehearse",
            )
        target.require_tensor_parallel((tensor_parallel,))
        self.hooks = target.hooks.spec()
        self._target = target
        self._size = tensor_parallel
        self._at_once = at_once
        self._say = say
        self._lease: Lease | None = None

    def __enter__(self) -> Self:
        """Build what is missing of the engine's environment and take the GPUs.

        Raises :class:`TargetError` and :class:`EnvironmentFailure` as these do.
        """
        self._environment = EngineEnvironment.for_target(self._target, on_progress=self._say)
        self._model = ensure_model(self._target.engine.model, on_progress=self._say)
        self._lease = held = lease(self._size, Deadline.after(LEASE_SECONDS))
        # From here on the GPUs are held, and given back by __exit__ only if this ends well.
        try:
            self._look(held)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _look(self, held: Lease) -> None:
        """Learn under what conditions the arms will run."""
        nvml = load_pynvml()
        nvml.nvmlInit()  # counted by NVML, and ended with the process
        self.memory = NvmlMemory(nvml, [gpu.uuid for gpu in held.gpus], exclusive=self._at_once == 1)
        self.conditions = Conditions(
            target=self._target.name,
            engine=f"{self._environment.distribution} {self._environment.version}",
            driver=visible().driver or "unknown",
            gpus=[gpu.name for gpu in held.gpus],
            tensor_parallel=self._size,
            checkpointer=self._target.checkpoint.device,
            libraries=_own_libraries() | self._engine_libraries(),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the GPUs back, and say where their memory did not come back."""
        if self._lease is not None:
            for text in self._lease.release():
                self._say(f"GPU memory did not come back: {text}")
            self._lease = None

    def start(self, plan: Plan, arm: Arm, workdir: Path, say: Say) -> EngineHandle:
        """Start a fresh engine, cold: the target's, with what the arm decides in place."""
        engine = self._target.engine
        config = self._config(workdir, *plan.launch(arm, engine.args, engine.env))
        return bring_up(adapter(engine.adapter)(), config, cold=True, seconds=START_SECONDS, say=say).handle

    def _engine_libraries(self) -> dict[str, str]:
        """Return the versions of what the engine's ranks talk through, as its interpreter finds them."""
        config = self._config(Path.cwd(), self._target.engine.args, self._target.engine.env)
        _, env = adapter(self._target.engine.adapter)().launch_plan(config)
        command = [str(self._environment.python), "-c", _LOOK, *ENGINE_LIBRARIES]
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            raise EnvironmentFailure(
                f"the engine's interpreter does not say what it has: {type(error).__name__}: {error}",
                cause=str(getattr(error, "stderr", "") or "")[-500:],
                next_step="see whether it starts, with the target's environment",
            ) from error
        return found

    def _config(self, workdir: Path, args: tuple[str, ...], env: Mapping[str, str]) -> LaunchConfig:
        assert self._lease is not None  # within the context
        return LaunchConfig(
            python=self._environment.python,
            model=self._model,
            tensor_parallel=self._size,
            workdir=workdir,
            args=args,
            env={**env, VISIBLE: self._lease.setting},
            import_paths=self._environment.import_paths,
            inject=self._target.hooks.inject.value,
            processor=self._target.engine.processor,
        )

    def pinned_copy(self, workdir: Path) -> PinnedCopy:
        """Time the copies on the leased GPUs, in the engine's interpreter and environment."""
        engine = self._target.engine
        _, env = adapter(engine.adapter)().launch_plan(self._config(workdir, engine.args, engine.env))
        return measure(self._environment.python, env, workdir)

    def checkpointer(self) -> DeviceCheckpointer:
        """Return a new checkpointer: one holds the state of one cycle."""
        command = self._target.checkpoint.command
        if self._target.checkpoint.device == "command" and command is not None:
            return CommandDevice(command.verbs())
        return CudaDriverCheckpointer()

    def diagnose(self, engine: EngineHandle, ranks: list[Rank], folder: Path, reason: str) -> Diagnosis:
        """Take a stack bundle of all ranks and judge it."""
        return diagnose_ranks(engine, ranks, folder, reason)


_LOOK = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def _own_libraries() -> dict[str, str]:
    """Return the versions of what the suite itself drives the driver with."""
    found: dict[str, str] = {}
    for name in ("cuda-bindings", "nvidia-ml-py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
