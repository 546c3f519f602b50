"""Errors of the device, or of its communication library, in what an engine logged.

A kernel that fails is reported at some later call, on whichever rank makes it; an engine may log that and go
on answering. So equal tokens do not say that nothing failed.
"""

from __future__ import annotations

import re

from nvsnap_conformance.outcomes import Finding, finding

_NAMES = re.compile(
    r"\b(cudaError[A-Z]\w+|CUDA_ERROR_[A-Z_]+[A-Z]"
    r"|nccl(?:UnhandledCuda|System|Internal|InvalidArgument|InvalidUsage|Remote)Error)\b"
)
"""The names that the CUDA runtime, the CUDA driver (cuda.h) and NCCL (nccl.h) give their errors."""

_WORDS = re.compile(r"\b(CUDA error: [^\n]*[^\s.]|NCCL error\b[^\n]*[^\s.])")
"""How PyTorch words an error of either (c10/cuda/CUDAException.h, ProcessGroupNCCL)."""

SHOWN = 3
"""How many different errors a message shows."""


def device_errors_in(text: str) -> list[str]:
    """Return the errors that ``text`` names, each once, in order; in PyTorch's words where it names none."""
    return [*dict.fromkeys(_NAMES.findall(text))] or [*dict.fromkeys(_WORDS.findall(text))]


def check_log(text: str) -> list[Finding]:
    """Check that ``text``, logged since a cycle began, tells no error of the device: ``LOG:DEVICE_ERROR``."""
    errors = device_errors_in(text)
    if not errors:
        return []
    more = f" and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
    return [
        finding(
            f"since the cycle began the engine's log tells of {'; '.join(errors[:SHOWN])}{more}",
            "LOG:DEVICE_ERROR",
            errors=errors,
        )
    ]
