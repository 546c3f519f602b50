"""The loader: the only thing that an engine is started with.

vLLM mixes this class into its ``Worker`` (``--worker-extension-cls``) and refuses one that shares any
attribute without double underscores with it; since 0.27 ``Worker`` itself has ``checkpoint_prepare`` and
``checkpoint_restore``. So there is one method, under a name of our own, and which implementation answers
is named in each call, after the engine is up or restored.
"""

from __future__ import annotations

from typing import Any


class WorkerLoader:
    """Mixed into every worker. Reached by ``collective_rpc("nvsnap_rpc", args=[request])``."""

    def nvsnap_rpc(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer ``request`` (see :func:`nvsnap_hooks.dispatch.answer`); never raises but by intent."""
        from nvsnap_hooks.dispatch import answer

        return answer(self, request)
