"""The ways by which the loader gets into an engine, and whether an interpreter can be reached by them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.errors import TargetError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nvsnap_conformance.engines.protocol import HooksSpec

_FOLDER = Path(__file__).resolve().parent

INJECT = _FOLDER / "inject"
"""The folder with the loader and all that an RPC may name."""

INJECT_PACKAGE = "nvsnap_hooks"
"""The package of the loader, and of all hooks that are shipped."""

PLUGIN_NAME = "nvsnap"
"""The name of our entry point; ``VLLM_PLUGINS`` chooses plugins by it."""

_PROBE_SECONDS = 20.0
"""Allowance of a probe, in seconds. An interpreter starts in 0.1 s, from a cold disk in a few."""

_PROBE = """
import importlib.util, json, sys
spec = importlib.util.find_spec("nvsnap_hooks")
site = sys.modules.get("sitecustomize")
print("nvsnap-probe " + json.dumps({
    "flags": ["-I"] * sys.flags.isolated
    + ["-E"] * (sys.flags.ignore_environment and not sys.flags.isolated)
    + ["-S"] * sys.flags.no_site,
    "loader": spec and spec.origin,
    "site": hasattr(sys, "_nvsnap_sitecustomize"),
}))
"""


_FIND = """
import importlib.util, json, sys
path, name, attribute = sys.argv[1:]

if path:
    sys.path.insert(0, path)
found = {"module": None, "error": "", "attribute": True}
try:
    spec = importlib.util.find_spec(name)
    if spec is not None:
        found["module"] = spec.origin or str(spec.submodule_search_locations)
        if spec.origin is None and spec.submodule_search_locations is not None:
            # A folder without an __init__ holds modules and no class.
            found["attribute"] = False
        code = spec.loader.get_code(name) if hasattr(spec.loader, "get_code") else None
        if code is not None:
            # Names that module code binds are among co_names, but for those that come in another way.
            dynamic = {"__getattr__", "globals", "locals", "vars", "setattr", "exec", "sys"}
            star = any(type(c) is tuple and "*" in c for c in code.co_consts)
            found["attribute"] = attribute in code.co_names or star or bool(dynamic & set(code.co_names))
except BaseException as error:
    found["error"] = f"{type(error).__name__}: {error}"
