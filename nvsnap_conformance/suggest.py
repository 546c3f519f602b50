"""Nearest known names, for messages about unknown ones."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that offers the nearest of ``known`` to ``name``, or lists them all."""
    names = sorted(known)
    if not names:
        return "There are none."
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]!r}? Known: {', '.join(names)}"
    return f"Known: {', '.join(names)}"
