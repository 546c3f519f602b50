"""Refusals and failures of hooks. The loader turns them into error values; the class name is the type."""

from __future__ import annotations


class HookRefused(Exception):  # noqa: N818 - a refusal; nothing was touched
    """The hook did nothing, for the reason given."""


class UnsupportedEngineVersion(HookRefused):
    """The engine's version is not one that the hooks know."""


class UnsupportedPlatform(HookRefused):
    """The engine runs on a device, or over several nodes, that the hooks do not cover."""


class NoDevice(HookRefused):
    """The worker's device cannot be made the calling thread's."""


class BadOption(HookRefused):
    """An option of the hooks has a value that they do not know."""


class AlreadyPrepared(HookRefused):
    """``prepare`` on a prepared engine."""


class NotPrepared(HookRefused):
    """``restore`` on a serving engine."""


class NotDrained(HookRefused):
    """Requests are still in the worker, or it cannot be told whether there are any."""


class StateFailed(HookRefused):
    """An earlier release or rebuild failed half-way; only a new engine helps."""


class PeerRefused(HookRefused):
    """Another rank refused, so this one did nothing either."""


class PeerSilent(HookRefused):
    """Another rank did not vote in time."""


class BadRequest(HookRefused):
    """The loader cannot take the request: a missing key, an implementation that cannot be imported."""


class NotJson(HookRefused):
    """A hook returned a value that is not JSON, which the engine's front could not send."""


class PassThrough(Exception):  # noqa: N818 - see below
    """The one exception that the loader lets through into the engine's own RPC.

    Only a known-bad implementation raises it: with vLLM 0.27 to 0.33 at a world size of two and more, one
    exception puts the per-rank replies out of step for good.
    """


class ReleasedError(RuntimeError):
    """Something used a resource that is released for a checkpoint."""