print("nvsnap-probe " + json.dumps(found))
"""


class Way(StrEnum):
    """How the loader gets in.

    ``extension``: ``--worker-extension-cls``. ``plugin``: an entry point of ``vllm.general_plugins`` in a
    metadata folder on PYTHONPATH. ``sitecustomize``: one on PYTHONPATH, which runs the one that it shadows.
    """

    EXTENSION = "extension"
    PLUGIN = "plugin"
    SITECUSTOMIZE = "sitecustomize"


@dataclass(frozen=True)
class Injection:
    """One way in. ``site`` is the folder with our sitecustomize."""

    way: Way = Way.EXTENSION
    site: Path = _FOLDER / "ways" / "site"
    plugin: Path = _FOLDER / "ways" / "plugin"

    def first(self) -> tuple[Path, ...]:
        """Return the folders that must come before all others on PYTHONPATH."""
        return (self.site,) if self.way is Way.SITECUSTOMIZE else ()

    def folders(self) -> tuple[Path, ...]:
        """Return the further folders on PYTHONPATH, the loader's own first."""
        return (INJECT, self.plugin) if self.way is Way.PLUGIN else (INJECT,)

    def arguments(self) -> tuple[str, ...]:
        """Return the engine's command line arguments."""
        if self.way is Way.EXTENSION:
            return ("--worker-extension-cls", "nvsnap_hooks.loader.WorkerLoader")
        return ()

    def require_settings(self, env: Mapping[str, str]) -> None:
        """Raise :class:`UsageError` for an engine's environment that keeps the loader out."""
        chosen = env.get("VLLM_PLUGINS")
        if self.way is Way.PLUGIN and chosen is not None and PLUGIN_NAME not in chosen.split(","):
            raise UsageError(
                f"VLLM_PLUGINS={chosen} keeps the loader out, which is the plugin {PLUGIN_NAME!r}",
                cause="vLLM loads only the plugins that the variable names, and says nothing of the others",
                next_step=f"add {PLUGIN_NAME} to VLLM_PLUGINS in [engine] env, or use another [hooks] inject",
            )

    def require_reached(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the interpreter ``command`` with ``env`` once and see that the loader reaches it (0.1 s).

        Raises :class:`TargetError`, naming the option, where it runs with ``-I``, ``-E`` or ``-S``, which
        children by spawn inherit; and where it finds another loader. One that runs no Python code, or not in
        time, is let pass: the engine's own start will fail, and its log says why.
        """
        name = " ".join(command)
        try:
            found = _probe(command, env)
        except subprocess.TimeoutExpired:
            return
        if found is None:
            return
        if found["flags"]:
            raise TargetError(
                f"the engine's interpreter {name} runs with {', '.join(found['flags'])}",
                cause="with -I and -E Python ignores PYTHONPATH, with -I and -S no sitecustomize is run, and "
                "children by spawn inherit the option: the loader would be missing, and nothing would say so",
                next_step="name an interpreter that takes PYTHONPATH, without these options",
            )
        expected = INJECT / "nvsnap_hooks" / "__init__.py"
        if found["loader"] is None or not os.path.samefile(found["loader"], expected):  # noqa: PTH121
            raise TargetError(
                f"the engine's interpreter {name} finds the loader at {found['loader']}, not at {expected}",
                cause="another copy comes first on its path, or its start changes PYTHONPATH",
                next_step="take the other copy off the engine's path",
            )
        if self.way is Way.SITECUSTOMIZE and not found["site"]:
            raise TargetError(
                f"the engine's interpreter {name} runs another sitecustomize than {self.site}",
                cause="its start puts something in front of PYTHONPATH",
                next_step="use [hooks] inject = 'extension' or 'plugin'",
            )


def require_hooks(command: Sequence[str], env: Mapping[str, str], hooks: HooksSpec) -> None:
    """See that the interpreter ``command`` with ``env`` finds the module and the class of ``hooks``.

    The packages above the module are imported, the module itself is only compiled: it may import the engine.
    Raises :class:`TargetError` where the module is not found or cannot be compiled, or speaks of no such
    name, and where those packages are not imported in time. What only its import can tell is told by the
    engine's workers. An interpreter that does not run is let pass: the engine's start will fail, and its log
    says why.
    """
    module, _, attribute = hooks.implementation.partition(":")
    shipped = module.partition(".")[0] == INJECT_PACKAGE
    path = INJECT if shipped else hooks.path
    where = f"the engine's interpreter {' '.join(command)}"
    try:
        found = _probe(command, env, _FIND, str(path or ""), module, attribute)
    except subprocess.TimeoutExpired as error:
        raise TargetError(
            f"the hooks {hooks.implementation} cannot be imported: {where} did not get to the module "
            f"{module} within {_PROBE_SECONDS:.0f} s",
            cause="a package above it waits for something when it is imported",
            next_step=f"import {module.rpartition('.')[0] or module} in that interpreter by hand",
        ) from error
    if found is None:
        return
    below = f", with {path} first on its path" if path else "; the target names no [hooks] path"
    if found["error"] or not found["module"]:
        raise TargetError(
            f"the hooks {hooks.implementation} cannot be imported: {where} does not get the module {module}",
            cause=(found["error"] or "it has no module of this name") + below,
            next_step="correct [hooks] source (package.module:Class), or set [hooks] path to the folder that "
            "holds the package",
        )
    if not found["attribute"]:
        raise TargetError(
            f"the hooks {hooks.implementation} cannot be imported: {found['module']} has no {attribute}",
            cause="the class has another name, or is in another module",
            next_step="correct [hooks] source (package.module:Class)",
        )


def _probe(
    command: Sequence[str], env: Mapping[str, str], code: str = _PROBE, *words: str
) -> dict[str, Any] | None:
    try:
        done = subprocess.run(
            [*command, "-c", code, *words],
            cwd="/",  # which "-c" puts on the path: not the caller's, which the engine does not see
            env=dict(env),
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_SECONDS,
        )
        line = next(row for row in done.stdout.splitlines() if row.startswith("nvsnap-probe "))
        found: dict[str, Any] = json.loads(line.partition(" ")[2])
    except (OSError, StopIteration, ValueError):
        return None
    return found
