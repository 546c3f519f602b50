"""Whether an engine that says that it sleeps has given its memory back, by what its ranks' devices say.

vLLM answers 200 to ``/sleep`` whatever its workers did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvsnap_conformance.engines.protocol import RankReply

_SLEEPER = ("weights", "cache")
"""What a sleep takes off the device, at level 1 and at level 2: both give up the cache, and the weights go to
the host's memory or nowhere."""


def problem(snapshots: Mapping[str, list[RankReply]], ranks: int) -> Finding | None:
    """Return what is wrong with a sleep, from the observer's snapshots ``before`` and ``asleep``.

    Findings: ``SLEEP:UNREAD`` (a rank's memory is known at one moment only, or not how much was to be freed),
    ``SLEEP:FREED_NOTHING`` (a rank has no more free memory than before), ``SLEEP:FREED_LITTLE`` (it has, and
    less than its weights and its key/value cache took). An engine whose ranks answer and have no device
    memory, on a CPU, is not judged.
    """
    before, after = (_memory(snapshots.get(moment, [])) for moment in ("before", "asleep"))
    for rank in range(ranks):
        if rank not in before or rank not in after:
            when = "before" if rank not in before else "asleep"
            return finding(f"the observer gave no answer on rank {rank} {when}", "SLEEP:UNREAD", rank=rank)
        was, now = before[rank], after[rank]
        if was is None and now is None:
            continue
        amounts = [(was or {}).get(key) for key in ("free", *_SLEEPER)]
        free = (now or {}).get("free")
        if free is None or any(amount is None for amount in amounts):
            what = f"rank {rank} told its device memory as {was} before and {now} asleep"
            return finding(what, "SLEEP:UNREAD", rank=rank)
        started, *parts = (int(amount) for amount in amounts if amount is not None)
        freed = int(free) - started
        if freed <= 0:
            return finding(
                f"rank {rank} has no more free device memory asleep than before",
                "SLEEP:FREED_NOTHING",
                rank=rank,
            )
        if freed < sum(parts):
            told = ", ".join(f"{key} {size}" for key, size in zip(_SLEEPER, parts, strict=True))
            return finding(
                f"rank {rank} has {freed} bytes more of free device memory asleep than before, and was to "
                f"have {sum(parts)} ({told})",
                "SLEEP:FREED_LITTLE",
                rank=rank,
            )
    return None


def _memory(replies: list[RankReply]) -> dict[int | None, dict[str, Any] | None]:
    """Return by rank what it told of its device's memory, ``None`` for a rank that answered and has none."""
    return {
        reply.rank: reply.value.get("memory")
        for reply in replies
        if reply.in_step and isinstance(reply.value, dict)
    }
