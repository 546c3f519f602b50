"""Checks over which all-reduce workspaces an engine makes: what each rank told of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvsnap_conformance.outcomes import Finding, Outcome, finding

Told = Mapping[int, Mapping[str, Any]]


def check_null_multicast(told: Told, *, asked: str) -> list[Finding]:
    """Check that a workspace whose multicast pointer is null was destroyed and is used by no rank.

    ``told`` maps a rank to ``{"backend", "null", "used", "left", "registered"}``: what it ended with, how
    many such workspaces it was given, whether it uses one, how many it did not destroy, whether one is still
    in the engine's table. ``asked`` is the backend that the engine was set to.

    Findings: ``WORKSPACE:NULL_USED``, ``WORKSPACE:NULL_LEFT``, ``WORKSPACE:BACKENDS_DIFFER``, and
    ``WORKSPACE:UNJUDGED`` (unknown) where a rank was given none.
    """
    found: list[Finding] = []
    blind = sorted(rank for rank, value in told.items() if not value["null"])
    if blind:
        return _unjudged(f"asked for {asked}: ranks {blind} were given no workspace with a null pointer")
    for rank, value in sorted(told.items()):
        what = f"rank {rank}, asked for {asked}"
        if value["used"] or value["registered"]:
            found.append(
                finding(f"{what}: uses a workspace whose multicast pointer is null", "WORKSPACE:NULL_USED")
            )
        elif value["left"]:
            found.append(
                finding(f"{what}: {value['left']} such workspaces were not destroyed", "WORKSPACE:NULL_LEFT")
            )
    ends = {rank: value["backend"] for rank, value in told.items()}
    if not found and len(set(ends.values())) > 1:
        found.append(finding(f"asked for {asked}: the ranks end with {ends}", "WORKSPACE:BACKENDS_DIFFER"))
    return found


def check_switched_off(on: Told, off: Told) -> list[Finding]:
    """Check that no rank has a workspace while the engine's switch for them is off.

    ``on`` and ``off`` map a rank to ``{"wanted", "workspaces"}`` with the switch on and off: whether the
    engine chose to fuse all-reduces, and how many workspaces it made. Findings:
    ``WORKSPACE:AGAINST_SWITCH``, and ``WORKSPACE:UNJUDGED`` (unknown) where a rank makes none with it on.
    """
    idle = sorted(rank for rank, value in on.items() if not value["workspaces"])
    if idle:
        return _unjudged(f"ranks {idle} make no workspace with the switch on: nothing to switch off")
    against = {rank: value["workspaces"] for rank, value in off.items() if value["workspaces"]}
    if not against:
        return []
    return [finding(f"with the switch off, workspaces by rank: {against}", "WORKSPACE:AGAINST_SWITCH")]


def _unjudged(why: str) -> list[Finding]:
    return [finding(why, "WORKSPACE:UNJUDGED", outcome=Outcome.UNKNOWN)]
