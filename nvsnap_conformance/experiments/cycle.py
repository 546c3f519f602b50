"""The lifecycle of an experiment's arm: the suite's own driver, looked at once more around the checkpoint."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.lifecycle.driver import VERB_SECONDS, LifecycleDriver, VerbFailed
from nvsnap_conformance.lifecycle.trace import Verb

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import RankReply
    from nvsnap_conformance.lifecycle.driver import CycleRecord

ARM_DEVICE_SECONDS = 60.0
"""Allowance of one verb of the device layer in an arm, in seconds. Measured with tiny models at TP=2: a
checkpoint 0.9 to 2.2 s, a restore 0.5 to 0.7 s."""

GRAPHS_AT_ONCE = 16
"""More than the engines of the arms capture, so that one call does it."""

CHECKPOINTED, RESTORED = "checkpointed", "restored"

_MOMENTS = {Verb.CHECKPOINT: CHECKPOINTED, Verb.UNLOCK: RESTORED}


class ArmCycle(LifecycleDriver):
    """A cycle whose ``between`` is also called with ``checkpointed`` and, once all run on, ``restored``.

    With ``recapture`` the graphs that the hooks dropped are captured again before the engine serves: eager
    and captured decoding need not give the same tokens in 16-bit formats. ``recapture_seconds`` is how long
    that took.
    """

    recapture = False
    recapture_seconds: float | None = None

    def resume(self, deadline: Deadline) -> None:
        """Capture what is to be captured, then serve."""
        if self.recapture:
            began = time.monotonic()
            with self._stop_on_failure(Verb.REBUILD):
                while not self._all_captured(deadline):
                    pass
            self.recapture_seconds = round(time.monotonic() - began, 6)
        super().resume(deadline)

    def _all_captured(self, deadline: Deadline) -> bool:
        """Capture some graphs on every rank; return whether that were all."""
        if deadline.expired:
            raise DeadlineExceeded(f"capturing graphs again: not within {deadline.budget:.1f} s")
        replies = self.engine.rpc(
            "recapture", hooks=self.hooks, deadline=deadline.sooner(VERB_SECONDS), number=GRAPHS_AT_ONCE
        )
        states = [_graphs(reply) for reply in replies]
        if bad := [
            f"rank {r.rank}: {r.error or r.value}" for r, s in zip(replies, states, strict=True) if not s
        ]:
            raise VerbFailed(f"graphs were not captured again: {'; '.join(bad)}")
        return all(state == "captured" for state in states)

    def on_device(self, verb: Verb, deadline: Deadline) -> None:
        """Run one verb of the device layer, within the allowance of an arm."""
        super().on_device(verb, deadline.sooner(ARM_DEVICE_SECONDS))
        if verb in _MOMENTS:
            self.between(_MOMENTS[verb])


def _graphs(reply: RankReply) -> str:
    """Return the state of a rank's graphs, empty where there are none or their capture has failed."""
    graphs = reply.value.get("graphs") if reply.error is None and isinstance(reply.value, dict) else None
    state = str(graphs.get("state")) if isinstance(graphs, dict) else ""
    return state if state in ("eager", "capturing", "captured") else ""


def device_calls(record: CycleRecord) -> list[dict[str, Any]]:
    """Return the driver's answers of a whole cycle, one for each call of each process."""
    if record.failed_calls:  # all of them, those of the earlier verbs included
        return list(record.failed_calls)
    return [call for result in record.checkpoints.values() for call in result.details.get("calls", ())]
