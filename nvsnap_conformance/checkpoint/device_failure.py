"""How a device checkpointer fails: by name, as data, and with what became of the engine."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.outcomes import Outcome, Signature

if TYPE_CHECKING:
    from collections.abc import Sequence

HANG = "HANG"
"""The code in the signature of a call that did not return before its deadline."""


class Fate(StrEnum):
    """What a failed device checkpoint left, read back from driver and kernel, never assumed."""

    RUNNING = "running"
    """Every process that took part is in the driver's state RUNNING again."""
    KILLED = "killed"
    """At least one could not be brought back, so all were killed, and all are gone."""
    STUCK = "stuck"
    """Killed, and some did not go: they wait in the kernel for the device."""


class DeviceFailure(NvsnapError):  # noqa: N818 - as CriuFailure, an observation of the cycle
    """A verb of the device layer failed on some process.

    ``signature`` is ``CUDA:<number>@<verb>`` for an error of the driver, ``COMMAND:<exit code>@<verb>`` for
    one of a program, with the further codes ``HANG`` (no answer before the deadline), ``STATE`` (success, and
    another state than that success means), ``LOST`` (a process that took part has no state any more),
    ``HELPER`` (the helper process died) and ``START`` (nothing could be started to make the call). ``calls``
    are all calls made, those of the roll-back (``roll_back``) included.
    """

    def __init__(
        self,
        what: str,
        *,
        signature: str,
        fate: Fate,
        calls: Sequence[dict[str, Any]] = (),
        cause: str = "",
        next_step: str = "",
    ) -> None:
        told = {
            Fate.RUNNING: "the engine was rolled back and runs on",
            Fate.KILLED: "the engine could not be brought back and was killed",
            Fate.STUCK: "THE ENGINE COULD NOT BE BROUGHT BACK, AND PROCESSES OF IT DO NOT GO",
        }[fate]
        super().__init__(f"{what}: {told}", cause=cause, next_step=next_step)
        self.signature = Signature.parse(signature)
        self.fate = fate
        self.calls = tuple(calls)

    @property
    def outcome(self) -> Outcome:
        """The outcome that a case gives this failure: a hang is one."""
        return Outcome.HANG if self.signature.code == HANG else Outcome.FAILED
