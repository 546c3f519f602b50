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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvsnap_conformance import tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

SEED = 20262

ONE = struct.pack("<f", 1.0)[2:]
"""1.0 as a bfloat16, which is the upper half of a float32."""


@dataclass(frozen=True)
class Size:
    """How large a Llama is, by the names of its configuration; key/value heads are as many as heads."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_size: int
    positions: int = 1024

    def config(self) -> dict[str, Any]:
        """Return the model's configuration."""
        return tiny_llama.config() | {
            "head_dim": self.head_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.positions,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads,
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Return each tensor's shape and the standard deviation of its values (0: all are one).

        Matrices keep the size of what goes through them; the last one is wider, so that the first choice of
        a greedy answer leads the second by more than a 16-bit format can lose.
        """
        hidden, heads = self.hidden, self.heads * self.head_size
        shapes: dict[str, tuple[tuple[int, ...], float]] = {
            "model.embed_tokens.weight": ((tiny_llama.VOCABULARY, hidden), 1.0)
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name, shape in (
                ("self_attn.q_proj", (heads, hidden)),
                ("self_attn.k_proj", (heads, hidden)),
                ("self_attn.v_proj", (heads, hidden)),
                ("self_attn.o_proj", (hidden, heads)),
                ("mlp.gate_proj", (self.intermediate, hidden)),
                ("mlp.up_proj", (self.intermediate, hidden)),
                ("mlp.down_proj", (hidden, self.intermediate)),
            ):
                shapes[f"{prefix}.{name}.weight"] = (shape, shape[1] ** -0.5)
            shapes[f"{prefix}.input_layernorm.weight"] = ((hidden,), 0.0)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = ((hidden,), 0.0)
        shapes["model.norm.weight"] = ((hidden,), 0.0)
        shapes["lm_head.weight"] = ((tiny_llama.VOCABULARY, hidden), 3 * hidden**-0.5)
        return shapes

    def write(self, folder: Path, values: Callable[[int, float], Iterable[bytes | memoryview]]) -> None:
        """Write the files; ``values(count, deviation)`` gives each matrix as bfloat16 bytes, in parts."""
        tiny_llama.write_json(folder / "config.json", self.config())
        tiny_llama.write_tokenizer(folder, positions=self.positions)
        shapes = self.shapes()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(safetensors_header({name: shape for name, (shape, _) in shapes.items()}))
            for shape, deviation in shapes.values():
                count = math.prod(shape)
                file.writelines([ONE * count] if deviation == 0.0 else values(count, deviation))


SIZE = Size(hidden=512, intermediate=1536, layers=4, heads=8, head_size=64)


def write(folder: Path) -> None:
    """Write the model's files into ``folder``, which exists and is empty."""
    generator = random.Random(SEED)  # noqa: S311 - reproducible weights are the purpose
    SIZE.write(folder, lambda count, deviation: [uniform(generator, count, deviation)])


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
