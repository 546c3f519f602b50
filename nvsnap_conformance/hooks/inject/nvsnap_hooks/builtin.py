"""The loader's own methods: they answer whatever implementation a request names."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from nvsnap_hooks import VERSION, arrival, forwards, loader, transports

METHODS = frozenset({"identify", "forwards", "environment"})


class Builtin:
    """What the loader knows of the worker that it sits in."""

    def __init__(self, worker: Any, options: dict[str, Any] | None = None) -> None:
        self._worker = worker
        self._options = options or {}

    def identify(self) -> dict[str, Any]:
        """Return who answers: loader, rank, process, engine.

        ``arrival`` says how the loader came in, ``copies`` lists other loaders at hand.
        """
        import torch
        import vllm

        group = self._worker.parallel_config
        return {
            "loader": {"file": loader.__file__, "version": VERSION},
            "rank": self._worker.rank,
            "world_size": group.world_size,
            "pid": os.getpid(),
            "engine": {"name": "vllm", "version": vllm.__version__},
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": str(self._worker.device),
            "gpu": self._gpu(),
            "arrival": arrival.describe(self._worker),
            "copies": other_copies(),
        }

    def forwards(self) -> dict[str, int]:
        """Return :func:`nvsnap_hooks.forwards.counts`."""
        return forwards.counts()

    def environment(self) -> dict[str, str]:
        """Return the settings of collectives as they are in force in this process.

        Environment variables keep their names; facts read from the engine are in lower case.
        """
        import torch.distributed as dist

        found = {name: value for name, value in os.environ.items() if transports.concerns(name)}
        configuration = self._worker.parallel_config
        found["backend"] = str(dist.get_backend()) if dist.is_initialized() else "none"
        found["custom_all_reduce"] = "off" if configuration.disable_custom_all_reduce else "on"
        found["executor"] = str(configuration.distributed_executor_backend)
        found["shared_memory_communicator"] = "on" if _shared_memory() else "off"
        return found

    def _gpu(self) -> str | None:
        import torch

        device = self._worker.device
        if device is None or device.type != "cuda":
            return None
        return str(torch.cuda.get_device_properties(device).uuid)


def _shared_memory() -> bool:
    """Return whether any group of this rank talks through vLLM's shared-memory communicator on CPU."""
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        communicator = getattr(reference(), "device_communicator", None)
        if type(getattr(communicator, "dist_module", None)).__name__ == "_CPUSHMDistributed":
            return True
    return False


def other_copies() -> list[str]:
    """Return the files of every other loader that is imported or could be, sorted."""
    own = Path(loader.__file__).resolve()
    found: set[Path] = set()
    for entry in sys.path:
        candidate = Path(entry or ".") / "nvsnap_hooks" / "loader.py"
        if candidate.is_file():
            found.add(candidate.resolve())
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and (name.startswith("nvsnap_hooks") or Path(file).parent.name == "nvsnap_hooks"):
            found.add(Path(file).resolve().parent / "loader.py")
    return sorted(str(path) for path in found if path != own)
