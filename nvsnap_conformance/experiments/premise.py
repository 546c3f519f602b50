"""Whether an arm was what its name says: what the observer saw before the teardown and after it.

An arm whose workspace was to be freed, and was never there, says nothing of freeing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.experiments.record import FACTORS
from nvsnap_conformance.session.pool import resources_by_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvsnap_conformance.engines.protocol import RankReply
    from nvsnap_conformance.experiments.record import Factors

KINDS: dict[str, str] = {
    "nccl": "nccl-communicator",
    "custom_all_reduce": "custom-allreduce",
    "flashinfer_workspace": "flashinfer-workspace",
    "cuda_graphs": "cuda-graphs",
}
"""The observer's kind of resource for each factor."""

SEEN: dict[tuple[str, str], tuple[bool | None, bool | None]] = {
    # factor and level: held on every rank (True), on none (False) or not looked at (None);
    # before the teardown, after it
    ("nccl", "live"): (True, True),
    ("nccl", "suspended"): (True, None),
    ("nccl", "destroyed"): (True, False),
    ("nccl", "severed"): (None, None),  # it is there, over sockets: see SEVERED
    ("custom_all_reduce", "live"): (True, True),
    # What the engine's own close() leaves mapped is the driver's to find.
    ("custom_all_reduce", "closed-by-engine"): (True, None),
    ("custom_all_reduce", "closed"): (True, False),
    ("custom_all_reduce", "off"): (False, False),
    ("flashinfer_workspace", "live"): (True, True),
    ("flashinfer_workspace", "freed"): (True, False),
    ("flashinfer_workspace", "off"): (False, False),
    ("cuda_graphs", "none"): (False, False),
    ("cuda_graphs", "kept"): (True, True),
    ("cuda_graphs", "dropped"): (True, False),
}

SEVERED: dict[str, str] = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""The workers' settings under which NCCL has no mapping of a peer's memory."""


def launched_otherwise(
    factors: Factors, before: list[RankReply], ranks: int, environment: Mapping[str, str]
) -> list[str]:
    """Return in what the engine, before the teardown, was not what ``factors`` say."""
    severed = {name: environment.get(name) for name in SEVERED} == SEVERED
    found = _against(factors, before, ranks, moment=0)
    if severed is not (factors.nccl == "severed"):
        found.append(f"NCCL is {'' if severed else 'not '}severed by the workers' environment")
    return found


def torn_down_otherwise(factors: Factors, prepared: list[RankReply], ranks: int) -> list[str]:
    """Return in what the engine, after the teardown, was not what ``factors`` say."""
    return _against(factors, prepared, ranks, moment=1)


def _against(factors: Factors, replies: list[RankReply], ranks: int, *, moment: int) -> list[str]:
    held = resources_by_rank([reply for reply in replies if reply.in_step and reply.error is None])
    if sorted(held) != list(range(ranks)):
        return [f"the observer answered on ranks {sorted(held)} of {ranks}"]
    found: list[str] = []
    for factor, label in FACTORS.items():
        level = getattr(factors, factor)
        wanted = SEEN[factor, level.value][moment]
        having = [rank for rank, resources in held.items() if KINDS[factor] in resources.values()]
        if wanted is True and len(having) < ranks:
            found.append(f"{label} was to be there, and the observer saw it on ranks {having} of {ranks}")
        if wanted is False and having:
            found.append(f"{label} was not to be there, and the observer saw it on ranks {having}")
    return found
