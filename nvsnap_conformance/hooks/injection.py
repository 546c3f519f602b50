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

_FOLDER = Path(__file__).resolve().parent

INJECT = _FOLDER / "inject"
"""The folder with the loader and all that an RPC may name."""

PLUGIN_NAME = "nvsnap"
"""The name of our entry point; ``VLLM_PLUGINS`` chooses plugins by it."""

_PROBE_SECONDS = 60.0

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
        children by spawn inherit; and where it finds another loader. One that does not run Python code at all
        is let pass: the engine's own start will fail, and its log says why.
        """
        name = " ".join(command)
        found = _probe(command, env)
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


def _probe(command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any] | None:
    try:
        done = subprocess.run(
            [*command, "-c", _PROBE],
            env=dict(env),
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_SECONDS,
        )
        line = next(row for row in done.stdout.splitlines() if row.startswith("nvsnap-probe "))
        found: dict[str, Any] = json.loads(line.partition(" ")[2])
    except (OSError, subprocess.TimeoutExpired, StopIteration, ValueError):
        return None
    return found
