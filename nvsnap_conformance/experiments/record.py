"""What an experiment leaves in the run record: its arms, each with an outcome, and the conditions.

Times are in seconds, memory in bytes.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PROFILE = "experiment-teardown"
"""The profile under which a record holds the teardown experiment."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ArmOutcome(StrEnum):
    """What became of an engine that was taken through the device checkpoint."""

    HANG = "hang"
    REFUSED = "refused"
    LOST = "lost-at-restore"
    WRONG = "wrong-tokens"
    RIGHT = "right"
    UNKNOWN = "unknown"

    @property
    def decided(self) -> bool:
        """Whether the arm says anything: an unknown one does not, and is run again."""
        return self is not ArmOutcome.UNKNOWN


class Nccl(StrEnum):
    """NCCL's communicators at the checkpoint. ``severed``: never over P2P or shared memory (launch)."""

    LIVE = "live"
    SUSPENDED = "suspended"
    DESTROYED = "destroyed"
    SEVERED = "severed"


class CustomAllReduce(StrEnum):
    """vLLM's custom all-reduce at the checkpoint. ``closed-by-engine``: by its own ``close()`` alone."""

    LIVE = "live"
    CLOSED_BY_ENGINE = "closed-by-engine"
    CLOSED = "closed"
    OFF = "off"


class FlashInferWorkspace(StrEnum):
    """FlashInfer's all-reduce workspace at the checkpoint."""

    LIVE = "live"
    FREED = "freed"
    OFF = "off"


class CudaGraphs(StrEnum):
    """Captured CUDA graphs at the checkpoint. ``none``: the engine runs eagerly (launch)."""

    NONE = "none"
    KEPT = "kept"
    DROPPED = "dropped"


class Factors(BaseModel):
    """One level of each factor; two arms differ in one factor alone, or in more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nccl: Nccl
    custom_all_reduce: CustomAllReduce
    flashinfer_workspace: FlashInferWorkspace
    cuda_graphs: CudaGraphs

    def differing(self, other: Factors) -> tuple[str, ...]:
        """Return the names of the factors in which the two differ."""
        return tuple(name for name in FACTORS if getattr(self, name) != getattr(other, name))

    def __str__(self) -> str:
        return ", ".join(f"{label} {getattr(self, name)}" for name, label in FACTORS.items())


FACTORS: dict[str, str] = {
    "nccl": "NCCL",
    "custom_all_reduce": "custom all-reduce",
    "flashinfer_workspace": "FlashInfer workspace",
    "cuda_graphs": "CUDA graphs",
}
"""The factors by name, with what people call them."""


class MemoryReading(_Part):
    """GPU memory of one rank at one moment of its arm."""

    moment: str = Field(description="live, prepared, checkpointed, restored or rebuilt")
    rank: int
    bytes: int | None = Field(description="null where it could not be read")


class Conditions(_Part):
    """What every arm of one experiment has in common. Arms under other conditions are never mixed."""

    target: str
    engine: str = Field(description="distribution and version")
    driver: str
    gpus: list[str]
    tensor_parallel: int
    checkpointer: str
    libraries: dict[str, str] = Field(default_factory=dict, description="versions, by distribution")
    stand_in: bool = Field(
        default=False,
        description="engine and driver are stand-ins: a rehearsal, which shows nothing of real ones",
    )


class ArmRecord(_Part):
    """One arm: an engine of its own, its control, one cycle of the device checkpoint, and what came of it."""

    name: str
    summary: str
    factors: Factors
    outcome: ArmOutcome
    phase: str | None = Field(description="where it ended: start, control, a verb, or answers")
    error: str | None = Field(
        description="the driver's name of the error, e.g. CUDA_ERROR_NOT_SUPPORTED, or the one logged"
    )
    reason: str
    rank_errors: dict[str, str] = Field(default_factory=dict, description="the driver's answer for each rank")
    lost_ranks: list[int] = Field(default_factory=list, description="ranks whose process was gone afterwards")
    control_equal: bool | None = Field(
        default=None, description="whether the answers before were twice the same"
    )
    after_equal: list[bool] = Field(default_factory=list, description="each repeat's tokens against before")
    logprob_drift: dict[str, float] = Field(
        default_factory=dict, description="largest difference of a log probability, in nats"
    )
    seconds: dict[str, float] = Field(default_factory=dict)
    gpu_memory: list[MemoryReading] = Field(default_factory=list)
    memory_source: str = Field(default="", description="how GPU memory was read, or why it was not")
    degraded: list[str] = Field(default_factory=list)
    bundle: str | None = None
    attempt: int = 1
    started: datetime
    ended: datetime


class PinnedCopy(_Part):
    """How fast GPU memory is copied to pinned host memory (d2h) and back (h2d), in bytes per second."""

    d2h: float
    h2d: float


class Settling(_Part):
    """GPU memory after a group of arms, against what it was before the first engine."""

    arms: list[str]
    back: bool | None = Field(description="null where it could not be told")
    note: str


class Pair(_Part):
    """Two arms that differ in one factor alone."""

    one: str
    other: str
    levels: tuple[str, str]
    outcomes: tuple[ArmOutcome, ArmOutcome]


class FactorConclusion(_Part):
    """What the arms say of one factor: by one-factor comparison, or that it is not shown."""

    factor: str
    conclusion: Literal["matters", "no difference seen", "not shown"]
    statement: str
    pairs: list[Pair] = Field(description="pairs whose outcomes differ")
    same: list[Pair] = Field(description="pairs whose outcomes are the same")


class Answer(_Part):
    """The answer to the experiment's question, with what it rests on."""

    checkpointable: Literal["yes", "no", "not shown"] = Field(
        description="whether teardown makes an engine with GPU-to-GPU transports checkpointable"
    )
    workspace: Literal["must go", "no difference seen", "not shown"]
    workspace_alone: Literal["enough", "not enough", "not shown"]
    kept_graphs: Literal["can be lost", "no difference seen", "not shown"] = Field(
        default="not shown",
        description="whether captured graphs that are kept can be what does not come back",
    )
    statement: str
    witnesses: list[str]


class ExperimentRecord(_Part):
    """One experiment as far as it has run."""

    name: Literal["teardown"] = "teardown"
    question: str
    conditions: Conditions
    planned: list[str]
    arms: list[ArmRecord]
    settling: list[Settling]
    pinned_copy: PinnedCopy | None = Field(
        default=None, description="of the slowest GPU, where it was asked for"
    )
    conclusions: list[FactorConclusion]
    answer: Answer
