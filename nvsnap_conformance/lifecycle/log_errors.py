"""Errors of the device, or of its libraries, in what an engine logged.

A kernel that fails is reported at some later call, on whichever rank makes it; an engine may log that and go
on answering. So equal tokens do not say that nothing failed.
"""

from __future__ import annotations

import re

from nvsnap_conformance.outcomes import Finding, finding

_NAMES = re.compile(
    r"\b(cudaError(?!NotReady\b|PeerAccess|String\b|Name\b)[A-Z]\w+"
    r"|CUDA_ERROR_(?!NOT_READY\b|PEER_ACCESS)[A-Z_]*[A-Z]"
    r"|nccl(?:UnhandledCudaError|SystemError|InternalError|InvalidArgument|InvalidUsage|RemoteError)"
    r"|CU(?:BLAS|DNN)_STATUS_(?!SUCCESS\b)[A-Z_]*[A-Z])\b"
)
"""The names that the CUDA runtime, the CUDA driver (cuda.h), NCCL (nccl.h), cuBLAS and cuDNN give their
errors, but for those of a question that was answered (an event is not ready, peer access is there)."""

_WORDS = re.compile(
    r"\b((?:CUDA|CUDART|NCCL|cuBLAS|cuDNN)(?: driver| runtime)? error\b[^\n]*[^\s.]"
    r"|Triton Error \[CUDA\][^\n]*[^\s.]|Cuda failure\b[^\n]*[^\s.]|CUDA out of memory"
    r"|Watchdog caught collective operation timeout)",
    re.IGNORECASE,
)
"""How those who call them word it: PyTorch (CUDAException.h, ProcessGroupNCCL), vLLM's cuda_wrapper and
custom_all_reduce.cuh, Triton, NCCL's own log, FlashInfer."""

_TALK = re.compile(r"\b(INFO|DEBUG|TRACE)\b")
"""A line at one of these levels tells what is tried or set, not that the engine met an error."""

SHOWN = 3
"""How many different errors a message shows."""


def device_errors_in(text: str) -> list[str]:
    """Return the errors that ``text`` names, each once, in order; else in the words of those who met them."""
    told = "\n".join(line for line in text.splitlines() if not _TALK.search(line))
    return [*dict.fromkeys(_NAMES.findall(told))] or [*dict.fromkeys(_WORDS.findall(told))]


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
