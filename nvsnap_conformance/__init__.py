"""Conformance and regression suite for checkpoint/restore of multi-GPU LLM inference engines."""

__version__ = "0.1.0"
