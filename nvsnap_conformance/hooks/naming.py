"""The name of an implementation of hooks, of a worker or of an observer: ``package.module:Class``."""

from __future__ import annotations

import keyword


def is_implementation(name: str) -> bool:
    """Return whether ``name`` is of the form ``package.module:Class``, each part a name that Python takes."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(
        part.isidentifier() and not keyword.iskeyword(part) for part in (*module.split("."), attribute)
    )
