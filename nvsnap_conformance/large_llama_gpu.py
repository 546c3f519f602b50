"""The recipe of the fixture model ``large-llama-gpu``: a Llama of 4.4 billion bfloat16 parameters, 8.2 GiB.

Large enough that moving the weights is most of a checkpoint. Every matrix is a part of one pool of random
values, each at a place of its own, so that the files are made at the speed of the disk, and are the same
bytes on every machine. The tokenizer is that of ``tiny-llama``.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from nvsnap_conformance import tiny_llama_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED = 20263
SIZE = tiny_llama_gpu.Size(hidden=4096, intermediate=14336, layers=18, heads=32, head_size=128)

POOL = (1 << 24) + 1
"""Values in the pool; odd, so that neighbouring matrices begin at different places of it."""


def write(folder: Path) -> None:
    """Write the model's files into ``folder``, which exists and is empty."""
    pools: dict[float, bytes] = {}
    place = 0

    def values(count: int, deviation: float) -> Iterator[memoryview]:
        nonlocal place
        if deviation not in pools:
            generator = random.Random(SEED)  # noqa: S311 - reproducible weights are the purpose
            pools[deviation] = tiny_llama_gpu.uniform(generator, POOL, deviation)
        view = memoryview(pools[deviation])
        while count:
            taken = min(count, POOL - place)
            yield view[2 * place : 2 * (place + taken)]
            count, place = count - taken, (place + taken) % POOL

    SIZE.write(folder, values)
