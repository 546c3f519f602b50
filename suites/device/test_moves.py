"""A restore onto other devices: where the processes are then, and maps that cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from nvsnap_conformance.checkpoint import device_checks
from nvsnap_conformance.checkpoint.device_ranks import MEMORY, DeviceRanks
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.checkpoint.device_ranks import DeviceObservation


@pytest.mark.clause("DEVICE-MOVED")
def test_processes_find_themselves_where_they_were_moved(
    device_kind: str,
    run_device: Callable[..., DeviceObservation],
) -> None:
    """Two processes change places; where there is one device, each is restored onto its own by name."""
    with DeviceRanks(device_kind) as ranks:
        before = ranks.devices()
        uuids = _uuids(before)
        moves = dict(zip(uuids, reversed(uuids), strict=True))
        seen = run_device(ranks, moves=moves)
        after = ranks.devices() if seen.error is None else []
    require(device_checks.check_completed(seen) + device_checks.check_carried(seen, MEMORY))
    require(device_checks.check_devices(before, after, moves))


@pytest.mark.clause("DEVICE-MAP-REFUSED")
def test_a_map_that_cannot_be_is_refused(
    device_kind: str,
    run_device: Callable[..., DeviceObservation],
) -> None:
    """A device that is not there, one that is left out, and two onto one."""
    found = []
    for what in ("not there", "left out", "two onto one"):
        with DeviceRanks(device_kind) as ranks:
            before = ranks.devices()
            uuids = _uuids(before)
            if len(uuids) < 2 and what != "not there":
                continue  # with one device no other map is wrong
            moves = {
                "not there": {uuid: uuid4().hex for uuid in uuids},
                "left out": {uuids[0]: uuids[0]},
                "two onto one": dict.fromkeys(uuids, uuids[0]),
            }[what]
            seen = run_device(ranks, moves=moves)
            after = ranks.devices() if all(seen.alive.values()) else before
        found += device_checks.check_unmoved(before, after)
        found += device_checks.check_refused(seen, "restore", f"a map of devices with one {what}")
    require(found)


def _uuids(devices: list[str]) -> list[str]:
    return sorted({told.split(" ", 1)[0] for told in devices})
