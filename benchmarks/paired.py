"""What benchmarks of a busy engine share: its throughput over a window, and the ratio of paired windows."""

from __future__ import annotations

import math
import statistics
import threading
import time
from typing import TYPE_CHECKING

from nvsnap_conformance.deadline import Deadline

if TYPE_CHECKING:
    import random

    from nvsnap_conformance.engines.protocol import EngineHandle

TOKENS = 32
RESAMPLES = 10_000


def throughput(handle: EngineHandle, seconds: float) -> float:
    """Return completed tokens per second over a window of about ``seconds``, with two clients."""
    done = [0, 0]
    began = time.monotonic()

    def ask(client: int) -> None:
        while time.monotonic() - began < seconds:
            handle.generate([f"client {client}"], max_tokens=TOKENS, deadline=Deadline.after(60.0))
            done[client] += TOKENS

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(done))]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return sum(done) / (time.monotonic() - began)


def mean_ratio(ratios: list[float], chance: random.Random) -> tuple[float, tuple[float, float]]:
    """Return the geometric mean of ``ratios`` and its 95 % bootstrap interval."""
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted(statistics.fmean(chance.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]
    return math.exp(statistics.fmean(logs)), (math.exp(low), math.exp(high))
