"""Hooks that are called from a thread which has never used the worker's device.

The engine's RPC runs on a worker's main thread, which has its device; an orchestrator's own calls, or a
recapture in the background, need not. What stands for the device: :mod:`nvsnap_hooks.thread_device`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nvsnap_conformance.hooks import standins
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.engines.protocol import HooksSpec

FRESH_THREAD = "fresh_thread"
"""The loader's reserved option: each call is made in a thread of its own."""


def in_fresh_threads(hooks: HooksSpec) -> HooksSpec:
    """Return the same hooks, to be called from a new thread each time, on every rank."""
    return replace(hooks, options={**hooks.options, FRESH_THREAD: True})


def check_any_thread(seen: standins.Observation) -> list[Finding]:
    """Check a cycle over stand-ins whose calls came from fresh threads.

    Findings: ``THREAD:NO_DEVICE`` (a workspace was to be mapped or unmapped in a thread that did not have the
    worker's device), otherwise those of :func:`standins.check_completed` and
    :func:`standins.check_follows_group`.
    """
    found: list[Finding] = []
    for rank, report in (seen.reports.get("after") or seen.reports.get("prepared", {})).items():
        where = sorted({event["name"] for event in report["events"] if event["what"] == "no-device"})
        if where:
            found.append(
                finding(
                    f"rank {rank}: the worker's device was not current in {', '.join(where)}",
                    "THREAD:NO_DEVICE",
                    rank=rank,
                )
            )
    return found or standins.check_completed(seen) + standins.check_follows_group(seen)
