"""Proof that what came back is a restore of this engine, and not a fresh one that answers alike.

nvcf PR 965 is the reason: a restored pod had silently cold-started, passed every check, and its start-up
times were published as restore times.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RankReply
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.processes import ProcessId

PROVENANCE = HooksSpec("nvsnap_hooks.provenance:Provenance")


@dataclass(frozen=True)
class RankIdentity:
    """What identifies one rank's process: pid and create time, the planted nonce, the weights' checksum.

    ``environment`` are the variables by which it chooses its transports, with digests of their values.
    """

    rank: int
    process: ProcessId
    nonce: str | None
    weights: dict[str, Any] | None
    environment: dict[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        return {
            "rank": self.rank,
            "pid": self.process.pid,
            "create_time": self.process.create_time,
            "nonce": self.nonce,
            "weights": self.weights,
            "environment": self.environment,
        }


def plant_nonces(engine: EngineHandle, deadline: Deadline) -> dict[int, str]:
    """Put a fresh nonce into the memory of every rank's process and return it by rank."""
    nonce = secrets.token_hex(16)
    replies = engine.rpc("plant", hooks=PROVENANCE, deadline=deadline, nonce=nonce)
    return {reply.rank: nonce for reply in replies if reply.rank is not None and reply.error is None}


def take_identities(engine: EngineHandle, deadline: Deadline) -> list[RankIdentity]:
    """Read nonce, weights' checksum, environment and process identity of every rank back."""
    nonces = _by_rank(engine.rpc("recall", hooks=PROVENANCE, deadline=deadline))
    weights = _by_rank(engine.rpc("weights_checksum", hooks=PROVENANCE, deadline=deadline))
    environments = _by_rank(engine.rpc("transport_environment", hooks=PROVENANCE, deadline=deadline))
    return [
        RankIdentity(
            rank.rank,
            rank.process,
            _value(nonces.get(rank.rank), "nonce"),
            weights[rank.rank].value if rank.rank in weights and not weights[rank.rank].error else None,
            _variables(environments.get(rank.rank)),
        )
        for rank in engine.ranks(deadline)
    ]


def check_is_restore(
    planted: dict[int, str],
    before: list[RankIdentity],
    after: list[RankIdentity],
    *,
    replaces_processes: bool,
) -> list[Finding]:
    """Check that every rank still holds its nonce and that its process is the one expected.

    ``replaces_processes`` says whether the checkpointer makes new processes (then the create time must
    have changed) or continues the old ones (then it must not).
    Findings: ``PROVENANCE:RANKS``, ``PROVENANCE:NONCE``, ``PROVENANCE:PROCESS``.
    """
    found: list[Finding] = []
    old = {identity.rank: identity for identity in before}
    new = {identity.rank: identity for identity in after}
    if sorted(old) != sorted(new) or sorted(planted) != sorted(old) or not old:
        return [
            finding(
                f"ranks before {sorted(old)}, after {sorted(new)}, nonce planted on {sorted(planted)}",
                "PROVENANCE:RANKS",
            )
        ]
    for rank, nonce in planted.items():
        if new[rank].nonce != nonce:
            found.append(
                finding(
                    f"rank {rank} does not hold the nonce that was planted before the checkpoint "
                    f"(it answers {new[rank].nonce!r}): this is not a restore of that process",
                    "PROVENANCE:NONCE",
                    rank=rank,
                )
            )
        same = new[rank].process == old[rank].process
        if same is replaces_processes:
            found.append(
                finding(
                    f"rank {rank} is {'the same process as' if same else 'another process than'} before "
                    f"(pid {old[rank].process.pid} -> {new[rank].process.pid}), "
                    f"where the checkpointer {'replaces' if replaces_processes else 'continues'} processes",
                    "PROVENANCE:PROCESS",
                    rank=rank,
                )
            )
    return found


def check_weights(before: list[RankIdentity], after: list[RankIdentity]) -> list[Finding]:
    """Check that each rank's weights have the checksum that they had.

    Findings: ``WEIGHTS:CHECKSUM``, ``WEIGHTS:UNREAD`` (no checksum, or one that covered no element: an
    empty hash is no proof).
    """
    found: list[Finding] = []
    new = {identity.rank: identity.weights for identity in after}
    if not before:
        return [finding("no rank's weights were read", "WEIGHTS:UNREAD")]
    for identity in before:
        old_sum, new_sum = identity.weights, new.get(identity.rank)
        if not old_sum or not new_sum or not old_sum.get("hashed_elements"):
            found.append(
                finding(
                    f"rank {identity.rank}: no checksum over its weights could be taken "
                    f"(before {old_sum}, after {new_sum})",
                    "WEIGHTS:UNREAD",
                    rank=identity.rank,
                )
            )
        elif old_sum != new_sum:
            found.append(
                finding(
                    f"rank {identity.rank}: checksum of the weights {new_sum.get('sha256')}, "
                    f"was {old_sum.get('sha256')}",
                    "WEIGHTS:CHECKSUM",
                    rank=identity.rank,
                )
            )
    return found


def _by_rank(replies: list[RankReply]) -> dict[int, RankReply]:
    return {reply.rank: reply for reply in replies if reply.rank is not None and reply.in_step}


def _variables(reply: RankReply | None) -> dict[str, str] | None:
    if reply is None or reply.error is not None or not isinstance(reply.value, dict):
        return None
    variables = reply.value.get("variables")
    return variables if isinstance(variables, dict) else None


def _value(reply: RankReply | None, key: str) -> str | None:
    if reply is None or reply.error is not None or not isinstance(reply.value, dict):
        return None
    value = reply.value.get(key)
    return value if isinstance(value, str) else None
