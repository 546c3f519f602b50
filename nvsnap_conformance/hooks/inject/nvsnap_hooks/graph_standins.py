"""Stand-ins for captured CUDA graphs that the engine dispatches to, in a real worker on CPU.

The engine's own ``CudagraphDispatcher`` is made to know keys, a real ``CUDAGraphWrapper`` holds a graph for
each, and the model runner's ``capture_model`` makes them again, as far as the dispatcher asks for. What it
dispatches to while serving is written down; sizes are set so that no forward pass is ever changed.
"""

from __future__ import annotations

import copy
from typing import Any

_planted: dict[str, Any] = {}

SIZES = (4, 2, 1)
"""Batch sizes, in tokens, that a graph is planted for."""


class Graph:
    """A captured graph."""


class GraphStandIns:
    """Plants the graphs, tells what happened to them, and takes them out again."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self._worker = worker
        self._options = options

    def plant(self) -> dict[str, Any]:
        """Plant; ``{"planted": false}`` on a GPU, where the graphs are real ones."""
        from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor

        if self._worker.device.type != "cpu":
            return {"planted": False}
        if _planted:
            raise RuntimeError("stand-ins are there already")
        runner = self._worker.model_runner
        dispatcher = runner.cudagraph_dispatcher
        names = ("keys_initialized", "cudagraph_mode", "cudagraph_keys", "compilation_config")
        keys = {BatchDescriptor(size) for size in SIZES}
        wrapper = object.__new__(CUDAGraphWrapper)
        wrapper.concrete_cudagraph_entries = {key: CUDAGraphEntry(key, cudagraph=Graph()) for key in keys}
        _planted.update(
            dispatcher=dispatcher,
            saved={name: getattr(dispatcher, name) for name in names},
            wrapper=wrapper,
            wanted=len(keys),
            early=0,
            served=0,
            captures=[],
            runner=runner,
        )
        dispatcher.compilation_config = copy.copy(dispatcher.compilation_config)
        # Larger than any batch, so no forward pass is dispatched to a graph that is none.
        dispatcher.compilation_config.max_cudagraph_capture_size = 0
        dispatcher.cudagraph_mode = CUDAGraphMode.FULL
        dispatcher.cudagraph_keys = {CUDAGraphMode.PIECEWISE: set(), CUDAGraphMode.FULL: keys}
        dispatcher.keys_initialized = True
        dispatch = dispatcher.dispatch

        def watched(*arguments: Any, **keywords: Any) -> Any:
            _planted["served"] += 1
            _planted["early"] += dispatcher.keys_initialized and _captured() < _planted["wanted"]
            return dispatch(*arguments, **keywords)

        def capture_model() -> int:
            for _, descriptors in dispatcher.get_capture_descs():
                _planted["captures"].append(len(descriptors))
                for key in descriptors:
                    wrapper.concrete_cudagraph_entries[key] = CUDAGraphEntry(key, cudagraph=Graph())
            return 0

        dispatcher.dispatch = watched
        runner.capture_model = capture_model
        return {"planted": True}

    def report(self) -> dict[str, Any]:
        """Return ``{"wanted", "captured", "captures", "served", "early"}``.

        ``captures`` are the graphs made by each capture, ``served`` the dispatches while serving, and
        ``early`` those of them that might have gone to a graph while not all were there.
        """
        told = {name: _planted[name] for name in ("wanted", "captures", "served", "early")}
        return told | {"captured": _captured()}

    def remove(self) -> dict[str, Any]:
        """Take everything out; ``{"removed": false}`` where nothing is planted."""
        if not _planted:
            return {"removed": False}
        dispatcher = _planted["dispatcher"]
        for name, value in _planted["saved"].items():
            setattr(dispatcher, name, value)
        del dispatcher.dispatch, _planted["runner"].capture_model
        _planted.clear()
        return {"removed": True}


def _captured() -> int:
    return len(_planted["wrapper"].concrete_cudagraph_entries)
