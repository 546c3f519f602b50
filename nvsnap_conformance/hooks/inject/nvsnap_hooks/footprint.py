"""How much of a device's memory is what an engine gives up when it sleeps: the weights and the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def footprint(worker: Any) -> dict[str, int | None]:
    """Return ``{"weights", "cache"}`` in bytes on the device, ``None`` where it cannot be told.

    What is counted stays below what a sleep frees: vLLM allocates more beside it, in whole pages. Buffers
    are left out, for some are made after the model was loaded, and stay.
    """
    runner: Any = getattr(worker, "model_runner", None)
    if not hasattr(runner, "get_model") or not hasattr(runner, "kv_caches"):
        return {"weights": None, "cache": None}
    return {
        "weights": _on_device(runner.get_model().parameters()),
        "cache": _on_device(_tensors_in(runner.kv_caches)),
    }


def _on_device(tensors: Iterable[Any]) -> int:
    """Return the bytes of the device's memory below ``tensors``, once where several share it."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cuda"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors_in(held: Any) -> Iterator[Any]:
    """Yield the tensors in lists and tables of such; a layer of a hybrid model has several."""
    if hasattr(held, "untyped_storage"):
        yield held
    elif held is not None:
        for part in held.values() if isinstance(held, dict) else held:
            yield from _tensors_in(part)
