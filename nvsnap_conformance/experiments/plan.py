"""The declared arms of an experiment, read from its TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.experiments.record import (
    FACTORS,
    CudaGraphs,
    CustomAllReduce,
    Factors,
    FlashInferWorkspace,
    Nccl,
)
from nvsnap_conformance.suggest import did_you_mean
from nvsnap_conformance.tomlfile import Environment, StrictModel, read_model

if TYPE_CHECKING:
    from collections.abc import Mapping

SHIPPED = Path(__file__).with_name("teardown.toml")


class PlanError(UsageError):
    """A file of arms is missing, malformed, or names something that does not exist."""


class Setting(StrictModel):
    """What one level of a factor adds to the engine's launch."""

    factor: Literal["nccl", "custom_all_reduce", "flashinfer_workspace", "cuda_graphs"]
    level: str
    args: tuple[str, ...] = ()
    env: Environment = Field(default_factory=dict)


class Arm(StrictModel):
    """One combination of levels, under a name of its own."""

    name: str = Field(pattern=r"^[A-Z][A-Za-z0-9-]*$")
    summary: str = Field(min_length=1)
    nccl: Nccl
    custom_all_reduce: CustomAllReduce
    flashinfer_workspace: FlashInferWorkspace
    cuda_graphs: CudaGraphs

    @property
    def factors(self) -> Factors:
        """The levels alone."""
        return Factors(**{name: getattr(self, name) for name in FACTORS})

    def teardown(self) -> dict[str, str]:
        """Return the hooks' option ``teardown``: what they are to take down, and how.

        What the launch has left out (``severed``, ``off``, ``none``) is not theirs to touch.
        """
        return {
            "nccl": "live" if self.nccl is Nccl.SEVERED else self.nccl.value,
            "custom-allreduce": "live"
            if self.custom_all_reduce is CustomAllReduce.OFF
            else self.custom_all_reduce.value,
            "flashinfer-workspace": "live"
            if self.flashinfer_workspace is FlashInferWorkspace.OFF
            else self.flashinfer_workspace.value,
            "cuda-graphs": "dropped" if self.cuda_graphs is CudaGraphs.DROPPED else "kept",
        }


class Plan(StrictModel):
    """The question, the arms in the order in which they run, and what levels mean at launch.

    ``decides_args`` and ``decides_env`` are the settings that a target may have, and the arms alone decide.
    """

    format: Literal["nvsnap-experiment/1"]
    question: str = Field(min_length=1)
    decides_args: tuple[str, ...] = ()
    decides_env: tuple[str, ...] = ()
    setting: tuple[Setting, ...] = ()
    arm: tuple[Arm, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        names = [arm.name for arm in self.arm]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two arms are called {twice!r}")
        seen: dict[Factors, str] = {}
        for arm in self.arm:
            if arm.factors in seen:
                raise ValueError(f"the arms {seen[arm.factors]!r} and {arm.name!r} have the same levels")
            seen[arm.factors] = arm.name
        places = [(setting.factor, setting.level) for setting in self.setting]
        if again := next((place for place in places if places.count(place) > 1), None):
            raise ValueError(f"the level {again[1]!r} of {again[0]} is set twice")
        for setting in self.setting:
            levels = [level.value for level in Factors.model_fields[setting.factor].annotation]  # type: ignore[union-attr]
            if setting.level not in levels:
                raise ValueError(
                    f"{setting.factor} has no level {setting.level!r}. {did_you_mean(setting.level, levels)}"
                )
        return self

    def launch(
        self, arm: Arm, args: tuple[str, ...], env: Mapping[str, str]
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the engine's arguments and environment: the target's, with what ``arm`` decides in place."""
        args = _without(args, self.decides_args)
        env = {name: value for name, value in env.items() if name not in self.decides_env}
        for setting in self.setting:
            if getattr(arm, setting.factor).value == setting.level:
                args += setting.args
                env |= setting.env
        return args, env

    def select(self, names: tuple[str, ...]) -> tuple[Arm, ...]:
        """Return the arms called ``names`` in the plan's order, all for none.

        Raises :class:`PlanError` with the nearest name for one that is not there.
        """
        by_name: dict[str, Any] = {arm.name: arm for arm in self.arm}
        for name in names:
            if name not in by_name:
                raise PlanError(f"no arm is called {name!r}", next_step=did_you_mean(name, by_name))
        return tuple(arm for arm in self.arm if not names or arm.name in names)


def _without(args: tuple[str, ...], flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``args`` without ``flags`` and their values (``--flag value``, ``--flag=value``)."""
    kept: list[str] = []
    dropping = False
    for word in args:
        if word.startswith("-"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
    return tuple(kept)


def read_plan(path: Path = SHIPPED) -> Plan:
    """Read a file of arms; raise :class:`PlanError` with file and key where it does not fit."""
    return read_model(path, Plan, error=PlanError, what="the file of arms")
