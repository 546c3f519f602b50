"""The recipe of the fixture model ``tiny-llama``: a Llama of 131904 random parameters.

Made with the standard library alone, from integers of a seeded Mersenne Twister and exact binary
fractions, so that its files are the same bytes on every machine, Python and engine version.
float32, 2 layers, 4 attention heads over 2 key/value heads (so it splits over 2 ranks), and a byte-level
tokenizer: one token per byte of UTF-8, ids 4 to 259.
"""

from __future__ import annotations

import array
import json
import random
import struct
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SEED = 20261
HIDDEN = 64
INTERMEDIATE = 128
LAYERS = 2
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_SIZE = 32
POSITIONS = 512
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
VOCABULARY = len(SPECIAL_TOKENS) + 256

# Uniform in +-11/32: a standard deviation of about 0.2, wide enough that greedy answers differ by prompt.
SPREAD = 11 / 32

_CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write(folder: Path) -> None:
    """Write the model's files into ``folder``, which exists and is empty."""
    write_json(folder / "config.json", config())
    write_tokenizer(folder, positions=POSITIONS)
    (folder / "model.safetensors").write_bytes(safetensors(_shapes(), seed=SEED))


def write_tokenizer(folder: Path, *, positions: int) -> None:
    """Write the byte-level tokenizer and what goes with it; ``positions`` is the model's longest context."""
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    write_json(folder / "tokenizer.json", _tokenizer())
    write_json(folder / "tokenizer_config.json", _tokenizer_config(positions))


def config() -> dict[str, Any]:
    """Return the model's configuration."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "pad_token_id": 3,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    return around_layers(
        {
            **attention(layer),
            f"{layer}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
        for layer in (f"model.layers.{number}" for number in range(LAYERS))
    )


def around_layers(layers: Iterable[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole model: embedding, ``layers``, last norm, head."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in layers:
        shapes |= layer
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def attention(layer: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's attention and norms by their names below ``layer``."""
    return {
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (KEY_VALUE_HEADS * HEAD_SIZE, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (KEY_VALUE_HEADS * HEAD_SIZE, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }


def safetensors(shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> bytes:
    """Return float32 weights in the safetensors format: header length (u64 LE), JSON header, raw tensors.

    Those called ``…norm.weight`` are ones, the others uniform within :data:`SPREAD`, in the order given.
    """
    generator = random.Random(seed)  # noqa: S311 - reproducible weights are the purpose
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            values = array.array("f", [1.0]) * shape[0]
        else:
            values = array.array("f", (_weight(generator) for _ in range(shape[0] * shape[1])))
        if sys.byteorder == "big":
            values.byteswap()
        start = len(data)
        data += values.tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


def _weight(generator: random.Random) -> float:
    """Return a multiple of 2**-23 times ``SPREAD`` in [-SPREAD, SPREAD)."""
    return (generator.getrandbits(24) - (1 << 23)) / (1 << 23) * SPREAD


def _tokenizer() -> dict[str, Any]:
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {symbol: len(SPECIAL_TOKENS) + byte for byte, symbol in enumerate(_byte_symbols())}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _tokenizer_config(positions: int) -> dict[str, Any]:
    return {
        "bos_token": "<s>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "model_max_length": positions,
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }


def _byte_symbols() -> list[str]:
    """Return the visible character that byte-level BPE (GPT-2) uses for each byte."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` in one form for all Pythons."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
