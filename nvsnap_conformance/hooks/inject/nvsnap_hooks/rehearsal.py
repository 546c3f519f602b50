"""One rank without an engine: a worker that holds resources of the right names, behind the real loader.

Run as ``python -m nvsnap_hooks.rehearsal RANK SIZE WORKER`` by :mod:`nvsnap_conformance.testing`. It reads
one request per line from stdin, answers one reply per line, as :func:`nvsnap_hooks.dispatch.answer` gives it,
and ends with stdin, also in the middle of a call. Neither torch nor vLLM is needed; where vLLM is not there,
a module with nothing but a version stands for it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import queue
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any

ENGINE_VERSION = "0.32.0"

_serials = itertools.count(1)


@dataclass
class Resource:
    """Something that this rank holds across ranks: ``identity`` is a new number after each rebuild.

    ``releasable`` is false for what stays, as the queues do that carry the RPC.
    """

    name: str
    kind: str
    releasable: bool = True
    live: bool = True
    identity: int = field(default_factory=lambda: next(_serials))

    def release(self) -> None:
        """Release it; raise ``RuntimeError`` where that cannot be, or was done already."""
        if not self.releasable:
            raise RuntimeError(f"{self.name} cannot be released")
        if not self.live:
            raise RuntimeError(f"{self.name} is released already")
        self.live = False

    def rebuild(self) -> None:
        """Make it anew; raise ``RuntimeError`` where it is there."""
        if self.live:
            raise RuntimeError(f"{self.name} was not released")
        self.live, self.identity = True, next(_serials)


class RehearsalWorker:
    """What hooks may ask of a worker: ``rank``, ``parallel_config.world_size``, and here ``resources``."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.parallel_config = types.SimpleNamespace(world_size=size)
        held = [
            Resource("executor/replies", "control-queue", releasable=False),
            Resource("executor/requests", "control-queue", releasable=False),
            Resource("tp:0/broadcaster", "message-queue"),
            Resource("tp:0/cpu", "process-group"),
            Resource("tp:0/device", "process-group"),
            Resource("world/default", "process-group"),
        ]
        self.resources = {resource.name: resource for resource in held}

    def execute_model(self, value: int) -> int:
        """Stand for a forward pass."""
        return value + 1


class RehearsalObserver:
    """Sees what :class:`RehearsalWorker` really holds."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self._worker = worker
        self._options = options

    def snapshot(self) -> dict[str, Any]:
        """Return the live resources in the form of :class:`nvsnap_hooks.observer.Observer`."""
        return {
            "rank": self._worker.rank,
            "pid": os.getpid(),
            "resources": {
                name: {"kind": resource.kind, "live": True, "identity": resource.identity}
                for name, resource in self._worker.resources.items()
                if resource.live
            },
        }


def main() -> None:
    """Answer requests until stdin ends."""
    rank, size, factory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    try:
        importlib.import_module("vllm")
    except ImportError:
        engine = types.ModuleType("vllm")
        engine.__version__ = ENGINE_VERSION  # type: ignore[attr-defined]
        sys.modules["vllm"] = engine
    from nvsnap_hooks import dispatch

    # Whatever hooks print must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = factory.partition(":")
    worker = getattr(importlib.import_module(module), name)(rank, size)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        answer = dispatch.answer(worker, json.loads(requests.get()))
        print(json.dumps(answer), file=replies, flush=True)


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    # Whoever asked is gone: nothing may outlive it, whatever a hook is waiting for.
    os._exit(0)


if __name__ == "__main__":
    main()
