"""How the loader gets into an engine where no worker extension is named: as a plugin, or by sitecustomize.

Both put :meth:`nvsnap_hooks.loader.WorkerLoader.nvsnap_rpc` on vLLM's ``WorkerBase``: at once where that is
imported already, else right after its import. Nothing here raises into the interpreter's start or into an
import of the engine.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import asdict, dataclass, field
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from nvsnap_hooks.loader import WorkerLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

EXTENSION, PLUGIN, SITECUSTOMIZE = "extension", "plugin", "sitecustomize"

WORKER_MODULE = "vllm.v1.worker.worker_base"
WORKER_CLASS = "WorkerBase"

_METHOD = "nvsnap_rpc"


@dataclass
class Arrival:
    """How the loader came into this process.

    ``ways`` are those that ran here. ``shadowed`` is the file of the sitecustomize that ours stands before,
    ``shadowed_problem`` what it raised. ``problems`` are whatever else went wrong.
    """

    ways: list[str] = field(default_factory=list)
    shadowed: str | None = None
    shadowed_problem: str | None = None
    problems: list[str] = field(default_factory=list)


STATE = Arrival()


def describe(worker: Any) -> dict[str, Any]:
    """Return :class:`Arrival` as JSON values, the extension among the ways where ``worker`` has it."""
    found = asdict(STATE)
    if WorkerLoader in type(worker).__mro__:
        found["ways"] = [EXTENSION, *found["ways"]]
    return found


def as_plugin() -> None:
    """Bring the loader in; the entry point of vLLM's group ``vllm.general_plugins``."""
    _guarded(lambda: _arrive(PLUGIN))


def as_sitecustomize(shadowed: str | None, problem: str | None) -> None:
    """Bring the loader in, after ``shadowed`` (a file) was run and raised ``problem``."""
    STATE.shadowed, STATE.shadowed_problem = shadowed, problem
    _guarded(lambda: _arrive(SITECUSTOMIZE))


def _arrive(way: str) -> None:
    if way not in STATE.ways:
        STATE.ways.append(way)
    after_import(WORKER_MODULE, attach)


def attach(module: ModuleType) -> None:
    """Put the RPC on the class of workers, unless it is there."""
    base = getattr(module, WORKER_CLASS)
    present = getattr(base, _METHOD, None)
    if present is None:
        setattr(base, _METHOD, WorkerLoader.nvsnap_rpc)
    elif present is not WorkerLoader.nvsnap_rpc:
        STATE.problems.append(f"{WORKER_CLASS}.{_METHOD} is there already, from {present.__module__}")


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with the module ``name``: now where it has been imported, else after its import.

    A second call for a module that is waited for already is of no effect.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    elif not any(isinstance(finder, _AfterImport) and finder.waits_for(name) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(MetaPathFinder):
    """Finds one module as the others do, and has something called once it has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def waits_for(self, name: str) -> bool:
        """Return whether ``name`` is the module."""
        return self._name == name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec for the one module, ``None`` for all others."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        run = getattr(loader, "exec_module", None)
        if run is None:
            STATE.problems.append(f"{self._name} has a loader of the old kind: {type(loader).__name__}")
            return

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            run(module)
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            _guarded(lambda: self._then(module))

        # On this module's own loader object, so that whoever asks for it later still gets the real one.
        loader.exec_module = exec_module


def _guarded(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        STATE.problems.append(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):
            sys.stderr.write(f"nvsnap: the loader did not come in:\n{traceback.format_exc()}")
