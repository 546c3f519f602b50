"""Captured CUDA graphs: who holds them in vLLM, how they are dropped, and how they are captured again.

vLLM 0.26 to 0.33 keeps graphs in wrappers around the model (model runner V1, and pieces of a compiled model),
in graph managers (model runner V2) and in the wrapper for microbatches. A capture after start-up is refused
(V1: ``validate_cudagraph_capturing_enabled``) or never asked for (V2), and a dispatch to a graph that is gone
fails. So the hooks make the engine compute eagerly first, and capture again when asked.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvsnap_hooks.holders import instances_of
from nvsnap_hooks.resources import Context, Deferred, StillHeld

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Family:
    """A class of vLLM that holds graphs, and its attribute that maps something to them."""

    module: str
    name: str
    attribute: str


WRAPPER = Family("vllm.compilation.cuda_graph", "CUDAGraphWrapper", "concrete_cudagraph_entries")
BREAKABLE = Family("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphWrapper", "entries")
MANAGER = Family("vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager", "graphs")
MICROBATCH = Family("vllm.v1.worker.gpu_ubatch_wrapper", "UBatchWrapper", "cudagraphs")
DISPATCHER = Family("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher", "cudagraph_keys")
KNOWN = (WRAPPER, BREAKABLE, MANAGER, MICROBATCH)

FOREIGN = (
    Family("vllm.v1.worker.encoder_cudagraph", "EncoderCudaGraphManager", "budget_graphs"),
    Family("vllm.v1.spec_decode.gemma4", "Gemma4Proposer", "_centroids_graphs"),
)
"""Holders whose graphs these hooks cannot have captured again."""


def instances(families: tuple[Family, ...]) -> list[tuple[Family, Any]]:
    """Return every living instance of the families, by one pass over the heap."""
    wanted = {
        known: family
        for family in families
        if (known := getattr(sys.modules.get(family.module), family.name, None)) is not None
    }
    if not wanted:
        return []
    return [
        (next(wanted[base] for base in type(thing).__mro__ if base in wanted), thing)
        for thing in instances_of(*wanted)
    ]


def graphs_of(holder: Any) -> int:
    """Return how many graphs a wrapper or a manager has captured."""
    own = vars(holder)
    entries: dict[Any, Any] = next(
        (own[family.attribute] for family in KNOWN if own.get(family.attribute)), {}
    )
    return sum(_is_captured(entry) for entry in entries.values())


def _is_captured(entry: Any) -> bool:
    # The two kinds of wrapper name the graph in an entry differently; a manager maps to the graph itself.
    names = [name for name in ("cudagraph", "capture") if hasattr(entry, name)]
    return any(getattr(entry, name) is not None for name in names) if names else entry is not None


def foreign() -> list[str]:
    """Return the classes of living holders with graphs that cannot be captured again."""
    return sorted({family.name for family, thing in instances(FOREIGN) if vars(thing).get(family.attribute)})


def living() -> int:
    """Return how many captured graphs there are in the process, whoever holds them."""
    torch = sys.modules.get("torch")
    kind = getattr(getattr(torch, "cuda", None), "CUDAGraph", None)
    if kind is None:
        return 0
    return len(instances_of(kind))


class Graphs:
    """All captured CUDA graphs of this rank. They hold collectives, so they go before any group does."""

    name = "cuda-graphs"
    kind = "cuda-graphs"

    def __init__(self, worker: Any = None) -> None:
        self._worker = worker
        self._holders = instances(KNOWN)
        self.pending: Recapture | None = None
        self.recapture: Recapture | None = None

    def held(self) -> bool:
        """Return whether any of the holders has a captured graph."""
        return any(graphs_of(holder) for _, holder in self._holders)

    def release(self) -> str:
        """Have the engine compute eagerly from here on, and drop every graph."""
        number = sum(graphs_of(holder) for _, holder in self._holders)
        holders = len([holder for _, holder in self._holders if graphs_of(holder)])
        unfinished = self.pending is not None and self.pending.state != "captured"
        self.recapture = self.pending if unfinished else Recapture.of(self._worker, self._holders)
        if self.recapture is not None:
            self.recapture.start_over()
        for family, holder in self._holders:
            vars(holder).get(family.attribute, {}).clear()
        if self.held():
            raise StillHeld("a wrapper still holds captured graphs")
        if living():
            gc.collect()
        if left := living():
            raise StillHeld(f"{left} captured graphs are held by something that these hooks do not know")
        return f"{number} graphs, held by {holders} objects"

    def rebuild(self, _context: Context) -> str:
        """Leave it to ``recapture``, or to the engine: a wrapper by itself captures at its next call."""
        self._holders = instances(KNOWN)
        if self.recapture is None:
            raise Deferred("captured again by the engine at their next use")
        raise Deferred(f"the engine computes eagerly until recapture has made {self.recapture.wanted} graphs")


class Recapture:
    """Captures graphs again, some at a time, through the engine's own ``capture_model``.

    The engine computes eagerly until the last one is there; then it dispatches as before. Every rank must
    take the same steps, for a capture is a collective. ``wanted`` and ``done`` count batch descriptors.
    """

    def __init__(self, worker: Any, steps: list[tuple[Any, Any]], *, at_once: bool) -> None:
        self._worker = worker
        self._steps = steps
        self._left = steps
        self._at_once = at_once
        self.wanted = len(steps)
        self.problem: str | None = None

    @staticmethod
    def of(worker: Any, holders: list[tuple[Family, Any]]) -> Recapture | None:
        """Return the way of this worker's model runner, ``None`` where it captures nothing by itself."""
        runner = getattr(worker, "model_runner", None)
        managers = [thing for family, thing in holders if family is MANAGER and thing._graphs_captured]
        if getattr(runner, "cudagraph_manager", None) in managers:
            return ManagerRecapture(worker, managers)
        if getattr(runner, "cudagraph_dispatcher", None) is not None:
            found = DispatcherRecapture(worker, [thing for _, thing in instances((DISPATCHER,))])
            return found if found.wanted else None
        return None

    @property
    def done(self) -> int:
        """How many are captured."""
        return self.wanted - len(self._left)

    @property
    def state(self) -> str:
        """``eager``, ``capturing`` (some are there, and the engine still computes eagerly), ``captured``."""
        if self.problem is not None:
            return "failed"
        if not self._left:
            return "captured"
        return "capturing" if self.done else "eager"

    def progress(self) -> dict[str, Any]:
        """Return ``{"state", "wanted", "captured", "problem"}``."""
        return {
            "state": self.state,
            "wanted": self.wanted,
            "captured": self.done,
            "problem": self.problem,
        }

    def hold(self) -> None:
        """Have the engine compute eagerly."""
        raise NotImplementedError

    def start_over(self) -> None:
        """Have the engine compute eagerly, with all still to be captured."""
        self._left = self._steps
        self.hold()

    def give_up(self, problem: str) -> None:
        """Have the engine compute eagerly for good, for the reason given."""
        self.problem = problem
        self.hold()

    def step(self, number: int) -> int:
        """Capture the next ``number`` and return how many were; after the last the engine uses them all."""
        if not self._left:
            return 0
        chosen = self._left if self._at_once else self._left[: max(1, number)]
        rest = self._left[len(chosen) :]
        if self.done == 0:
            renew_pools()
        self._capture(chosen, last=not rest)
        self._left = rest
        return len(chosen)

    def _capture(self, chosen: list[tuple[Any, Any]], *, last: bool) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._worker.vllm_config), _other_threads_may_call():
            self._worker.model_runner.capture_model()


