"""One rank computes for long before a collective; the others wait in it. Slow, and no hang."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist


def main(context: Any) -> None:
    """Reduce over all ranks; those named ``slow`` compute until ``enough`` is opened, or for ``seconds``."""
    context.join()
    context.tell("entered")
    if context.rank in context.options.get("slow", ()):
        compute(context)
    dist.all_reduce(torch.ones(4))
    context.tell("done")


def compute(context: Any) -> None:
    """Work in several functions, as a forward pass does."""
    state = torch.rand(64, 64)
    end = time.monotonic() + float(context.options.get("seconds", "inf"))
    while time.monotonic() < end and not context.is_open("enough"):
        for layer in (multiply, normalise, activate, shift):
            for _ in range(200):
                state = layer(state)


def multiply(state: torch.Tensor) -> torch.Tensor:
    """Multiply by itself."""
    return state @ state


def normalise(state: torch.Tensor) -> torch.Tensor:
    """Bring to unit scale."""
    return state / (state.abs().max() + 1e-6)


def activate(state: torch.Tensor) -> torch.Tensor:
    """Apply a nonlinearity."""
    return torch.tanh(state)


def shift(state: torch.Tensor) -> torch.Tensor:
    """Rotate the rows."""
    return torch.roll(state, 1, dims=0)
