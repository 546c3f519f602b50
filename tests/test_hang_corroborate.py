"""Evidence beside the stacks: read, summed up, and never trusted further than it reaches."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.hang import corroborate
from nvsnap_conformance.hang.verdict import judge
from tests.planted import synthetic as make

if TYPE_CHECKING:
    from pathlib import Path


def entry(sequence: int, name: str, *, retired: bool, group: str = "default_pg") -> dict[str, Any]:
    """An entry as torch 2.13 writes it, the fields that are read."""
    return {
        "collective_seq_id": sequence,
        "profiling_name": name,
        "process_group": ("0", group),
        "state": "scheduled",
        "retired": retired,
        "is_p2p": False,
        "input_sizes": [[4]],
    }


def dump(folder: Path, rank: int, entries: list[dict[str, Any]], *, as_json: bool = False) -> None:
    data = {"version": "2.10", "pg_config": {}, "entries": entries}
    if as_json:
        (folder / f"trace_{rank}.json").write_text(json.dumps(data))
    else:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(data))


@pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "json"])
def test_flight_recorder_names_the_rank_that_is_behind(tmp_path: Path, as_json: bool) -> None:
    for rank in range(4):
        entries = [entry(16, "gloo:broadcast", retired=True)]
        if rank != 2:
            entries.append(entry(17, "gloo:all_reduce", retired=False))
        dump(tmp_path, rank, entries, as_json=as_json)
    evidence = {"flight_recorder": corroborate.read_flight_recorder(tmp_path)}
    (remark,) = corroborate.remarks(json.loads(json.dumps(evidence)))
    assert "ranks 0-1, 3 at all_reduce #17 (pending)" in remark
    assert "rank 2 at broadcast #16 (done)" in remark


def test_flight_recorder_where_all_is_done_says_nothing(tmp_path: Path) -> None:
    for rank in range(2):
        dump(tmp_path, rank, [entry(3, "nccl:all_reduce", retired=True)])
    assert corroborate.remarks({"flight_recorder": corroborate.read_flight_recorder(tmp_path)}) == []


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch evil-was-here",)


def test_dump_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match="no flight recorder dump"):
        corroborate.read_flight_recorder(tmp_path)
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\x80\x04nonsense",
        b"hello",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",  # bytes of 2**63 - 1 length
        b"\x80\x04\x96" + b"\xff" * 7 + b"\x7f",  # a bytearray of that length
        b"Nr\xff\xff\xff\xff.",  # the 2**32nd value put aside
        b"Nq\x05.",
        b"Np-1\n.",
        b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.",  # a frame of that length
        b"\x82\x01.",  # a class by its code
        b"NI1\nb.",  # state for what can have none
        b"L" + b"9" * 5000 + b"L\n.",
        b"[" * 10,
    ],
)
def test_what_is_no_dump_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)
    with pytest.raises(UsageError):
        corroborate.read_flight_recorder(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"process_group": [["x"], 5]},
        {"process_group": 7},
        {"process_group": ("only",)},
        {"input_sizes": 5},
        {"input_sizes": [[1] * 1000]},
        {"input_sizes": [["a"]]},
        {"collective_seq_id": 10**5000},
        {"collective_seq_id": True},
        {"profiling_name": "\ud800"},
    ],
)
def test_strange_values_in_a_dump_end_in_text(tmp_path: Path, changes: dict[str, Any]) -> None:
    dump(tmp_path, 0, [{**entry(3, "nccl:all_reduce", retired=False), **changes}])
    found = corroborate.read_flight_recorder(tmp_path)
    assert all("#3" in remark for remark in corroborate.remarks({"flight_recorder": found}))
    json.dumps(found)


def test_dump_that_names_one_list_over_and_over_stays_small(tmp_path: Path) -> None:
    """Each level holds the one below twice: written out, 2**60 values."""
    nest: list[Any] = []
    for _ in range(60):
        nest = [nest, nest]
    changes = {"process_group": ("0", nest), "input_sizes": nest, "state": nest}
    dump(tmp_path, 0, [{**entry(3, "nccl:all_reduce", retired=False), **changes}])
    assert len(json.dumps(corroborate.read_flight_recorder(tmp_path))) < 1000


def test_counts_that_cannot_be_printed_are_left_out() -> None:
    """Two numbers of as many digits as Python prints have a sum of more."""
    longest = 10**4300 - 1
    polls = [ras({0: longest, 1: longest}), ras({0: longest, 1: longest})]
    for poll in polls:
        for rank in poll["communicators"][0]["ranks"]:
            rank["collective_counts"] = {"AllReduce": longest, "Broadcast": longest}
    corroborate.remarks({"nccl_ras": polls})
    uneven = [ras({0: 0, 1: 5}), ras({0: 0, 1: 5})]
    for poll in uneven:
        poll["communicators"][0]["ranks"][1]["collective_counts"] = {"A": longest, "B": longest}
    assert "up to" not in "".join(corroborate.remarks({"nccl_ras": uneven}))


@pytest.mark.parametrize("rank", ["²", "9" * 5000, "-1", "x"])
def test_rank_that_is_no_number_is_left_out(rank: str) -> None:
    evidence = {"flight_recorder": {rank: {"default": {"sequence": 1}}}}
    assert corroborate.remarks(evidence) == []


def test_dump_without_the_right_to_read_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump(tmp_path, 0, [])

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(corroborate, "read_bytes", denied)
    with pytest.raises(UsageError, match=r"nccl_trace_rank_0 cannot be read: Permission denied"):
        corroborate.read_flight_recorder(tmp_path)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no flight recorder dump in"):
        corroborate.read_flight_recorder(tmp_path)
    with pytest.raises(UsageError):
        corroborate.read_flight_recorder(tmp_path / "none")


def ras(counts: dict[int, int], *, missing: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """An answer in the layout of NCCL 2.28 (src/ras/client_support.cc)."""
    return {
        "nccl_version": "2.28.9",
        "communicators": [
            {
                "hash": "0xabc",
                "size": 4,
                "ranks": [
                    {
                        "rank": rank,
                        "pid": 100 + rank,
                        "status": {"init_state": 0},
                        "collective_counts": {"AllReduce": n},
                    }
                    for rank, n in counts.items()
                ],
                "missing_ranks": missing or [],
            }
        ],
    }


def test_frozen_equal_counts_are_told(tmp_path: Path) -> None:
    """In real wedges counters freeze equal: that they stand still says more than that they agree."""
    path = tmp_path / "ras.json"
    path.write_text(json.dumps(ras(dict.fromkeys(range(4), 17))))
    poll = corroborate.read_ras(path)
    (remark,) = corroborate.remarks({"nccl_ras": [poll, poll]})
    assert "stood still over 2 polls" in remark
    assert "equally often" in remark


def test_one_behind_is_told_and_called_normal() -> None:
    poll = ras({0: 17, 1: 17, 2: 16, 3: 17})
    (remark,) = corroborate.remarks({"nccl_ras": [poll, poll]})
    assert "up to 1 behind on rank 2 (one behind alone proves nothing)" in remark


def test_moving_counts_say_nothing() -> None:
    assert corroborate.remarks({"nccl_ras": [ras({0: 1, 1: 1}), ras({0: 9, 1: 9})]}) == []


def test_unresponsive_peer_is_named() -> None:
    missing = [{"rank": 3, "pid": 77, "status": {"unresponsive": True, "considered_dead": False}}]
    (remark,) = corroborate.remarks({"nccl_ras": [ras({0: 1, 1: 1, 2: 1}, missing=missing)]})
    assert "rank 3 (pid 77) unresponsive" in remark


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"communicators": 3}'])
def test_what_is_no_ras_answer_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ras.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no JSON answer of ncclras"):
        corroborate.read_ras(path)


def nvml(utilization: int, power: float) -> dict[str, Any]:
    return {"gpu": "GPU-1", "utilization": utilization, "power": power, "limit": 700.0}


@pytest.mark.parametrize(
    ("polls", "says"),
    [
        ([nvml(100, 140.0), nvml(100, 141.0)], "spins"),
        ([nvml(0, 90.0), nvml(0, 90.0)], "nothing was launched"),
        ([nvml(100, 650.0), nvml(100, 650.0)], ""),
        ([nvml(100, 140.0)], ""),
    ],
    ids=["spinning", "idle", "working", "one poll"],
)
def test_utilisation_and_power_together(polls: list[dict[str, Any]], says: str) -> None:
    found = corroborate.remarks({"nvml": polls})
    assert len(found) == bool(says)
    assert says in " ".join(found)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=15,
)


@given(
    st.dictionaries(
        st.sampled_from(["progress", "flight_recorder", "nccl_ras", "nvml", "other"]), json_values
    )
)
def test_malformed_evidence_never_turns_or_crashes_a_verdict(evidence: dict[str, Any]) -> None:
    stacks = {rank: [make.collective("all_reduce")] * 3 for rank in range(3)}
    stacks[2] = [make.at("handler")] * 3
    plain, told = judge(make.bundle(stacks)), judge(make.bundle(stacks, evidence=evidence))
    assert (plain.kind, plain.missing) == (told.kind, told.missing)


def test_gpus_without_a_driver_are_no_evidence() -> None:
    assert corroborate.poll_nvml([]) == []
