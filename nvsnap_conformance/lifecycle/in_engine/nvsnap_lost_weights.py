"""In a worker: weights whose memory was given up and mapped again, with nothing loaded into it."""

from __future__ import annotations

from typing import Any


class LostWeights:
    """Answers the RPC of the known-bad orchestrator that wakes an engine without a reload."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self._worker = worker
        self._options = options

    def lose(self) -> dict[str, int]:
        """Leave zeros in every parameter, as in fresh device memory; return how many elements they have.

        The buffers stay as they are: vLLM's worker keeps them over a sleep of level 2.
        """
        lost = 0
        for parameter in self._worker.model_runner.get_model().parameters():
            parameter.data.zero_()
            lost += parameter.numel()
        return {"elements": lost}
