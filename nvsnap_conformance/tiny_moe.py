"""The recipe of the fixture model ``tiny-moe``: a Qwen3-MoE of 181 696 random float32 parameters.

Each layer has four experts, of which a token takes two, so that two ranks can hold two each. Embedding,
attention, head and tokenizer are those of ``tiny-llama`` in shape, from a seed of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvsnap_conformance import tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20264
EXPERTS = 4
EXPERTS_PER_TOKEN = 2

# vLLM's grouped matrix product on CPU takes multiples of 32 (0.32, CPUUnquantizedExperts).
INTERMEDIATE = 64


def write(folder: Path) -> None:
    """Write the model's files into ``folder``, which exists and is empty."""
    tiny_llama.write_json(folder / "config.json", config())
    tiny_llama.write_tokenizer(folder, positions=tiny_llama.POSITIONS)
    (folder / "model.safetensors").write_bytes(tiny_llama.safetensors(_shapes(), seed=SEED))


def config() -> dict[str, Any]:
    """Return the model's configuration."""
    shared = tiny_llama.config()
    del shared["mlp_bias"]
    return shared | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    return tiny_llama.around_layers(
        {
            **tiny_llama.attention(layer),
            f"{layer}.self_attn.q_norm.weight": (tiny_llama.HEAD_SIZE,),
            f"{layer}.self_attn.k_norm.weight": (tiny_llama.HEAD_SIZE,),
            f"{layer}.mlp.gate.weight": (EXPERTS, tiny_llama.HIDDEN),
            **_experts(f"{layer}.mlp.experts"),
        }
        for layer in (f"model.layers.{number}" for number in range(tiny_llama.LAYERS))
    )


def _experts(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(EXPERTS):
        shapes |= {
            f"{prefix}.{expert}.gate_proj.weight": (INTERMEDIATE, tiny_llama.HIDDEN),
            f"{prefix}.{expert}.up_proj.weight": (INTERMEDIATE, tiny_llama.HIDDEN),
            f"{prefix}.{expert}.down_proj.weight": (tiny_llama.HIDDEN, INTERMEDIATE),
        }
    return shapes
