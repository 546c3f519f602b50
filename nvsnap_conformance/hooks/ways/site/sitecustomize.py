"""Brings the loader into every interpreter that starts with this folder on its PYTHONPATH.

Python runs one ``sitecustomize`` only, so this one takes the place of another. On a host with GPUs that one
may hold safety settings: it is run first, as Python would have run it, also where our loader is missing.
Nothing in here keeps the interpreter from starting; what goes wrong is told on stderr.

Nothing is imported here that Python has not imported by then, but for a traceback.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from os.path import dirname, realpath

_MARK = "_nvsnap_sitecustomize"


def _tell(text: str) -> None:
    try:  # noqa: SIM105 - no further import
        sys.stderr.write(f"nvsnap: {text}\n")
    except Exception:  # noqa: S110 - no stderr, and nobody to tell
        pass


def _shadowed_spec() -> ModuleSpec | None:
    """Return where Python would have found its sitecustomize without this folder."""
    own = dirname(realpath(__file__))  # noqa: PTH120 - as light as can be
    return PathFinder.find_spec("sitecustomize", [p for p in sys.path if realpath(p or ".") != own])


def _run_shadowed() -> tuple[str | None, str | None]:
    """Run it under its own name; return its file and what it raised, both ``None`` where there is none.

    As in ``site.execsitecustomize`` only an ``Exception`` is caught: one that ends the interpreter on purpose
    (``SystemExit``) has its will, as it would without this file.
    """
    try:
        spec = _shadowed_spec()
    except Exception as error:
        _tell(f"cannot look for the sitecustomize that {__file__} shadows: {error!r}")
        return None, repr(error)
    if spec is None or spec.loader is None:
        return None, None
    ours = sys.modules.get("sitecustomize")
    try:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        import traceback

        _tell(f"error in the shadowed {spec.origin}:\n{traceback.format_exc()}")
        # A half-run module is not kept; without ours in its place a later import would run this file again.
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        return spec.origin, f"{type(error).__name__}: {error}"
    return spec.origin, None


# One that looks for the next by itself finds this file again.
if not hasattr(sys, _MARK):
    setattr(sys, _MARK, True)
    shadowed, problem = _run_shadowed()
    try:
        from nvsnap_hooks import arrival

        arrival.as_sitecustomize(shadowed, problem)
    except Exception as error:
        _tell(f"the loader did not come in: {type(error).__name__}: {error}")
