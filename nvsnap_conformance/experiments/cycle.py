"""The lifecycle of an experiment's arm: the suite's own driver, looked at once more around the checkpoint."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.lifecycle import graphs
from nvsnap_conformance.lifecycle.driver import LifecycleDriver, VerbFailed
from nvsnap_conformance.lifecycle.trace import Verb

if TYPE_CHECKING:
    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.lifecycle.driver import CycleRecord

ARM_DEVICE_SECONDS = 60.0
"""Allowance of one verb of the device layer in an arm, in seconds. Measured with tiny models at TP=2: a
checkpoint 0.9 to 2.2 s, a restore 0.5 to 0.7 s."""

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
                replies = graphs.capture(self.engine, self.hooks, deadline=deadline)
                if not graphs.captured(replies):
                    told = "; ".join(f"rank {reply.rank}: {reply.error or reply.value}" for reply in replies)
                    raise VerbFailed(f"graphs were not captured again: {told}")
            self.recapture_seconds = round(time.monotonic() - began, 6)
        super().resume(deadline)

    def on_device(self, verb: Verb, deadline: Deadline) -> None:
        """Run one verb of the device layer, within the allowance of an arm."""
        super().on_device(verb, deadline.sooner(ARM_DEVICE_SECONDS))
        if verb in _MOMENTS:
            self.between(_MOMENTS[verb])


def device_calls(record: CycleRecord) -> list[dict[str, Any]]:
    """Return the driver's answers of a whole cycle, one for each call of each process."""
    if record.failed_calls:  # all of them, those of the earlier verbs included
        return list(record.failed_calls)
    return [call for result in record.checkpoints.values() for call in result.details.get("calls", ())]
