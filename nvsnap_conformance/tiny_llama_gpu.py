"""The recipe of the fixture model ``tiny-llama-gpu``: a Llama of 13.9 million random bfloat16 parameters.

What GPU kernels ask for and ``tiny-llama`` has not: 16-bit weights, heads of 64, and heads for eight ranks.
Made with the standard library alone, from a seeded Mersenne Twister, so that its files are the same bytes on
every machine. The tokenizer is that of ``tiny-llama``.
"""

from __future__ import annotations

import json
import math
import random
import struct
from typing import TYPE_CHECKING, Any

from nvsnap_conformance import tiny_llama

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SEED = 20262
HIDDEN = 512
INTERMEDIATE = 1536
LAYERS = 4
HEADS = 8
HEAD_SIZE = 64
POSITIONS = 1024

ONE = struct.pack("<f", 1.0)[2:]
"""1.0 as a bfloat16, which is the upper half of a float32."""


def write(folder: Path) -> None:
    """Write the model's files into ``folder``, which exists and is empty."""
    tiny_llama.write_json(folder / "config.json", _config())
    tiny_llama.write_tokenizer(folder, positions=POSITIONS)
    _write_safetensors(folder / "model.safetensors")


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
    """Return each tensor's shape and the standard deviation of its values (0: all are one).

    Matrices keep the size of what goes through them; the last one is wider, so that the first choice of a
    greedy answer leads the second by more than a 16-bit format can lose.
    """
    heads = HEADS * HEAD_SIZE
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "model.embed_tokens.weight": ((tiny_llama.VOCABULARY, HIDDEN), 1.0)
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (heads, HIDDEN)),
            ("self_attn.k_proj", (heads, HIDDEN)),
            ("self_attn.v_proj", (heads, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, heads)),
            ("mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
            ("mlp.up_proj", (INTERMEDIATE, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, INTERMEDIATE)),
        ):
            shapes[f"{prefix}.{name}.weight"] = (shape, shape[1] ** -0.5)
        shapes[f"{prefix}.input_layernorm.weight"] = ((HIDDEN,), 0.0)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = ((HIDDEN,), 0.0)
    shapes["model.norm.weight"] = ((HIDDEN,), 0.0)
    shapes["lm_head.weight"] = ((tiny_llama.VOCABULARY, HIDDEN), 3 * HIDDEN**-0.5)
    return shapes


def _write_safetensors(path: Path) -> None:
    generator = random.Random(SEED)  # noqa: S311 - reproducible weights are the purpose
    shapes = _shapes()
    with path.open("wb") as file:
        file.write(safetensors_header({name: shape for name, (shape, _) in shapes.items()}))
        for shape, deviation in shapes.values():
            count = math.prod(shape)
            file.write(ONE * count if deviation == 0.0 else uniform(generator, count, deviation))


def safetensors_header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return the header of a safetensors file of bfloat16 tensors, which follow it in the same order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def uniform(generator: random.Random, count: int, deviation: float) -> bytes:
    """Return ``count`` bfloat16 values, each one of 256 that are evenly spread, by two tables of bytes."""
    reach = deviation * 3**0.5
    values = [struct.pack("<f", (2 * step - 255) / 255 * reach)[2:] for step in range(256)]
    steps = generator.randbytes(count)
    both = bytearray(2 * count)
    both[0::2] = steps.translate(bytes(value[0] for value in values))
    both[1::2] = steps.translate(bytes(value[1] for value in values))
    return bytes(both)
