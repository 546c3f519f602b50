"""What proves that a restored process is that process, and that its weights are those weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from nvsnap_hooks import transports

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = 256
"""Rows of the identity matrix fed to a layer at once; 256 rows of 8192 float32 are 8 MiB."""


class Provenance:
    """Keeps a planted nonce in this process's memory, and reads the model's weights."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self._worker = worker
        self._options = options
        self._nonce: str | None = None

    def plant(self, nonce: str) -> dict[str, str]:
        """Keep ``nonce`` in memory, and only there."""
        self._nonce = nonce
        return {"nonce": nonce}

    def recall(self) -> dict[str, str | None]:
        """Return the planted nonce, ``None`` where none was planted in this process."""
        return {"nonce": self._nonce}

    def transport_environment(self) -> dict[str, Any]:
        """Return ``{"variables"}``: :func:`nvsnap_hooks.transports.fingerprint` of this process."""
        return {"variables": transports.fingerprint()}

    def weights_checksum(self) -> dict[str, Any]:
        """Hash every parameter and buffer of the model, bytewise, by name.

        On CPU vLLM packs the weight of a linear layer away (oneDNN, ``layer.cpu_linear``) and leaves an
        empty parameter, so that a checksum over parameters hashes nothing (``/weight_checker`` of 0.32
        answers sha256 of the empty string). Such a layer is hashed through itself: it is fed an identity
        matrix, and x @ W.T is then W, exactly, in any floating-point format, since each sum has one term
        that is not zero.

        Returns ``{"sha256", "parameters", "hashed_elements", "through_layer", "uncovered"}``: how many
        parameters and buffers were hashed, how many elements in all, the layers hashed through
        themselves, and the empty parameters for which there was no way to hash them (no proof for these).
        """
        import torch

        digest = hashlib.sha256()
        model = self._worker.model_runner.get_model()
        hashed = elements = 0
        empty: dict[str, None] = {}
        with torch.inference_mode():
            for name, tensor in _tensors(model):
                if tensor.numel() == 0:
                    empty[name] = None
                    continue
                hashed += 1
                elements += tensor.numel()
                _update(digest, name, tensor)
            through = []
            for name, layer in packed_layers(model):
                through.append(name)
                empty.pop(f"{name}.weight", None)
                for number, rows in enumerate(columns_of(layer)):
                    elements += rows.numel()
                    _update(digest, f"{name}[{number}]", rows)
        return {
            "sha256": digest.hexdigest(),
            "parameters": hashed,
            "hashed_elements": elements,
            "through_layer": through,
            "uncovered": sorted(empty),
        }


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from sorted(model.named_parameters())
    yield from sorted(model.named_buffers())


def _update(digest: Any, name: str, tensor: Any) -> None:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
    digest.update(memoryview(flat.numpy()))


def packed_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the layers that compute with a packed copy of their weight, sorted by name."""
    return sorted(
        ((name, module) for name, module in model.named_modules() if hasattr(module, "cpu_linear")),
        key=lambda pair: pair[0],
    )


def columns_of(layer: Any) -> Iterator[Any]:
    """Yield the columns of the packed weight, a chunk of them at a time, as rows of float values."""
    import torch

    width, dtype = layer_input(layer)
    for start in range(0, width, _CHUNK):
        rows = min(_CHUNK, width - start)
        basis = torch.zeros(rows, width, dtype=dtype)
        basis[torch.arange(rows), torch.arange(start, start + rows)] = 1
        yield layer.quant_method.apply(layer, basis, None)


def layer_input(layer: Any) -> tuple[int, Any]:
    """Return the width of the layer's input on this rank, and the type of its weight."""
    # Row- and column-parallel layers, replicated ones (a router's gate), embeddings, in this order.
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(getattr(layer, name) for name in names if hasattr(layer, name))
    return int(width), layer.weight.dtype
