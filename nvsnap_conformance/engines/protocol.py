"""What an engine adapter offers to the suite.

An adapter drives an engine that runs in its own interpreter and its own processes. Nothing here imports
an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.process import EngineProcess
    from nvsnap_conformance.processes import ProcessId


@dataclass(frozen=True)
class HooksSpec:
    """Which implementation of the hooks answers an RPC: late-bound, named with every call.

    ``implementation`` is ``module:Class``, importable in the engine's interpreter; ``path`` is a folder
    that is put on its ``sys.path`` first (a vendor's own hooks), or ``None``. ``options`` is passed to
    the class (a mutant's or a case's parameters); JSON values only.
    """

    implementation: str = "nvsnap_hooks.reference:ReferenceHooks"
    path: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def request(self, method: str, arguments: Mapping[str, Any], *, nonce: str) -> dict[str, Any]:
        """Return what the loader takes to have these hooks answer ``method``; each rank echoes ``nonce``."""
        return {
            "nonce": nonce,
            "implementation": self.implementation,
            "path": None if self.path is None else str(self.path),
            "options": dict(self.options),
            "method": method,
            "arguments": dict(arguments),
        }


@dataclass(frozen=True)
class LaunchConfig:
    """Everything that decides what a launched engine is.

    ``python`` is the engine's interpreter, ``model`` a local folder, ``workdir`` an existing folder of
    this launch alone (logs, sockets). ``import_paths`` go in front of the engine's PYTHONPATH. ``inject`` is
    the way by which the loader gets in (:class:`nvsnap_conformance.hooks.injection.Way`). ``processor`` is
    ``cpu`` or ``cuda``. ``sleep_mode`` has the engine allocate so that it can sleep.
    """

    python: Path
    model: Path
    tensor_parallel: int
    workdir: Path
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    import_paths: tuple[Path, ...] = ()
    isolate: bool = True
    mutation: str | None = None
    inject: str = "extension"
    processor: str = "cpu"
    sleep_mode: bool = False


@dataclass(frozen=True)
class Rank:
    """One rank of a running engine. ``source`` says how pid and rank were matched (e.g. ``rpc``)."""

    rank: int
    process: ProcessId
    gpu: str | None
    source: str


@dataclass(frozen=True)
class RankReply:
    """One rank's answer to a hooks RPC.

    ``nonce`` is what the rank echoed (``None`` where the reply has none); ``expected_nonce`` what was
    sent. ``error`` holds type, message and traceback where the hook reported an error as a value.
    """

    rank: int | None
    expected_nonce: str
    nonce: str | None
    value: Any = None
    error: Mapping[str, str] | None = None
    raw: Any = None

    @property
    def in_step(self) -> bool:
        """Whether this is the reply to the call that was made, and not to an earlier one."""
        return self.nonce == self.expected_nonce


@dataclass(frozen=True)
class Completion:
    """A greedy completion: token ids, the log probability of each (natural log), and the text."""

    prompt: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


class RequestState(StrEnum):
    """How the engine's front met one request."""

    ANSWERED = "answered"
    WAITING = "waiting"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"


class Health(StrEnum):
    """What the engine's front says of itself."""

    SERVING = "serving"
    UNHEALTHY = "unhealthy"
    REFUSED = "refused"
    SILENT = "silent"


class EngineHandle(Protocol):
    """A launched engine."""

    config: LaunchConfig
    process: EngineProcess
    version: str

    def ready(self, deadline: Deadline) -> None:
        """Wait until the engine serves; raise ``EngineStartError`` with the log's tail where it does not."""

    def ranks(self, deadline: Deadline) -> list[Rank]:
        """Return the ranks, rank 0 first."""

    def health(self, deadline: Deadline) -> Health:
        """Ask the front's health endpoint once."""

    def generate(self, prompts: Sequence[str], *, max_tokens: int, deadline: Deadline) -> list[Completion]:
        """Complete each prompt greedily, with log probabilities and without stopping early."""

    def submit(self, prompt: str, *, max_tokens: int, deadline: Deadline) -> Future[Completion]:
        """Send a request without waiting; the future raises what the request met.

        An answer of HTTP 503 raises :class:`Unavailable`, a broken connection or other status
        :class:`RequestFailed`.
        """

    def rpc(self, method: str, *, hooks: HooksSpec, deadline: Deadline, **arguments: Any) -> list[RankReply]:
        """Call ``method`` of the hooks named by ``hooks`` on every rank, with a fresh nonce.

        Returns what the engine answered, one entry per answer: fewer than the ranks where a rank gave
        none. Raises :class:`RequestFailed` where the call itself failed (HTTP 500).
        """

    def raw_rpc(self, method: str, *, deadline: Deadline, args: Sequence[Any] = ()) -> list[Any]:
        """Call any worker method with the engine's own RPC, without loader and nonce."""

    def quiesce(self, deadline: Deadline) -> None:
        """Let running requests finish and hold new ones at the front."""

    def sleep(self, level: int, deadline: Deadline) -> None:
        """Have a quiesced engine give device memory up: its caches, and its weights.

        At ``level`` 1 the weights are kept in the host's memory, at 2 they are dropped. Requests that are
        held stay held.
        """

    def wake(self, deadline: Deadline, *, reload: bool) -> None:
        """Bring the weights back and schedule nothing yet; with ``reload`` read them from the model again.

        What cannot be brought back without requests being scheduled is left to :meth:`resume`.
        """

    def resume(self, deadline: Deadline) -> None:
        """Serve again."""

    def paused(self, deadline: Deadline) -> bool:
        """Ask the engine whether it is quiesced."""

    def waiting_requests(self, deadline: Deadline) -> int:
        """Return how many requests have reached the engine and are not finished, by its own account."""

    def communication_environment(self) -> dict[str, str]:
        """Return the effective settings of collectives (NVLS, P2P, SHM, custom all-reduce, ...)."""

    def stop(self, deadline: Deadline) -> None:
        """End the engine: SIGTERM, grace, SIGKILL; never raises for an engine that is already gone."""


class Engine(Protocol):
    """An engine family."""

    name: str

    def launch(self, config: LaunchConfig) -> EngineHandle:
        """Start an engine and return at once; ``ready`` waits for it."""


class RequestFailed(Exception):  # noqa: N818 - it is an observation more than an error
    """A request to the engine failed: HTTP status and body, or a broken connection (status ``None``)."""

    def __init__(self, what: str, *, status: int | None, body: str = "") -> None:
        super().__init__(f"{what}: HTTP {status}: {body[:500]}" if status else f"{what}: {body[:500]}")
        self.status = status
        self.body = body


class NotConnected(RequestFailed):
    """The connection was refused: the request never reached an engine."""


class Unavailable(RequestFailed):
    """The front answered HTTP 503: not now."""
