"""The environment variables by which libraries choose how ranks talk to each other.

NCCL, NVSHMEM, UCX, Gloo, DeepEP, FlashInfer, torch and vLLM (0.26 to 0.33) read them where a communicator is
made, each rank for itself: vLLM's ``utils/nccl.py`` says that NCCL never reconciles them across ranks.
"""

from __future__ import annotations

import ctypes
import hashlib

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_", "FLASHINFER_", "UCX_", "EP_")
_ENGINE = ("VLLM_", "TORCH_")
_WORDS = (
    "ALLREDUCE",
    "ALL_REDUCE",
    "NVLS",
    "MULTICAST",
    "SYMM_MEM",
    "CUSTOM_AR",
    "ALL2ALL",
    "NCCL",
    "P2P_CHECK",
    "SPLIT_GROUP",
    "QUICK_REDUCE",
    "DEEPEP",
)
_OUTPUT = frozenset({"DEBUG", "LOG", "DUMP", "TRACE"})
"""Parts of names of variables that say what is written where, often by rank."""

_DIGITS = 16
"""Hexadecimal digits of a value's digest; what is told apart is a handful of settings."""


def concerns(name: str) -> bool:
    """Return whether the variable ``name`` has to do with communication between ranks."""
    return name.startswith(_PREFIXES) or (name.startswith(_ENGINE) and any(word in name for word in _WORDS))


def decides(name: str) -> bool:
    """Return whether the variable ``name`` can decide on a transport."""
    return concerns(name) and not _OUTPUT & set(name.split("_"))


def fingerprint() -> dict[str, str]:
    """Return the variables that can decide on a transport, each with a digest of its value.

    Read from the C library's environment, as NCCL does, so that what C++ code has set is seen too.
    """
    return {
        name: hashlib.sha256(value).hexdigest()[:_DIGITS]
        for name, value in sorted(_environment().items())
        if decides(name)
    }


def _environment() -> dict[str, bytes]:
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[str, bytes] = {}
    index = 0
    while (entry := entries[index]) is not None:
        name, _, value = entry.partition(b"=")
        found.setdefault(name.decode(errors="replace"), value)  # getenv gives the first of two
        index += 1
    return found
