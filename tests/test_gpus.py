"""GPUs by UUID: which are visible, and leases of them; over a stand-in NVML."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance import gpus
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.gpus import Lease, Nvml, lease, sizes_for, visible
from tests.stand_in_nvml import StandInNvml

if TYPE_CHECKING:
    from pathlib import Path

ONE, TWO, THREE = "GPU-1a", "GPU-1b", "GPU-3c"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    return StandInNvml(ONE, TWO, THREE)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [ONE, TWO, THREE]),
        ("1,0", [TWO, ONE]),
        ("GPU-3c,0", [THREE, ONE]),
        ("GPU-3", [THREE]),
        ("GPU-1", []),  # two of them begin so
        ("0,7,1", [ONE]),  # what names nothing ends the list
        ("0,0", [ONE]),
        ("-1", []),
        ("", []),
        ("MIG-one", ["MIG-one"]),
        ("MIG-two", []),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_show(
    nvml: StandInNvml, setting: str | None, expected: list[str]
) -> None:
    seen = visible(nvml, setting=setting)
    assert [gpu.uuid for gpu in seen.gpus] == expected
    assert seen.driver == "580.159.04"
    assert bool(seen.why_none) is not bool(expected)
    assert nvml.open == 0


def test_the_environment_restricts_what_is_visible(
    nvml: StandInNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "2")
    assert [gpu.uuid for gpu in visible(nvml).gpus] == [THREE]


def test_why_there_is_none() -> None:
    assert "Driver Not Loaded" in visible(StandInNvml(broken=True)).why_none
    assert "no GPU" in visible(StandInNvml(), setting=None).why_none
    assert "leaves none of the 1 GPUs" in visible(StandInNvml(ONE), setting="5").why_none


def test_sizes_follow_the_number_of_gpus() -> None:
    assert [sizes_for(count) for count in (0, 1, 2, 3, 4, 8, 16)] == [
        (1,), (1,), (1, 2), (1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8),
    ]  # fmt: skip


def test_peers(nvml: StandInNvml) -> None:
    with Nvml(nvml) as api:
        one, two, three = api.all_gpus()
        assert api.peers(one, two)
        nvml.device(THREE).blind_to.add(ONE)
        assert not api.peers(one, three)


def take(nvml: StandInNvml, count: int, folder: Path, seconds: float = 5.0) -> Lease:
    return lease(count, Deadline.after(seconds), module=nvml, folder=folder)


def test_leases_do_not_overlap_and_say_what_the_engine_gets(nvml: StandInNvml, tmp_path: Path) -> None:
    first, second = take(nvml, 2, tmp_path), take(nvml, 1, tmp_path)
    assert [gpu.uuid for gpu in first.gpus] == [ONE, TWO]
    assert (first.setting, second.setting) == ("0,1", "2")
    assert first.blind == ()
    assert first.release() == []
    third = take(nvml, 1, tmp_path)
    assert third.setting == "0"
    assert second.release() == third.release() == []


def test_a_mig_instance_is_given_by_its_name(
    nvml: StandInNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "MIG-one")
    held = take(nvml, 1, tmp_path)
    assert held.setting == "MIG-one"
    held.release()


def test_a_lease_says_which_gpus_do_not_see_each_other(nvml: StandInNvml, tmp_path: Path) -> None:
    nvml.device(TWO).blind_to.add(THREE)
    held = take(nvml, 3, tmp_path)
    assert held.blind == ((TWO, THREE),)
    held.release()


def test_all_or_none_is_taken(nvml: StandInNvml, tmp_path: Path) -> None:
    held = take(nvml, 2, tmp_path)
    with pytest.raises(DeadlineExceeded, match="2 GPUs that other runs give back"):
        take(nvml, 2, tmp_path, seconds=0.3)
    other = take(nvml, 1, tmp_path)  # what the refused lease had taken is free again
    assert other.setting == "2"
    held.release()
    other.release()


def test_a_lease_waits_for_another_run(nvml: StandInNvml, tmp_path: Path) -> None:
    held = take(nvml, 3, tmp_path)
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(take(nvml, 1, tmp_path).setting))
    waiting.start()
    held.release()
    waiting.join(10.0)
    assert len(found) == 1
    assert found[0] in {"0", "1", "2"}  # whichever it finds free first


def test_too_few_and_busy_gpus_are_refused_with_what_is_on_them(nvml: StandInNvml, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="4 GPUs are needed, 3 can be used"):
        take(nvml, 4, tmp_path)
    nvml.device(ONE).processes = 2
    nvml.device(TWO).used = 5 << 30
    with pytest.raises(EnvironmentFailure) as caught:
        take(nvml, 2, tmp_path)
    assert f"{ONE}: 2 processes use it" in caught.value.cause
    assert f"{TWO}: 5120 MiB are in use, by no process" in caught.value.cause
    held = take(nvml, 1, tmp_path)
    assert [gpu.uuid for gpu in held.gpus] == [THREE]
    held.release()


def test_memory_that_does_not_come_back_is_told_and_refused(nvml: StandInNvml, tmp_path: Path) -> None:
    nvml.devices = nvml.devices[:1]
    held = take(nvml, 1, tmp_path)
    nvml.device(ONE).used += 300 << 20
    (text,) = held.release(Deadline.after(0.0))
    assert "304 MiB after a lease, 4 MiB before it" in text
    with pytest.raises(EnvironmentFailure) as caught:
        take(nvml, 1, tmp_path)
    assert "the memory of an earlier run has not come back" in caught.value.cause
    nvml.device(ONE).used = 8 << 20
    again = take(nvml, 1, tmp_path)
    assert again.release() == []
    assert not list(tmp_path.glob("*.json"))


def test_a_driver_that_hangs_hosts_is_refused_by_name(nvml: StandInNvml, tmp_path: Path) -> None:
    nvml.driver = "595.71.05"
    with pytest.raises(EnvironmentFailure, match=r"driver 595\.71\.05 is refused: killing"):
        take(nvml, 1, tmp_path)


def test_a_lease_outlives_a_driver_that_went_away(nvml: StandInNvml, tmp_path: Path) -> None:
    held = take(nvml, 1, tmp_path)
    nvml.broken = True
    assert "NVML answers" in held.release()[0]
    nvml.broken = False
    again = take(nvml, 1, tmp_path)
    assert again.setting == "0"
    again.release()
