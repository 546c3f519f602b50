"""Real ranks, stuck on purpose: the live verdict, the recorded one, and the forms without the fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.hang import corroborate
from nvsnap_conformance.hang.bundle import collect_bundle, read_bundle
from nvsnap_conformance.hang.collectives import Entry, load
from nvsnap_conformance.hang.discover import from_ranks
from nvsnap_conformance.hang.follow import follow
from nvsnap_conformance.hang.ranks.client import RankSet
from nvsnap_conformance.hang.repro import look, run_to_end
from nvsnap_conformance.hang.verdict import Confidence, VerdictKind, judge
from nvsnap_conformance.outcomes import ConformanceFailure
from nvsnap_conformance.processes import ProcessId
from tests.planted import victims
from tests.planted.conftest import REPROS

if TYPE_CHECKING:
    from nvsnap_conformance.engines.environment import EngineEnvironment

Fork = Callable[..., RankSet]
HERE = Path(__file__).parent
SECONDS = 30.0
FALLBACK = {
    "paths": [REPROS / "rank_local_fallback" / "standin"],
    "preload": ["vllm.distributed.device_communicators.flashinfer_all_reduce"],
}


def test_fixture_deadline_gives_the_verdict_in_one_call(fork: Fork, tmp_path: Path) -> None:
    """As a fixture does it: collect at the deadline, judge, raise."""
    ranks = fork("missing_rank", options={"absent": [1]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    for rank in ranks.ranks:
        victims.in_state(rank.process.pid, "S")
    bundle = collect_bundle(
        ranks.root, ranks=ranks.ranks, folder=tmp_path / "b", deadline=Deadline.after(SECONDS)
    )
    verdict = judge(bundle)
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (1,)
    again = judge(read_bundle(tmp_path / "b"))
    assert again.to_json() == verdict.to_json()
    assert again.tree() == verdict.tree()


@pytest.mark.parametrize(
    "denied", [[3, 6], [0], [1, 2, 3, 4, 5, 6, 7]], ids=["six to two", "the first", "one left"]
)
def test_rank_local_fallback_splits_in_the_real_function(
    fork: Fork, tmp_path: Path, denied: list[int]
) -> None:
    ranks = fork("rank_local_fallback", world=8, options={"form": "today", "denied": denied}, **FALLBACK)
    ranks.wait_told("entered", Deadline.after(SECONDS))
    _, verdict = look(ranks, tmp_path / "b", Deadline.after(SECONDS))
    assert verdict.kind is VerdictKind.DIVERGED_BRANCH
    assert verdict.confidence is Confidence.HIGH
    assert {f.name for f in verdict.split} == {"get_fi_ar_workspace"}
    assert verdict.split[0].file == "vllm/distributed/device_communicators/flashinfer_all_reduce.py"
    assert verdict.split[0].line != verdict.split[1].line
    arms = {c["entry"] and c["where"].split(" ")[0]: c["ranks"] for c in verdict.to_json()["classes"]}
    assert arms == {"trtllm": denied, "mnnvl": [r for r in range(8) if r not in denied]}


@pytest.mark.parametrize("form", ["agreed", "today"])
def test_fallback_ends_where_ranks_agree_or_all_fail_alike(fork: Fork, tmp_path: Path, form: str) -> None:
    """The agreement step cures it; and a failure on every rank alike never was a hang."""
    denied = [3, 6] if form == "agreed" else list(range(8))
    ranks = fork("rank_local_fallback", world=8, options={"form": form, "denied": denied}, **FALLBACK)
    assert set(run_to_end(ranks, tmp_path).values()) == {"trtllm"}


def test_without_a_failure_every_rank_keeps_the_first_choice(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("rank_local_fallback", world=8, options={"form": "today", "denied": []}, **FALLBACK)
    assert set(run_to_end(ranks, tmp_path).values()) == {"mnnvl"}


def test_failure_carries_signature_and_evidence(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("missing_rank", options={"absent": [0]})
    with pytest.raises(ConformanceFailure) as caught:
        run_to_end(ranks, tmp_path / "b", evidence={"engine": "none"})
    assert str(caught.value.signature) == "HANG:MISSING_ARRIVAL@c10d.collective"
    assert caught.value.evidence["engine"] == "none"
    assert caught.value.evidence["verdict"]["missing"] == [0]
    assert judge(read_bundle(tmp_path / "b")).missing == (0,)


def test_slow_rank_costs_looks_and_no_verdict(fork: Fork, tmp_path: Path) -> None:
    """It works for longer than the first looks take; then all end, and nothing was called a hang."""
    ranks = fork("straggler", options={"slow": [2], "seconds": 6.0})
    assert set(run_to_end(ranks, tmp_path)) == {0, 1, 2, 3}


def test_rank_that_is_stopped_later_and_goes_on_is_forgotten(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("stopped_rank", options={"stopped": [3]})
    ranks.wait_state(3, "T", Deadline.after(SECONDS))
    _, verdict = look(ranks, tmp_path / "b", Deadline.after(SECONDS))
    assert (verdict.kind, verdict.missing) == (VerdictKind.MISSING_ARRIVAL, (3,))
    ranks.signal(3, signal.SIGCONT)
    ranks.wait_told("done", Deadline.after(SECONDS))


def test_rank_that_dies_while_it_is_watched_is_dead(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("missing_rank", options={"absent": [0, 1, 2, 3]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    ranks.signal(2, signal.SIGKILL)
    ranks.wait_exit(Deadline.after(SECONDS), ranks=[2])
    _, verdict = follow(
        from_ranks(ranks.ranks), ranks=ranks.ranks, folder=tmp_path / "b", deadline=Deadline.after(SECONDS)
    )
    assert (verdict.kind, verdict.missing) == (VerdictKind.DEAD_RANK, (2,))


def test_torchs_own_flight_recorder_agrees(fork: Fork, tmp_path: Path) -> None:
    """Dumps that torch itself wrote, over gloo: the rank that never enqueued the reduction is behind."""
    ranks = fork(HERE / "flight_recorder_ranks.py", options={"absent": 2, "folder": str(tmp_path)})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    for rank in (0, 1, 3):
        victims.in_state(ranks.ranks[rank].process.pid, "S")
    ranks.release("dump")
    ranks.wait_told("dumped", Deadline.after(SECONDS))
    (remark,) = corroborate.remarks({"flight_recorder": corroborate.read_flight_recorder(tmp_path)})
    assert "rank 2 at barrier" in remark
    assert "ranks 0-1, 3 at all_reduce" in remark


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "all of it stopped"])
def test_ranks_end_with_the_process_that_started_them(
    engine_environment: EngineEnvironment, tmp_path: Path, frozen: bool
) -> None:
    """Kill -9 of whoever started the server: server and ranks go, also where all of them are stopped."""
    code = f"""
