"""How fast a GPU's memory can be copied to pinned host memory and back: the bound of any checkpoint.

Measured in the engine's own interpreter, with its torch, so that nothing more has to be installed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.experiments.record import ArmOutcome, ArmRecord, PinnedCopy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PROBE_SECONDS = 120.0
"""Allowance for importing torch and for the copies, in seconds; the copies take under a second a GPU."""

_PROBE = """
import json, time, torch
BYTES, REPEATS = 1 << 30, 3
found = {"d2h": [], "h2d": []}
host = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
for number in range(torch.cuda.device_count()):
    with torch.cuda.device(number):
        there = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
        for name, to, of in (("d2h", host, there), ("h2d", there, host)):
            to.copy_(of)
            torch.cuda.synchronize()
            began = time.monotonic()
            for _ in range(REPEATS):
                to.copy_(of)
            torch.cuda.synchronize()
            found[name].append(REPEATS * BYTES / (time.monotonic() - began))
        del there
print("PINNED-COPY", json.dumps(found), flush=True)
"""


def measure(python: Path, env: Mapping[str, str], workdir: Path) -> PinnedCopy:
    """Copy 1 GiB both ways on every visible GPU; return the slowest GPU's rates.

    Raises :class:`EnvironmentFailure` where the interpreter cannot do that, and
    :class:`DeadlineExceeded`; nothing is left of the probe.
    """
    with EngineProcess.launch([str(python), "-c", _PROBE], env=env, workdir=workdir) as process:
        status = wait_for("the pinned copies", lambda: _ended(process), Deadline.after(PROBE_SECONDS))
        text = process.log_tail()
    lines = [line for line in text.splitlines() if line.startswith("PINNED-COPY ")]
    if status[0] != 0 or not lines:
        raise EnvironmentFailure(
            f"pinned copies could not be timed: the probe ended with status {status[0]}",
            cause=text[-500:],
            next_step="leave --bandwidth out: no outcome depends on it",
        )
    found: dict[str, list[float]] = json.loads(lines[-1].removeprefix("PINNED-COPY "))
    return PinnedCopy(d2h=min(found["d2h"]), h2d=min(found["h2d"]))


def _ended(process: EngineProcess) -> tuple[int] | None:
    status = process.poll()
    return None if status is None else (status,)


def speeds(arms: Sequence[ArmRecord], alone: Sequence[str], copy: PinnedCopy) -> list[dict[str, Any]]:
    """Return for each arm that ran alone what it moved (bytes, of the rank that moved most) and how fast.

    Rates in bytes per second, and as shares of the pinned copy. An arm beside which others ran shares a bus
    and cores with these, and one that did not come back has restored nothing: neither says anything of speed.
    """
    found: list[dict[str, Any]] = []
    for arm in arms:
        moved = _moved(arm)
        if arm.name not in alone or moved is None or arm.outcome not in (ArmOutcome.RIGHT, ArmOutcome.WRONG):
            continue
        if not all(arm.seconds.get(verb) for verb in ("checkpoint", "restore")):
            continue
        rates = {verb: moved / arm.seconds[verb] for verb in ("checkpoint", "restore")}
        found.append({
            "name": arm.name,
            "moved": moved,
            "checkpoint": rates["checkpoint"],
            "checkpoint_share": rates["checkpoint"] / copy.d2h,
            "restore": rates["restore"],
            "restore_share": rates["restore"] / copy.h2d,
        })  # fmt: skip
    return found


def _moved(arm: ArmRecord) -> int | None:
    held = {(reading.moment, reading.rank): reading.bytes for reading in arm.gpu_memory}
    moved = [
        before - after
        for (moment, rank), before in held.items()
        if moment == "prepared"
        and before is not None
        and (after := held.get(("checkpointed", rank))) is not None
    ]
    return max(moved, default=None)
