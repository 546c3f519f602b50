"""What processes hold on a device, and share, taken through a cycle: one kind of state at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.checkpoint import device_checks
from nvsnap_conformance.checkpoint.device_ranks import DeviceRanks
from nvsnap_conformance.fixtures.device import each_on_gpu
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.checkpoint.device_ranks import DeviceObservation

HELD = ("graph", "pinned", "managed", "virtual", "exportable", "exported", "handle")
"""What a process can hold by itself; see :mod:`nvsnap_conformance.checkpoint.device_held`."""

SHARED = ("ipc", "descriptor")
"""What another process can map."""


@pytest.mark.clause("DEVICE-STATE-CARRIED")
@pytest.mark.parametrize(("device_kind", "holding"), each_on_gpu(HELD), indirect=["device_kind"])
def test_what_a_process_holds_works_again(
    device_kind: str,
    holding: str,
    run_device: Callable[..., DeviceObservation],
) -> None:
    """Each of two processes holds one kind of state, and uses it after the cycle as before."""
    with DeviceRanks(device_kind, holding=holding) as ranks:
        seen = run_device(ranks)
    require(device_checks.check_carried(seen, holding))


@pytest.mark.clause("DEVICE-SHARED-KNOWN")
@pytest.mark.parametrize(
    ("device_kind", "holding"), each_on_gpu(SHARED, apart=True), indirect=["device_kind"]
)
def test_what_is_mapped_from_a_peer_is_carried_or_refused(
    device_kind: str,
    holding: str,
    run_device: Callable[..., DeviceObservation],
) -> None:
    """One process has memory of the other mapped, all through the cycle."""
    with DeviceRanks(device_kind, holding=holding) as ranks:
        ranks.share()
        seen = run_device(ranks)
    require(device_checks.check_carried(seen, holding))


@pytest.mark.clause("DEVICE-CLOSED-CARRIED")
@pytest.mark.parametrize(
    ("device_kind", "holding"), each_on_gpu(SHARED, apart=True), indirect=["device_kind"]
)
def test_what_a_peer_has_closed_goes_and_can_be_mapped_again(
    device_kind: str,
    holding: str,
    run_device: Callable[..., DeviceObservation],
) -> None:
    """One process maps and closes memory of the other; after the cycle it maps that again, and new memory."""
    with DeviceRanks(device_kind, holding=holding) as ranks:
        ranks.share()
        ranks.close_shared()
        seen = run_device(ranks, afterwards=ranks.share_again)
    require(device_checks.check_completed(seen) + device_checks.check_carried(seen, holding))
    require(device_checks.check_shared_again(seen, holding))
