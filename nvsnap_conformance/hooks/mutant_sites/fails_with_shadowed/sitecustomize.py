"""Known-bad: what the shadowed sitecustomize raises keeps the loader out, and is told as its own."""

import runpy
import sys
from importlib.machinery import PathFinder
from os.path import dirname, realpath

from nvsnap_hooks import arrival

own = dirname(realpath(__file__))  # noqa: PTH120 - as light as can be
spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if realpath(p or ".") != own])
if spec is not None and spec.origin is not None:
    runpy.run_path(spec.origin)
arrival.as_sitecustomize(None if spec is None else spec.origin, None)
