"""Imports vLLM's pass that fuses all-reduces, in an interpreter without its CUDA kernels.

The pass names kernels that a build for CPU lacks, when it is imported. They get a name here and nothing else:
a workspace is made before any of them is looked at.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import ModuleType

NAME = "vllm.compilation.passes.fusion.allreduce_rms_fusion"
_PACKAGE = NAME.rpartition(".")[0]
_MISSING = re.compile(r"'_OpNamespace' '_C' object has no attribute '(\w+)'")

_kernels = torch.library.Library("_C", "FRAGMENT")


def load() -> ModuleType:
    """Return the module of the pass; raise what it raises for another reason than a missing kernel."""
    named: set[str] = set()
    while True:
        try:
            return importlib.import_module(NAME)
        except AttributeError as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing[1] in named:
                raise
            named.add(missing[1])
            _kernels.define(f"{missing[1]}() -> ()")
            for module in [name for name in sys.modules if name.startswith(_PACKAGE)]:
                del sys.modules[module]
