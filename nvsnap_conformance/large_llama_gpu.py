"""The recipe of the fixture model ``large-llama-gpu``: a Llama of 4.4 billion bfloat16 parameters, 8.2 GiB.

Large enough that moving the weights is most of a checkpoint. Every matrix is a part of one pool of random
values, each at a place of its own, so that the files are made at the speed of the disk, and are the same
bytes on every machine. The tokenizer is that of ``tiny-llama``.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from nvsnap_conformance import tiny_llama, tiny_llama_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED = 20263
HIDDEN = 4096
INTERMEDIATE = 14336
LAYERS = 18
HEADS = 32
HEAD_SIZE = 128
POSITIONS = 1024

POOL = (1 << 24) + 1
"""Values in the pool; odd, so that neighbouring matrices begin at different places of it."""


def write(folder: Path) -> None:
    """Write the model's files into ``folder``, which exists and is empty."""
    tiny_llama.write_json(folder / "config.json", _config())
    tiny_llama.write_tokenizer(folder, positions=POSITIONS)
    shapes = _shapes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(tiny_llama_gpu.safetensors_header({name: shape for name, (shape, _) in shapes.items()}))
        pools: dict[float, bytes] = {}
        place = 0
        for shape, deviation in shapes.values():
            count = math.prod(shape)
            if deviation == 0.0:
                file.write(tiny_llama_gpu.ONE * count)
                continue
            if deviation not in pools:
                generator = random.Random(SEED)  # noqa: S311 - reproducible weights are the purpose
                pools[deviation] = tiny_llama_gpu.uniform(generator, POOL, deviation)
            for part in _parts(pools[deviation], place, count):
                file.write(part)
            place = (place + count) % POOL


def _parts(pool: bytes, place: int, count: int) -> Iterator[memoryview]:
    """Yield ``count`` values of the pool from ``place`` on, again from its start where it ends."""
    view = memoryview(pool)
    while count:
        taken = min(count, POOL - place)
        yield view[2 * place : 2 * (place + taken)]
        count, place = count - taken, 0


def _config() -> dict[str, Any]:
    return tiny_llama.config() | {
        "head_dim": HEAD_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "torch_dtype": "bfloat16",
    }


def _shapes() -> dict[str, tuple[tuple[int, ...], float]]:
    """Return each tensor's shape and the standard deviation of its values (0: all are one)."""
    heads = HEADS * HEAD_SIZE
    matrix: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads, HIDDEN),
        "self_attn.k_proj": (heads, HIDDEN),
        "self_attn.v_proj": (heads, HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "model.embed_tokens.weight": ((tiny_llama.VOCABULARY, HIDDEN), 1.0)
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in matrix.items():
            shapes[f"{prefix}.{name}.weight"] = (shape, shape[1] ** -0.5)
        shapes[f"{prefix}.input_layernorm.weight"] = ((HIDDEN,), 0.0)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = ((HIDDEN,), 0.0)
    shapes["model.norm.weight"] = ((HIDDEN,), 0.0)
    # Wider, so that the first choice of a greedy answer leads the second by more than the format can lose.
    shapes["lm_head.weight"] = ((tiny_llama.VOCABULARY, HIDDEN), 3 * HIDDEN**-0.5)
    return shapes
