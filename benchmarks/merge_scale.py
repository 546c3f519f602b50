"""Merge and verdict of synthetic traces of 8 to 4096 ranks with planted divergence: time, memory, errors."""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.hang.model import Frame
from nvsnap_conformance.hang.verdict import VerdictKind, judge
from tests.planted import synthetic as make

if TYPE_CHECKING:
    from nvsnap_conformance.hang.model import Bundle

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ROUNDS = 5
BOUND_SECONDS = 5.0
BOUND_EXPONENT = 1.3
"""Growth with ranks: seconds ~ ranks ** exponent over the upper half of the sizes."""

PLANTED = ("diverged", "missing", "straggler", "none")


def trace(ranks: int, planted: str, seed: int) -> tuple[Bundle, VerdictKind, tuple[int, ...]]:
    """Make a trace of ``ranks`` ranks with something planted; also return what the verdict has to be.

    Stacks are as deep as an engine's; with ``none`` every rank moves through its own layers.
    """
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    few = sorted(chance.sample(range(ranks), max(1, min(ranks // 4, 1 + chance.randrange(3)))))
    deep = (
        *make.WORK,
        *(Frame(f"Layer{i}.forward", "vllm/model_executor/layers/linear.py", i) for i in range(20)),
    )
    wait = make.collective("all_reduce", deep)
    stacks: dict[int, list[make.Stack | None]] = {rank: [wait] * ROUNDS for rank in range(ranks)}
    if planted == "diverged":
        for rank in range(ranks):
            stacks[rank] = [make.arm("trtllm" if rank in few else "mnnvl")] * ROUNDS
        return make.bundle(stacks), VerdictKind.DIVERGED_BRANCH, tuple(few)
    if planted == "missing":
        for rank in few:
            stacks[rank] = [make.at("handler", 10 + rank % 7, deep)] * ROUNDS
        return make.bundle(stacks), VerdictKind.MISSING_ARRIVAL, tuple(few)
    moving = few if planted == "straggler" else range(ranks)
    for rank in moving:
        lines = chance.sample(range(1000), ROUNDS)
        stacks[rank] = [make.at(f"step{line % 9}", line, deep) for line in lines]
    kind = VerdictKind.STRAGGLER if planted == "straggler" else VerdictKind.PROGRESSING
    return make.bundle(stacks), kind, tuple(few) if planted == "straggler" else ()


def measure(ranks: int, repeats: int) -> dict[str, Any]:
    """Judge planted traces of one size: worst time, peak memory of this process, errors.

    ``seconds`` is CPU time, which a crowded machine does not stretch; ``wall_seconds`` is what passed.
    """
    seconds, wall, missed, false, planted = 0.0, 0.0, 0, 0, 0
    for seed in range(repeats):
        for what in PLANTED:
            bundle, kind, missing = trace(ranks, what, seed)
            began, began_wall = time.process_time(), time.perf_counter()
            verdict = judge(bundle)
            seconds = max(seconds, time.process_time() - began)
            wall = max(wall, time.perf_counter() - began_wall)
            right = (verdict.kind, verdict.missing) == (kind, missing)
            hang = what in ("diverged", "missing")
            planted += hang
            missed += hang and not right
            false += not hang and (verdict.is_hang or not right)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "ranks": ranks, "rounds": ROUNDS, "seconds": round(seconds, 4), "wall_seconds": round(wall, 4),
        "peak_mib": round(peak, 1),
        "planted": planted, "missed": missed, "healthy": len(PLANTED) * repeats - planted, "false": false,
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--repeats", type=int, default=3, help="traces of each kind and size")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure every size in a process of its own, so that its peak memory is its own."""
    if asked.only:
        return {"sizes": [measure(asked.only, asked.repeats)], "holds": True}
    sizes = []
    for ranks in SIZES:
        one = _apart(ranks, asked.repeats)
        sizes.append(one)
        print(
            f"{ranks:5} ranks x {ROUNDS} rounds: {one['seconds']:.3f} s, {one['peak_mib']:.0f} MiB, "
            f"{one['missed']} of {one['planted']} missed, {one['false']} of {one['healthy']} false",
            flush=True,
        )
    first, last = next(s for s in sizes if s["ranks"] >= 256), sizes[-1]
    exponent = math.log(last["seconds"] / first["seconds"]) / math.log(last["ranks"] / first["ranks"])
    total = {name: sum(s[name] for s in sizes) for name in ("planted", "missed", "healthy", "false")}
    found = total["planted"] - total["missed"]
    clean = not total["missed"] and not total["false"]
    return {
        "sizes": sizes,
        "exponent": round(exponent, 3),
        **total,
        "precision": found / (found + total["false"]) if found else 0.0,
        "recall": found / total["planted"],
        "holds": last["seconds"] < BOUND_SECONDS and exponent < BOUND_EXPONENT and clean,
    }


def _apart(ranks: int, repeats: int) -> dict[str, Any]:
    arguments = ["--json", "--only", str(ranks), "--repeats", str(repeats)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "merge_scale", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    one: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["sizes"][0]
    return one