import sys, time
from pathlib import Path
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.hang.ranks.client import RankServer
server = RankServer(Path({str(engine_environment.python)!r}))
ranks = server.run(Path({str(REPROS / "stopped_rank" / "ranks.py")!r}), world=2, options={{"stopped": [1]}})
ranks.wait_state(1, "T", Deadline.after(60))
print(server.identity["pid"], *[r.process.pid for r in ranks.ranks], flush=True)
sys.stdin.read()
"""
    root = str(HERE.parents[1])
    with victims.python(code, env={"PYTHONPATH": root, "TMPDIR": str(tmp_path)}) as (starter, line):
        started = [ProcessId.of(int(word)) for word in line.split()]
        assert len(started) == 3
        for one in [*started, starter] if frozen else []:
            assert one is not None
            one.send(signal.SIGSTOP)
            victims.in_state(one.pid, "T")
        os.kill(starter.pid, signal.SIGKILL)
        for one in started:
            assert one is not None
            victims.wait_gone(one)
    wait_for(
        "the folder to go", lambda: not list(tmp_path.glob("nvsnap-rank-server-*")), Deadline.after(20.0)
    )


ENGINE_FILES = ("vllm/", "torch/", "device_communicators/", "distributed/")
OF_OTHERS = {"vllm.custom_all_reduce": {"_gather_ipc_meta", "register_buffer"}}
"""Names that an entry has for another engine (SGLang) or another version than the one under test."""


@pytest.mark.parametrize(
    "entry",
    [e for e in load().entries if any(f.startswith(ENGINE_FILES) for f in e.files)],
    ids=lambda e: e.id,
)
def test_registry_names_functions_that_the_engine_has(
    entry: Entry, engine_environment: EngineEnvironment
) -> None:
    """Every plain name of an entry is defined in one of its files of vLLM or torch."""
    (site,) = engine_environment.python.parents[1].glob("lib/python3*/site-packages")
    text = ""
    for pattern in entry.files:
        for path in [
            *site.glob(pattern),
            *site.glob(f"vllm/distributed/{pattern}"),
            *site.glob(f"vllm/{pattern}"),
        ]:
            files = path.rglob("*.py") if path.is_dir() else [path]
            text += "".join(p.read_text(errors="replace") for p in files)
    wanted = {name for name in entry.functions if "*" not in name}
    missing = {name for name in wanted if f"def {name}(" not in text}
    assert missing == OF_OTHERS.get(entry.id, set())
