"""What loader, hooks and observer cost an engine that serves: throughput with and without, paired."""

from __future__ import annotations

import random
import signal
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.paired import mean_ratio, throughput
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.engines.protocol import LaunchConfig
from nvsnap_conformance.engines.vllm import VllmEngine, VllmHandle
from nvsnap_conformance.gpus import VISIBLE, lease
from nvsnap_conformance.hooks.injection import Injection
from nvsnap_conformance.lifecycle import graphs
from nvsnap_conformance.lifecycle.driver import LifecycleDriver, Variant
from nvsnap_conformance.models import ensure_model
from nvsnap_conformance.targets.model import load_target

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from nvsnap_conformance.targets.model import Target

BOUND = 0.95
"""The interval of the ratio must lie above this: five percent of the throughput are not lost."""

START_SECONDS = 300.0
CYCLE_SECONDS = 240.0


class BareEngine(VllmEngine):
    """The same engine without a loader: nothing of the suite is in its processes."""

    def launch(self, config: LaunchConfig) -> VllmHandle:
        """Start it without the arguments by which the loader gets in."""
        argv, env = self.launch_plan(config)
        for word in Injection().arguments():
            argv.remove(word)
        port = int(argv[argv.index("--port") + 1])
        process = EngineProcess.launch(argv, env=env, workdir=config.workdir, isolate=config.isolate)
        return VllmHandle(config, process, port)


@contextmanager
def launched(engine: VllmEngine, config: LaunchConfig) -> Iterator[VllmHandle]:
    """Bring an engine up; it ends with the block."""
    config.workdir.mkdir()
    handle = engine.launch(config)
    with handle.process:
        handle.ready(Deadline.after(START_SECONDS))
        yield handle


@contextmanager
def alone(handle: VllmHandle, other: VllmHandle) -> Iterator[None]:
    """Stop ``other`` for a block: an idle engine takes time from one that computes beside it."""
    stopped = other.process.tree()
    for process in stopped:
        process.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            process.send(signal.SIGCONT)
        handle.health(Deadline.after(60.0))


def cycle(handle: VllmHandle, target: Target, folder: Path) -> None:
    """Take the engine through prepare and restore, graphs included; raise where that fails."""
    hooks = target.hooks.spec()
    deadline = Deadline.after(CYCLE_SECONDS)
    record = LifecycleDriver(handle, hooks, None, folder).run(Variant.HOOKS_ONLY, deadline)
    if record.failure is not None:
        raise RuntimeError(f"{record.failure.verb}: {record.failure.message}")
    graphs.capture_all(handle, hooks, deadline=deadline)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--pairs", type=int, default=20, help="pairs of windows in each state of the hooks")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--target", default="vllm-cpu", help="whose engine, and whose hooks")
    parser.add_argument("--seed", type=int, default=1)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Compare an engine without a loader with one that has it, before and after its hooks were used."""
    chance = random.Random(asked.seed)  # noqa: S311 - repeatable, not secret
    target = load_target(asked.target)
    states: dict[str, Any] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bare, injected = (
            stack.enter_context(launched(engine, config))
            for engine, config in zip(
                (BareEngine(), VllmEngine()), _configs(asked, target, scratch, stack), strict=True
            )
        )
        for state in ("injected", "used"):
            if state == "used":
                with alone(injected, bare):
                    cycle(injected, target, scratch / "cycle")
            states[state] = _compare(asked, bare, injected, chance, state)
    return {
        "target": asked.target,
        "tensor_parallel": asked.tp,
        "pairs": asked.pairs,
        "bound": BOUND,
        **states,
        "holds": all(entry["interval"][0] > BOUND for entry in states.values()),
    }


def _configs(
    asked: argparse.Namespace, target: Target, scratch: Path, stack: ExitStack
) -> list[LaunchConfig]:
    environment = EngineEnvironment.for_target(target, on_progress=print)
    env = dict(target.engine.env)
    if target.engine.processor == "cuda":
        held = lease(asked.tp, Deadline.after(START_SECONDS))
        stack.callback(held.release)
        env[VISIBLE] = held.setting
    return [
        LaunchConfig(
            python=environment.python,
            model=ensure_model(target.engine.model),
            tensor_parallel=asked.tp,
            workdir=scratch / name,
            args=target.engine.args,
            env=env,
            import_paths=environment.import_paths,
            processor=target.engine.processor,
        )
        for name in ("bare", "injected")
    ]


def _compare(
    asked: argparse.Namespace, bare: VllmHandle, injected: VllmHandle, chance: random.Random, state: str
) -> dict[str, Any]:
    """Measure pairs of windows in random order, the first pair for warming up."""
    engines = {"bare": (bare, injected), "injected": (injected, bare)}
    ratios = []
    for number in range(asked.pairs + 1):
        tokens = {}
        for name in chance.sample([*engines], 2):
            with alone(*engines[name]):
                tokens[name] = throughput(engines[name][0], asked.seconds)
        if number:
            ratios.append(tokens["injected"] / tokens["bare"])
            print(
                f"{number:3} {tokens['bare']:8.1f} tokens/s bare, {tokens['injected']:8.1f} {state}",
                flush=True,
            )
    ratio, (low, high) = mean_ratio(ratios, chance)
    return {"ratio": round(ratio, 4), "interval": [round(low, 4), round(high, 4)]}