class ManagerRecapture(Recapture):
    """Model runner V2: graph managers with a list of what they capture."""

    def __init__(self, worker: Any, managers: list[Any]) -> None:
        self._main = worker.model_runner.cudagraph_manager
        self._managers = managers
        self._descriptors = {id(manager): manager._capture_descs for manager in managers}
        # The engine's own order: pieces first, for they need the larger activations.
        modes = sorted(self._main._capture_descs, key=lambda mode: mode.name != "PIECEWISE")
        steps = [(mode, each) for mode in modes for each in self._main._capture_descs[mode]]
        extras = getattr(worker.model_runner, "adaptive_verification", None) is not None
        super().__init__(worker, steps, at_once=extras or len(managers) > 1)

    def hold(self) -> None:
        """Have every manager dispatch to no graph."""
        for manager in self._managers:
            manager._graphs_captured = False

    def _capture(self, chosen: list[tuple[Any, Any]], *, last: bool) -> None:
        modes = dict.fromkeys(mode for mode, _ in chosen)
        self._main._capture_descs = {m: [each for mode, each in chosen if mode is m] for m in modes}
        try:
            self._run()
        except BaseException:
            last = False
            raise
        finally:
            for manager in self._managers:
                manager._capture_descs = self._descriptors[id(manager)]
                manager._graphs_captured = last


class DispatcherRecapture(Recapture):
    """Model runner V1: one dispatcher with the keys of what is captured, wrappers that hold it."""

    def __init__(self, worker: Any, dispatchers: list[Any]) -> None:
        self._main = worker.model_runner.cudagraph_dispatcher
        self._dispatchers = [each for each in dispatchers if each.keys_initialized]
        self._keys = self._main.cudagraph_keys
        steps = [(mode, each) for mode, some in self._main.get_capture_descs() for each in some]
        super().__init__(worker, steps, at_once=len(self._dispatchers) > 1)

    def hold(self) -> None:
        """Have every dispatcher answer with no graph."""
        for dispatcher in self._dispatchers:
            dispatcher.keys_initialized = False

    def _capture(self, chosen: list[tuple[Any, Any]], *, last: bool) -> None:
        self._main.cudagraph_keys = {m: {each for mode, each in chosen if mode is m} for m in self._keys}
        for dispatcher in self._dispatchers:
            dispatcher.keys_initialized = True
        try:
            self._run()
        except BaseException:
            last = False
            raise
        finally:
            self._main.cudagraph_keys = self._keys
            for dispatcher in self._dispatchers:
                dispatcher.keys_initialized = last


def renew_pools() -> None:
    """Give everything that captures a fresh memory pool.

    Torch refuses to capture into a pool whose graphs are all gone while a tensor still keeps its memory.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    old = getattr(platform, "_global_graph_pool", None)
    if old is None:
        return
    new = current_platform.graph_pool_handle()
    platform._global_graph_pool = new
    for _, holder in instances(KNOWN):
        for name in ("pool", "graph_pool"):
            if vars(holder).get(name) == old:
                setattr(holder, name, new)


@contextlib.contextmanager
def _other_threads_may_call() -> Iterator[None]:
    """Let a capture mind its own thread only: the engine's thread for outputs may be waiting for an event."""
    import torch

    original = torch.cuda.graph
    torch.cuda.graph = functools.partial(original, capture_error_mode="thread_local")
    try:
        yield
    finally:
        torch.cuda.graph = original
