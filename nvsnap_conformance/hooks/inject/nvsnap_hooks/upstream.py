"""The engine's own hooks, ``Worker.checkpoint_prepare`` and ``checkpoint_restore`` of vLLM 0.27 and later.

They return nothing and keep no state, so nothing can be reported but what they do: this class calls them and
passes on what they answer. It adds no guard, no outcome and no vote; what is missing is the clauses' to find.
"""

from __future__ import annotations

from typing import Any

from nvsnap_hooks.errors import UnsupportedEngineVersion


class UpstreamHooks:
    """Calls the worker's own methods."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self._worker = worker
        self._options = options

    def prepare(self) -> Any:
        """Call ``checkpoint_prepare`` and return what it does, which is ``None`` up to vLLM 0.33.

        Raises :class:`UnsupportedEngineVersion` on an engine that does not have it (before 0.27).
        """
        return self._own("checkpoint_prepare")()

    def restore(self) -> Any:
        """Call ``checkpoint_restore``; as :meth:`prepare`."""
        return self._own("checkpoint_restore")()

    def status(self) -> dict[str, Any]:
        """Say that nobody knows: the engine keeps no state of its hooks."""
        return {"state": "unknown", "cycles": None, "problem": None}

    def _own(self, name: str) -> Any:
        method = getattr(self._worker, name, None)
        if method is None:
            raise UnsupportedEngineVersion(f"{type(self._worker).__name__} has no {name}; vLLM 0.27 has")
        return method
