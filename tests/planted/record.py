"""Record a bundle of every repro's shape: ``python -m tests.planted.record FOLDER [--python INTERPRETER]``.

The recorded bundles under tests/data/bundles were made so. Beside each lies ``expected.json``: the verdict
of the live run, which every later version of the judge must give again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.hang.ranks.client import RankServer, RankSet
from nvsnap_conformance.hang.repro import look
from nvsnap_conformance.hang.verdict import VerdictKind
from tests.planted.conftest import REPROS, REQUIREMENT

if TYPE_CHECKING:
    from collections.abc import Callable

SPIN = (
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.platforms:current_platform.import_kernels",
)
FALLBACK = ("vllm.distributed.device_communicators.flashinfer_all_reduce",)


@dataclass(frozen=True)
class Shape:
    """One repro with its fault planted, and what the verdict has to be."""

    name: str
    kind: VerdictKind
    missing: tuple[int, ...]
    options: dict[str, Any]
    paths: tuple[Path, ...] = ()
    preload: tuple[str, ...] = ()
    ready: Callable[[RankSet], object] = field(
        default=lambda ranks: ranks.wait_told("entered", Deadline.after(60))
    )


SHAPES = (
    Shape("missing_rank", VerdictKind.MISSING_ARRIVAL, (2, 5), {"absent": [2, 5]}),
    Shape("barrier_against_broadcast", VerdictKind.DIVERGED_BRANCH, (2, 5), {"broadcasting": [2, 5]}),
    Shape("mismatched_group_order", VerdictKind.DIVERGED_BRANCH, (1, 5), {"swapped": [1, 5]}),
    Shape("straggler", VerdictKind.STRAGGLER, (3,), {"slow": [3]}),
    Shape(
        "dead_rank", VerdictKind.DEAD_RANK, (4,), {"dying": [4]},
        ready=lambda ranks: ranks.wait_exit(Deadline.after(60), ranks=[4]),
    ),
    Shape("stopped_rank", VerdictKind.MISSING_ARRIVAL, (3,), {"stopped": [3]}),
    Shape("lock_across_rpc", VerdictKind.MISSING_ARRIVAL, tuple(range(1, 8)), {"hold": True}),
    Shape("outside_peer", VerdictKind.ALL_TOGETHER, (), {"silent": True}),
    Shape("spin_wait", VerdictKind.MISSING_ARRIVAL, (5,), {"absent": [5]}, preload=SPIN),
    Shape("native_loop", VerdictKind.MISSING_ARRIVAL, (7,), {"looping": [7]}),
    Shape(
        "rank_local_fallback", VerdictKind.DIVERGED_BRANCH, (3, 6), {"form": "today", "denied": [3, 6]},
        paths=(REPROS / "rank_local_fallback" / "standin",), preload=FALLBACK,
    ),
)  # fmt: skip


def main() -> int:
    """Record all shapes; exits 1 if a live verdict is not the planted one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path)
    asked = parser.parse_args()
    if asked.python:
        environment = EngineEnvironment.from_interpreter(asked.python)
    else:
        environment = EngineEnvironment.ensure(REQUIREMENT)
    wrong = 0
    for shape in SHAPES:
        folder = asked.folder / shape.name
        shutil.rmtree(folder, ignore_errors=True)
        server = RankServer(
            environment.python,
            paths=[*shape.paths, *environment.import_paths],
            preload=shape.preload,
            environment={"VLLM_LOGGING_LEVEL": "ERROR"},
        )
        with server, server.run(REPROS / shape.name / "ranks.py", world=8, options=shape.options) as ranks:
            shape.ready(ranks)
            _, verdict = look(ranks, folder, Deadline.after(60.0))
        good = (verdict.kind, verdict.missing) == (shape.kind, shape.missing)
        wrong += not good
        (folder / "expected.json").write_text(json.dumps(verdict.to_json(), indent=1) + "\n")
        sys.stdout.write(f"{'ok   ' if good else 'WRONG'} {shape.name}: {verdict.signature}\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
