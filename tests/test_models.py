"""Fixture models: the same bytes everywhere, whole or not at all; a path is taken as it is."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from nvsnap_conformance import large_llama_gpu, tiny_llama, tiny_llama_gpu, tiny_moe
from nvsnap_conformance.errors import EnvironmentFailure, TargetError
from nvsnap_conformance.models import ensure_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVS_CACHE_DIR", str(tmp_path / "cache"))


def sums(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_bytes_are_those_of_the_first_machine() -> None:
    folder = ensure_model("tiny-llama")
    assert sums(folder)["model.safetensors"] == WEIGHTS
    assert sums(folder)["tokenizer.json"] == TOKENIZER


def float32(raw: bytes) -> tuple[dict[str, list[int]], tuple[float, ...]]:
    """Return the shapes and all values of a safetensors file, whose tensors must follow one another."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert (start, stop - start) == (end, 4 * math.prod(entry["shape"])), name
        end = stop
    assert end == len(raw) - 8 - length
    shapes = {name: entry["shape"] for name, entry in header.items()}
    return shapes, struct.unpack(f"<{end // 4}f", raw[8 + length :])


def test_weights_are_valid_safetensors() -> None:
    shapes, values = float32((ensure_model("tiny-llama") / "model.safetensors").read_bytes())
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == [64, 64]
    assert max(map(abs, values)) == 1.0  # the norms; everything else lies within SPREAD
    assert sum(abs(value) <= tiny_llama.SPREAD for value in values) == len(values) - 5 * tiny_llama.HIDDEN


def test_the_mixture_of_experts_splits_over_two_ranks() -> None:
    folder = ensure_model("tiny-moe")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts"] % 2 == 0
    assert 1 < config["num_experts_per_tok"] < config["num_experts"]
    raw = (folder / "model.safetensors").read_bytes()
    shapes, values = float32(raw)
    experts = [name for name in shapes if ".experts." in name]
    assert len(experts) == tiny_llama.LAYERS * tiny_moe.EXPERTS * 3
    # Split by rows or columns too, for an engine that does not run its experts in parallel.
    assert config["moe_intermediate_size"] // 2 % 32 == 0
    assert len(values) == 181_696
    assert hashlib.sha256(raw).hexdigest() == MOE_WEIGHTS
    assert sums(folder)["tokenizer.json"] == TOKENIZER


def test_the_model_for_gpus_has_what_their_kernels_ask_for() -> None:
    folder = ensure_model("tiny-llama-gpu")
    config = json.loads((folder / "config.json").read_text())
    assert (config["torch_dtype"], config["head_dim"]) == ("bfloat16", 64)
    assert all(config[f"num_{kind}_heads"] % 8 == 0 for kind in ("attention", "key_value"))
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    end = 0
    for entry in (entry for name, entry in header.items() if name != "__metadata__"):
        start, stop = entry["data_offsets"]
        elements = 1
        for size in entry["shape"]:
            elements *= size
        assert (entry["dtype"], start, stop - start) == ("BF16", end, 2 * elements)
        end = stop
    assert end == len(raw) - 8 - length
    # The upper half of a float32 each: of the norms 1, of the others a spread around 0 as wide as asked for.
    norm, matrix = header["model.norm.weight"], header["model.layers.0.mlp.down_proj.weight"]
    ones = raw[8 + length + norm["data_offsets"][0] :][:4]
    assert ones == b"\x80\x3f" * 2
    start, stop = (8 + length + offset for offset in matrix["data_offsets"])
    values = [struct.unpack("<f", b"\0\0" + raw[at : at + 2])[0] for at in range(start, stop, 2 * 97)]
    spread = (sum(value * value for value in values) / len(values)) ** 0.5
    assert spread == pytest.approx(1536**-0.5, rel=0.05)
    assert hashlib.sha256(raw).hexdigest() == GPU_WEIGHTS


def test_every_byte_has_its_own_token() -> None:
    tokenizer = json.loads((ensure_model("tiny-llama") / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(tiny_llama.VOCABULARY))
    assert vocabulary["A"] == 4 + ord("A")
    assert vocabulary["Ġ"] == 4 + ord(" ")  # GPT-2's sign for the space


def test_is_made_once_and_mended_when_damaged() -> None:
    said: list[str] = []
    folder = ensure_model("tiny-llama", on_progress=said.append)
    assert ensure_model("tiny-llama", on_progress=said.append) == folder
    assert said == ["making the fixture model tiny-llama"]
    before = sums(folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "stray").write_text("")
    assert ensure_model("tiny-llama", on_progress=said.append) == folder
    assert sums(folder) == before
    assert len(said) == 2


def test_a_half_written_model_is_replaced() -> None:
    folder = ensure_model("tiny-llama")
    before = sums(folder)
    partial = folder.with_name(f"{folder.name}.partial")
    folder.rename(partial)
    (partial / "model.safetensors").unlink()
    assert sums(ensure_model("tiny-llama")) == before
    assert not partial.exists()


def test_many_processes_make_one(tmp_path: Path) -> None:
    code = "from nvsnap_conformance.models import ensure_model; print(ensure_model('tiny-llama'))"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    answers = {child.communicate(timeout=60)[0].strip() for child in children}
    assert len(answers) == 1
    assert sums(Path(answers.pop()))["model.safetensors"] == WEIGHTS


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(TargetError, match=r"holds no config\.json"):
        ensure_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert ensure_model(str(folder)) == folder
    with pytest.raises(TargetError, match="neither a folder nor a fixture model"):
        ensure_model(str(tmp_path / "nowhere"))


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NVS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(EnvironmentFailure, match="NVS_CACHE_DIR") as caught:
        ensure_model("tiny-llama")
    assert os.fspath(tmp_path / "file") in str(caught.value)


GPU_WEIGHTS = "9baa13b8b4017ad3b07621e86c25dc9af20052930b8662d6c21aeb889dbcc997"
MOE_WEIGHTS = "13a3d630df3d2b1c20c5e955c285dc6a49939493992794724f2bf6b1b54fc127"
WEIGHTS = "06540c4e7b87c5970f1d1883449af92d40cd3ccf6141cda0f3edde54c5c4178c"
TOKENIZER = "6c7db3cbd5d189b1d74854b9d93731c08eeea8736697e6b0a3cd777813727b9b"


def test_the_large_model_is_the_pool_from_changing_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tiny_llama_gpu.Size(hidden=64, intermediate=96, layers=2, heads=2, head_size=32)
    monkeypatch.setattr(large_llama_gpu, "SIZE", small)
    monkeypatch.setattr(large_llama_gpu, "POOL", 1001)  # smaller than most matrices, so that it comes round
    large_llama_gpu.write(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(raw) - 8 - length
    data = raw[8 + length :]
    matrices = {
        name: data[slice(*entry["data_offsets"])]
        for name, entry in header.items()
        if "layers" in name and len(entry["shape"]) == 2
    }
    assert len({values[:400] for values in matrices.values()}) == len(matrices) == 14
    q = matrices["model.layers.0.self_attn.q_proj.weight"]
    assert q[: 2 * 500] == q[2 * 1001 : 2 * 1501]


def test_the_large_model_is_at_least_eight_gibibytes() -> None:
    values = sum(math.prod(shape) for shape, _ in large_llama_gpu.SIZE.shapes().values())
    assert 8 << 30 <= 2 * values < 9 << 30
