"""Every verdict from synthetic bundles, and the words it comes with."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.hang.model import Bundle, Frame, Round, Rung, Thread
from nvsnap_conformance.hang.signs import SURE_ROUNDS
from nvsnap_conformance.hang.verdict import Confidence, VerdictKind, judge
from nvsnap_conformance.outcomes import Outcome, Signature
from tests.planted import synthetic as make

if TYPE_CHECKING:
    from collections.abc import Sequence

WAIT = make.collective("all_reduce")


CPU_COMMUNICATOR = "vllm/distributed/device_communicators/cpu_communicator.py"


def still(stack: make.Stack | None, rounds: int = 3) -> list[make.Stack | None]:
    return [stack] * rounds


def ranks(count: int, stack: make.Stack, **others: make.Stack | None) -> dict[int, list[make.Stack | None]]:
    stacks: dict[int, list[make.Stack | None]] = {rank: still(stack) for rank in range(count)}
    stacks |= {int(name[1:]): still(other) for name, other in others.items()}
    return stacks


def test_seed_shape_is_a_divergence_with_its_split() -> None:
    stacks = {rank: still(make.arm("trtllm" if rank in (3, 6) else "mnnvl")) for rank in range(8)}
    verdict = judge(make.bundle(stacks))
    assert verdict.kind is VerdictKind.DIVERGED_BRANCH
    assert verdict.confidence is Confidence.HIGH
    assert verdict.missing == (3, 6)
    assert [f.line for f in verdict.split] == [226, 233]
    assert {f.name for f in verdict.split} == {"get_fi_ar_workspace"}
    text = verdict.paragraph()
    assert "6 ranks (0-2, 4-5, 7) in mnnvl workspace" in text
    assert "2 ranks (3, 6) in trtllm workspace" in text
    assert "flashinfer_all_reduce.py:226 and 233" in text
    assert verdict.signature == Signature("HANG", "DIVERGED_BRANCH", "flashinfer.ar_workspace")
    assert Signature.parse("HANG:DIVERGED_BRANCH").matches(verdict.signature)
    assert verdict.outcome is Outcome.HANG


def test_exclusive_arms_are_a_divergence_even_with_a_rank_elsewhere() -> None:
    stacks = {rank: still(make.arm("mnnvl")) for rank in range(5)}
    stacks |= {5: still(make.arm("trtllm")), 6: still(make.at("helper"))}
    verdict = judge(make.bundle(stacks))
    assert verdict.kind is VerdictKind.DIVERGED_BRANCH
    assert "besides, 1 rank (6)" in verdict.summary


def test_two_operations_of_one_group_diverge() -> None:
    stacks = ranks(
        6, make.collective("barrier"), r4=make.collective("broadcast"), r5=make.collective("broadcast")
    )
    verdict = judge(make.bundle(stacks))
    assert verdict.kind is VerdictKind.DIVERGED_BRANCH
    assert verdict.missing == (4, 5)


def test_one_operation_from_two_places_diverges_with_less_confidence() -> None:
    other = make.collective("all_reduce", (*make.WORK[:-1], make.at("swapped", 7)[-1]))
    verdict = judge(make.bundle(ranks(4, WAIT, r3=other)))
    assert verdict.kind is VerdictKind.DIVERGED_BRANCH
    assert verdict.confidence is Confidence.MEDIUM


def test_root_and_leaves_inside_one_call_are_one_place() -> None:
    """Lines inside of the library differ between a broadcast's root and its leaves: no divergence."""
    root = (
        *make.WORK,
        Frame("broadcast_object_list", make.C10D, 3000),
        Frame("broadcast", make.C10D, 2800),
    )
    leaf = (
        *make.WORK,
        Frame("broadcast_object_list", make.C10D, 3020),
        Frame("broadcast", make.C10D, 2800),
    )
    verdict = judge(make.bundle({0: still(root), 1: still(leaf), 2: still(leaf)}))
    assert verdict.kind is VerdictKind.ALL_TOGETHER


def test_different_operations_with_a_rank_missing_are_no_divergence() -> None:
    """A broadcast's root passes on while a leaf below a missing rank still waits."""
    stacks = ranks(4, make.collective("all_reduce"), r2=make.collective("broadcast"), r3=make.at("elsewhere"))
    verdict = judge(make.bundle(stacks))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (3,)


@pytest.mark.parametrize(
    "absent",
    [make.at("handler"), make.IDLE, (*make.WORK, Frame("Queue.get", "queue.py", 171))],
    ids=["elsewhere", "idle", "waits for another thing"],
)
def test_missing_rank_is_named(absent: make.Stack) -> None:
    verdict = judge(make.bundle(ranks(8, WAIT, r5=absent)))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (5,)
    assert "7 ranks (0-4, 6-7) in all_reduce" in verdict.summary
    assert "missing: 1 rank (5)" in verdict.summary


def test_the_majority_may_be_what_is_missing() -> None:
    verdict = judge(make.bundle(ranks(8, make.at("serve"), r2=WAIT)))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (0, 1, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("state", ["T", "t"])
def test_stopped_rank_is_missing_even_inside_the_collective(state: str) -> None:
    bundle = make.bundle(ranks(4, WAIT), state={3: state}, rung={3: Rung.NONBLOCKING})
    verdict = judge(bundle)
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (3,)
    assert "stopped" in verdict.summary


def test_uninterruptible_rank_without_a_stack_is_missing() -> None:
    bundle = make.bundle(ranks(4, WAIT, r1=None), state={1: "D"}, wchan={1: "uvm_va_space_mm_unregister"})
    verdict = judge(bundle)
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (1,)
    assert "uvm_va_space_mm_unregister" in verdict.summary


def test_moving_rank_is_a_straggler() -> None:
    stacks = ranks(4, WAIT)
    stacks[2] = [make.at("a"), make.at("b"), make.at("c")]
    verdict = judge(make.bundle(stacks))
    assert verdict.kind is VerdictKind.STRAGGLER
    assert verdict.missing == (2,)
    assert not verdict.is_hang
    assert verdict.outcome is Outcome.FAILED


PHASES = {
    "compile": ("_compile", "torch/_dynamo/convert_frame.py"),
    "inductor": ("Scheduler.codegen", "torch/_inductor/scheduler.py"),
    "triton": ("compile", "triton/compiler/compiler.py"),
    "capture": ("GPUModelRunner.capture_model", "vllm/v1/worker/gpu_model_runner.py"),
    "weights": ("DefaultModelLoader.load_weights", "vllm/model_executor/model_loader/default_loader.py"),
    "import": ("_find_and_load", "<frozen importlib._bootstrap>"),
    "sglang capture": (
        "DecodeCudaGraphRunner.capture",
        "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py",
    ),
}


@pytest.mark.parametrize("name", PHASES)
def test_long_phase_of_one_rank_is_no_hang_while_it_works(name: str) -> None:
    function, file = PHASES[name]
    phase = make.at(function, 100, file=file)
    verdict = judge(make.bundle(ranks(4, WAIT, r1=phase), cpu={1: 0.9}))
    assert verdict.kind is VerdictKind.STRAGGLER
    assert verdict.missing == (1,)


@pytest.mark.parametrize("name", PHASES)
def test_long_phase_of_all_ranks_is_progress(name: str) -> None:
    function, file = PHASES[name]
    verdict = judge(make.bundle(ranks(4, make.at(function, 100, file=file)), cpu=0.9))
    assert verdict.kind is VerdictKind.PROGRESSING


def test_phase_that_waits_for_working_children_is_progress() -> None:
    """Inductor and nvcc compile in children; the rank itself sleeps in a future."""
    phase = (
        *make.at("compile_fx", 5, file="torch/_inductor/compile_fx.py"),
        Frame("Future.result", "concurrent/futures/_base.py", 451),
    )
    verdict = judge(make.bundle(ranks(4, WAIT, r1=phase), tree_cpu={1: 1.8}))
    assert verdict.kind is VerdictKind.STRAGGLER


def test_phase_without_a_sign_of_work_is_told_and_not_flagged() -> None:
    """It may wait for a disk, a download or another rank's lock."""
    function, file = PHASES["weights"]
    verdict = judge(make.bundle(ranks(4, WAIT, r1=make.at(function, 100, file=file))))
    assert (verdict.kind, verdict.confidence) == (VerdictKind.STRAGGLER, Confidence.LOW)
    assert verdict.missing == (1,)


def test_collective_inside_a_phase_is_a_collective() -> None:
    """The seed's hang sat inside torch.compile."""
    compiling = (*make.WORK, Frame("_compile", "torch/_dynamo/convert_frame.py", 9))
    stacks = {rank: still((*compiling, *make.arm("trtllm" if rank == 1 else "mnnvl"))) for rank in range(4)}
    assert judge(make.bundle(stacks)).kind is VerdictKind.DIVERGED_BRANCH


def test_silent_burner_needs_native_frames_and_rounds() -> None:
    """Work in one line looks like an endless loop at first: that is no hang yet, and says so."""
    burning = make.at("loop")
    few = judge(make.bundle(ranks(4, WAIT, r3=burning), cpu={3: 1.0}, rung={3: Rung.NATIVE}))
    assert (few.kind, few.confidence) == (VerdictKind.STRAGGLER, Confidence.LOW)
    assert few.missing == (3,)
    stacks = {rank: still(WAIT if rank != 3 else burning, SURE_ROUNDS) for rank in range(4)}
    blind = judge(make.bundle(stacks, cpu={3: 1.0}))
    assert (blind.kind, blind.confidence) == (VerdictKind.STRAGGLER, Confidence.LOW)
    sure = judge(make.bundle(stacks, cpu={3: 1.0}, rung={3: Rung.NATIVE}))
    assert (sure.kind, sure.confidence) == (VerdictKind.MISSING_ARRIVAL, Confidence.MEDIUM)
    assert sure.missing == (3,)


def test_burner_with_little_of_a_crowded_machine_burns_all_the_same() -> None:
    verdict = judge(make.bundle(ranks(4, WAIT, r3=make.at("loop")), cpu={3: 0.05}))
    assert verdict.kind is VerdictKind.STRAGGLER


def test_everyone_burning_at_one_place_is_no_standing_wait() -> None:
    assert not judge(make.bundle(ranks(4, make.at("loop")), cpu=0.9)).is_hang


def test_rank_that_waits_for_children_at_work_comes() -> None:
    waiting = (*make.at("build"), Frame("Popen.communicate", "subprocess.py", 1209))
    working = judge(make.bundle(ranks(4, WAIT, r3=waiting), tree_cpu={3: 0.3}))
    assert working.kind is VerdictKind.STRAGGLER
    standing = judge(make.bundle(ranks(4, WAIT, r3=waiting)))
    assert standing.kind is VerdictKind.MISSING_ARRIVAL
    # On a crowded machine no child of theirs may get a core between two looks.
    assert judge(make.bundle(ranks(4, WAIT, r3=waiting), tree_runnable={3: 1})).kind is VerdictKind.STRAGGLER
    assert judge(make.bundle(ranks(4, waiting))).is_hang
    assert not judge(make.bundle(ranks(4, waiting), tree_runnable=1)).is_hang


def test_one_rank_in_a_collective_waits_for_ranks_that_were_not_found() -> None:
    """A starting engine whose other workers have no title yet: nothing can be said of those."""
    verdict = judge(make.bundle(ranks(1, WAIT)))
    assert (verdict.kind, verdict.is_hang) == (VerdictKind.UNKNOWN, False)
    assert judge(make.bundle(ranks(2, WAIT))).is_hang


def test_native_arithmetic_is_work() -> None:
    computing = (*make.at("matmul"), Frame("at::native::cpublas::gemm", "libtorch_cpu.so", 0, True))
    verdict = judge(make.bundle(ranks(4, WAIT, r3=computing), cpu={3: 1.0}, rung={3: Rung.NATIVE}))
    assert verdict.kind is VerdictKind.STRAGGLER


GEMM = (*make.at("matmul"), Frame("at::native::cpublas::gemm", "libtorch_cpu.so", 0, True))


@pytest.mark.parametrize("place", [GEMM, make.at("loop")], ids=["arithmetic", "other"])
@pytest.mark.parametrize("queued", [0.9, None], ids=["schedstat", "states alone"])
def test_rank_that_waits_for_a_core_is_not_stuck(place: make.Stack, queued: float | None) -> None:
    """Runnable in every look and without CPU: it could not have gone on, however often it is looked at."""
    stacks = {rank: still(WAIT if rank != 3 else place, SURE_ROUNDS) for rank in range(4)}
    rung = {3: Rung.NATIVE}
    waiting = make.bundle(
        stacks, cpu={3: 0.01}, state={3: "R"}, queued={3: queued} if queued else {}, rung=rung
    )
    assert not judge(waiting).is_hang
    asleep = make.bundle(stacks, cpu={3: 0.01}, state={3: "S"}, queued={3: 0.0}, rung=rung)
    assert judge(asleep).kind is VerdictKind.MISSING_ARRIVAL
    # Woken now and then on a crowded machine, it waits for a core, but every look finds it asleep.
    woken = make.bundle(stacks, cpu={3: 0.01}, state={3: "S"}, queued={3: 0.3}, rung=rung)
    assert judge(woken).kind is VerdictKind.MISSING_ARRIVAL
    # The kernel says that it never waited: then it had its core and did not use it.
    idle = make.bundle(stacks, cpu={3: 0.01}, state={3: "R"}, queued={3: 0.0}, rung=rung)
    assert judge(idle).kind is VerdictKind.MISSING_ARRIVAL


def test_native_endless_loop_on_a_crowded_machine_is_found() -> None:
    stacks = {rank: still(WAIT if rank != 3 else make.at("loop"), SURE_ROUNDS) for rank in range(4)}
    verdict = judge(make.bundle(stacks, cpu={3: 0.1}, state={3: "R"}, queued={3: 0.9}, rung={3: Rung.NATIVE}))
    assert (verdict.kind, verdict.missing) == (VerdictKind.MISSING_ARRIVAL, (3,))


def test_memory_that_is_touched_is_work() -> None:
    verdict = judge(make.bundle(ranks(4, WAIT, r3=make.at("sort")), cpu={3: 1.0}, faults={3: 5000.0}))
    assert verdict.kind is VerdictKind.STRAGGLER


def test_cpu_time_of_a_waiting_rank_is_no_progress() -> None:
    spin = (
        *make.WORK,
        Frame(
            "_CPUSHMDistributed.all_reduce", "vllm/distributed/device_communicators/cpu_communicator.py", 275
        ),
    )
    spinning = {rank: 1.0 for rank in range(8) if rank != 2}
    verdict = judge(make.bundle(ranks(8, spin, r2=make.at("handler")), cpu=spinning))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert "burning CPU" in verdict.paragraph()


def test_collectives_one_after_the_other_are_no_standing_wait() -> None:
    """A tight loop of collectives shows one stack in every look; its threads wake and work all the time."""
    verdict = judge(make.bundle(ranks(4, WAIT), switches=60.0, cpu=0.1))
    assert (verdict.kind, verdict.confidence) == (VerdictKind.PROGRESSING, Confidence.LOW)


def test_loop_over_two_collectives_is_no_divergence() -> None:
    """A broadcast's root is one collective ahead of its leaves, look after look."""
    stacks = ranks(4, make.collective("broadcast"), r0=WAIT)
    assert judge(make.bundle(stacks, switches=60.0, cpu=0.1)).kind is VerdictKind.PROGRESSING
    assert judge(make.bundle(stacks)).kind is VerdictKind.DIVERGED_BRANCH


def test_collective_in_which_all_sleep_is_stuck() -> None:
    verdict = judge(make.bundle(ranks(4, WAIT), switches=4.0))
    assert verdict.kind is VerdictKind.ALL_TOGETHER


def test_collective_that_polls_is_a_standing_wait() -> None:
    """NCCL's blocking wait looks every millisecond: many switches, next to no CPU."""
    assert judge(make.bundle(ranks(4, WAIT), switches=900.0, cpu=0.009)).kind is VerdictKind.ALL_TOGETHER
    missing = judge(make.bundle(ranks(4, WAIT, r1=make.at("handler")), switches=900.0, cpu={0: 0.009}))
    assert missing.kind is VerdictKind.MISSING_ARRIVAL


def test_collective_in_which_all_spin_takes_more_looks_or_a_counter() -> None:
    spin = (*make.WORK, Frame("_CPUSHMDistributed.all_reduce", CPU_COMMUNICATOR, 275))
    few = judge(make.bundle(ranks(4, spin), cpu=1.0))
    assert (few.kind, few.confidence) == (VerdictKind.PROGRESSING, Confidence.LOW)
    many = judge(make.bundle({rank: still(spin, SURE_ROUNDS) for rank in range(4)}, cpu=1.0))
    assert many.kind is VerdictKind.ALL_TOGETHER
    polls = [{"at": float(i), "counter": 7.0, "pending": True} for i in range(3)]
    counted = judge(make.bundle(ranks(4, spin), cpu=1.0, evidence={"progress": polls}))
    assert counted.kind is VerdictKind.ALL_TOGETHER


def test_everyone_at_one_outside_wait_is_together() -> None:
    waiting = (*make.at("ask_agent"), Frame("SocketIO.readinto", "socket.py", 706))
    verdict = judge(make.bundle(ranks(8, waiting)))
    assert verdict.kind is VerdictKind.ALL_TOGETHER
    assert verdict.missing == ()


LAUNCH = (*make.at("mlp", 5), Frame("cudaLaunchKernel", "libcudart.so.13", 0, True))
DEVICE = (*make.at("sampler", 9), Frame("synchronize", "torch/cuda/__init__.py", 1000))


def gpus(utilization: int, power: float) -> dict[str, object]:
    polls = [
        {"gpu": f"GPU-{rank}", "utilization": utilization, "power": power, "limit": 700.0}
        for rank in range(4)
    ]
    return {"nvml": polls * 2}


@pytest.mark.parametrize("power", [150.0, 90.0], ids=["spinning", "idle"])
def test_hosts_in_device_waits_are_a_jam_whatever_their_frames(power: float) -> None:
    """Ranks sit in different frames once their launch queues are full (vLLM RFC 48720): no divergence."""
    evidence = gpus(100 if power > 100 else 0, power)
    stacks = ranks(4, DEVICE, r1=LAUNCH, r2=LAUNCH)
    verdict = judge(make.bundle(stacks, rung=Rung.NATIVE, cpu=1.0, evidence=evidence))
    assert (verdict.kind, verdict.confidence) == (VerdictKind.DEVICE_JAM, Confidence.MEDIUM)
    assert verdict.outcome is Outcome.HANG


@pytest.mark.parametrize("evidence", [None, gpus(100, 650.0)], ids=["no other source", "working GPUs"])
def test_device_waits_alone_are_no_certain_hang(evidence: dict[str, object] | None) -> None:
    """A long prefill looks the same from the hosts."""
    verdict = judge(make.bundle(ranks(4, DEVICE), cpu=1.0, evidence=evidence))
    assert (verdict.kind, verdict.confidence) == (VerdictKind.DEVICE_JAM, Confidence.LOW)
    assert not verdict.is_hang
    assert verdict.outcome is Outcome.UNKNOWN


def test_flight_recorder_names_the_rank_that_did_not_launch() -> None:
    """All hosts are past the launch; the recorder sees who never launched what the others wait in."""
    dumps = {
        str(rank): {"tp": {"sequence": 17 - (rank == 2), "operation": "all_reduce", "completed": rank == 2}}
        for rank in range(4)
    }
    verdict = judge(make.bundle(ranks(4, DEVICE), cpu=1.0, evidence={"flight_recorder": dumps}))
    assert (verdict.kind, verdict.confidence) == (VerdictKind.DEVICE_JAM, Confidence.MEDIUM)
    assert verdict.missing == (2,)
    assert "rank 2 launched less" in verdict.summary


def test_decode_loop_before_the_device_is_at_work() -> None:
    verdict = judge(make.bundle(ranks(4, DEVICE), cpu=0.6, switches=500.0, evidence=gpus(100, 150.0)))
    assert not verdict.is_hang


def test_whole_engine_stopped_is_said() -> None:
    stacks = ranks(4, WAIT, r1=make.IDLE)
    verdict = judge(make.bundle(stacks, state="T", rung=Rung.NONBLOCKING))
    assert verdict.kind is VerdictKind.ALL_TOGETHER
    assert "the whole engine is frozen" in verdict.summary


def test_certain_and_doubtful_ranks_are_told_apart() -> None:
    waiting = (*make.WORK, Frame("Queue.get", "queue.py", 171))
    verdict = judge(make.bundle(ranks(4, WAIT, r1=waiting, r2=make.at("loop")), cpu={2: 1.0}))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (1,)
    assert "on the way: 1 rank (2)" in verdict.summary


def test_dead_rank_is_named() -> None:
    bundle = make.bundle(ranks(4, WAIT), rung={2: Rung.GONE})
    verdict = judge(bundle)
    assert verdict.kind is VerdictKind.DEAD_RANK
    assert verdict.missing == (2,)
    assert verdict.outcome is Outcome.CRASH
    assert not verdict.is_hang


def test_zombie_is_dead() -> None:
    assert judge(make.bundle(ranks(4, WAIT, r2=None), state={2: "Z"})).kind is VerdictKind.DEAD_RANK


def test_rank_without_a_sample_is_not_called_dead() -> None:
    """Partial data: a death is seen (the rung GONE), and never concluded from what is not there."""
    bundle = make.bundle(ranks(4, WAIT))
    rounds = tuple(
        replace(one, samples=tuple(s for s in one.samples if s.pid != 1002)) for one in bundle.rounds
    )
    verdict = judge(replace(bundle, rounds=rounds))
    assert verdict.kind is VerdictKind.UNKNOWN
    assert verdict.missing == (2,)
    assert "no sample of it is there" in verdict.tree()
    assert "gone" not in verdict.tree()


def test_rank_that_nobody_saw_is_told_beside_those_that_are_missing() -> None:
    bundle = make.bundle(ranks(5, WAIT, r3=make.at("handler"), r4=None))
    verdict = judge(bundle)
    assert (verdict.kind, verdict.missing) == (VerdictKind.MISSING_ARRIVAL, (3,))
    assert "not told: 1 rank (4) unreadable" in verdict.summary
    assert verdict.confidence is Confidence.MEDIUM


def test_rank_that_was_seen_once_is_not_said_to_have_no_stack() -> None:
    verdict = judge(make.bundle({0: still(WAIT), 1: [WAIT, None, None]}))
    assert verdict.kind is VerdictKind.UNKNOWN
    assert "seen once only, at all_reduce" in verdict.tree()


def test_rank_that_was_never_found_is_dead() -> None:
    verdict = judge(make.bundle(ranks(3, WAIT), world=4))
    assert verdict.kind is VerdictKind.DEAD_RANK
    assert verdict.missing == (3,)


def test_idle_ranks_and_a_waiting_core_are_control_only() -> None:
    verdict = judge(make.bundle(ranks(4, make.IDLE), fronts=[(make.front(), still(make.CORE_WAITS))]))
    assert verdict.kind is VerdictKind.CONTROL_ONLY
    assert verdict.is_hang


def test_pending_requests_are_enough_for_control_only() -> None:
    polls = [{"at": float(i), "counter": 7.0, "pending": True} for i in range(3)]
    bundle = make.bundle(
        ranks(4, make.IDLE), fronts=[(make.front(), still(make.CORE_IDLE))], evidence={"progress": polls}
    )
    assert judge(bundle).kind is VerdictKind.CONTROL_ONLY


def test_idle_engine_is_no_hang() -> None:
    verdict = judge(make.bundle(ranks(4, make.IDLE), fronts=[(make.front(), still(make.CORE_IDLE))]))
    assert verdict.kind is VerdictKind.PROGRESSING
    assert "idle" in verdict.summary


def test_rank_that_never_answers_the_core_is_missing() -> None:
    """Three ranks are done and idle, the fourth sits in a handler, the core waits for its answer."""
    bundle = make.bundle(
        ranks(4, make.IDLE, r3=make.at("handler")), fronts=[(make.front(), still(make.CORE_WAITS))]
    )
    verdict = judge(bundle)
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (3,)


def test_unreadable_rank_leaves_it_open() -> None:
    verdict = judge(make.bundle(ranks(4, WAIT, r3=None)))
    assert verdict.kind is VerdictKind.UNKNOWN
    assert verdict.missing == (3,)
    assert verdict.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("rounds", [0, 1])
def test_too_few_rounds_tell_nothing(rounds: int) -> None:
    bundle = make.bundle({rank: still(WAIT, rounds) for rank in range(4)})
    assert judge(bundle).kind is VerdictKind.UNKNOWN


def at_moments(moments: Sequence[float], **changes: Any) -> Bundle:
    """A hang of four ranks, seen at these moments (seconds)."""
    bundle = make.bundle({rank: still(WAIT if rank else make.at("handler")) for rank in range(4)})
    (first, *_) = bundle.rounds
    rounds = tuple(
        Round(index, False, tuple(replace(s, at=at + s.pid / 1e6) for s in first.samples))
        for index, at in enumerate(moments)
    )
    return replace(bundle, rounds=rounds, **changes)


def test_one_look_counted_again_is_no_second_look() -> None:
    assert judge(at_moments([0.0, 1.0, 2.0])).is_hang
    for moments in ([5.0, 5.0, 5.0], [0.0, 5.0, 5.0], [5.0, 4.0, 3.0]):
        verdict = judge(at_moments(moments))
        assert verdict.kind is VerdictKind.UNKNOWN, moments
        assert "contradict" in verdict.summary
    twice = at_moments([0.0, 1.0, 2.0])
    again = replace(twice.rounds[2], index=1)
    assert "2 rounds are number 1" in judge(replace(twice, rounds=(*twice.rounds[:2], again))).summary


@pytest.mark.parametrize("moments", [[0.0, 1e-6, 2e-6], [0.0, 0.1, 0.2], [0.0, 1.0, float("nan")]])
def test_looks_within_a_moment_tell_nothing(moments: list[float]) -> None:
    assert judge(at_moments(moments)).kind is VerdictKind.UNKNOWN


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"world_size": -3}, "cannot have -3 ranks"),
        ({"world_size": 0}, "cannot have 0 ranks"),
        ({"world_size": 10**9}, "cannot have 1000000000 ranks"),
        ({"world_size": 3}, "an engine of 3 ranks has no rank 3"),
        ({"pid": 1000}, "2 processes have pid 1000"),
        ({"rank": 0}, "2 processes are rank 0"),
        ({"rank": -1}, "there is no rank -1"),
        ({"rank": None}, "1 ranks have no number"),
    ],
)
def test_head_that_contradicts_itself_is_not_judged(changes: dict[str, Any], says: str) -> None:
    bundle = at_moments([0.0, 1.0, 2.0])
    if "world_size" in changes:
        bundle = replace(bundle, **changes)
    else:
        members = (*bundle.members[:3], replace(bundle.members[3], **changes))
        bundle = replace(bundle, members=members)
    verdict = judge(bundle)
    assert verdict.kind is VerdictKind.UNKNOWN
    assert says in verdict.summary
    assert verdict.tree()


def test_two_rounds_never_give_high_confidence() -> None:
    stacks = {rank: still(WAIT if rank else make.IDLE, 2) for rank in range(4)}
    verdict = judge(make.bundle(stacks))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.confidence is not Confidence.HIGH


def test_torn_reads_never_give_high_confidence() -> None:
    verdict = judge(make.bundle(ranks(4, WAIT, r0=make.IDLE), rung=Rung.NONBLOCKING, state="R"))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.confidence is Confidence.MEDIUM


def test_one_torn_read_does_not_outvote_two_that_agree() -> None:
    stacks = ranks(4, WAIT, r0=make.IDLE)
    bundle = make.bundle(stacks)
    torn = make.sample(1001, 1, make.at("never there"), rung=Rung.NONBLOCKING, state="R")
    rounds = list(bundle.rounds)
    samples = tuple(torn if s.pid == 1001 else s for s in rounds[1].samples)
    rounds[1] = type(rounds[1])(1, False, samples)
    changed = Bundle(bundle.suite, bundle.taken_at, "", None, bundle.members, tuple(rounds))
    assert judge(changed).kind is VerdictKind.MISSING_ARRIVAL


def test_no_rank_at_all_is_unknown() -> None:
    assert judge(make.bundle({})).kind is VerdictKind.UNKNOWN


def test_other_replica_is_not_missing() -> None:
    """Two tensor-parallel groups: the hang of one is not blamed on the idle other."""
    groups = {rank: {"dp": rank // 4, "tp": rank % 4} for rank in range(8)}
    stacks = ranks(8, make.IDLE)
    stacks |= {rank: still(WAIT) for rank in (0, 1, 3)} | {2: still(make.at("handler"))}
    verdict = judge(make.bundle(stacks, groups=groups))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (2,)


def test_pipeline_behind_a_stuck_stage_is_not_missing() -> None:
    groups = {rank: {"pp": rank // 2, "tp": rank % 2} for rank in range(4)}
    behind = (
        *make.WORK,
        Frame("recv_tensor_dict", "vllm/distributed/parallel_state.py", 1250),
        Frame("recv", make.C10D, 2700),
    )
    stacks = {0: still(WAIT), 1: still(make.at("handler")), 2: still(behind), 3: still(behind)}
    verdict = judge(make.bundle(stacks, groups=groups))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (1,)


def test_lock_held_across_a_team_operation_is_explained() -> None:
    team = (
        *make.WORK,
        Frame("multicast_add_device", "agent/team.py", 8),
        Frame("barrier", make.C10D, 5300),
    )
    asking = (*make.WORK, Frame("request_export", "agent/team.py", 20))
    serving = Thread(
        77,
        "endpoint",
        (Frame("serve", "agent/team.py", 60), Frame("serve_export", "agent/team.py", 71)),
    )
    bundle = make.bundle({0: still(team), 1: still(asking), 2: still(asking)}, extra={0: (serving,)})
    verdict = judge(bundle)
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (1, 2)
    assert "the thread endpoint is stuck at agent/team.py:71" in verdict.summary


def test_collective_in_another_thread_counts_when_the_main_thread_waits_for_it() -> None:
    waiting = (*make.WORK, Frame("Thread.join", "threading.py", 1100))
    worker = Thread(9, "comm", make.collective("all_reduce", (Frame("run", "agent/comm.py", 3),)))
    stacks = ranks(3, waiting, r2=make.at("handler"))
    verdict = judge(make.bundle(stacks, extra={0: (worker,), 1: (worker,)}))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert verdict.missing == (2,)


def test_sglang_idle_broadcast_is_idle() -> None:
    receive = (
        Frame("Scheduler.event_loop_normal", "sglang/srt/managers/scheduler.py", 2033),
        Frame("recv_requests", "sglang/srt/managers/scheduler_components/request_receiver.py", 100),
        Frame("broadcast_pyobj", "sglang/srt/utils/common.py", 2700),
    )
    follower = make.collective("broadcast", receive)
    leader = [
        receive[:1],
        (*receive[:1], Frame("on_idle", "sglang/srt/managers/scheduler.py", 9)),
        receive[:2],
    ]
    verdict = judge(make.bundle({0: leader, 1: still(follower)}))
    assert not verdict.is_hang


def test_json_and_tree_say_the_same() -> None:
    verdict = judge(make.bundle(ranks(8, WAIT, r5=make.at("handler"))))
    data = json.loads(json.dumps(verdict.to_json()))
    assert data["kind"] == "MISSING_ARRIVAL"
    assert data["signature"] == "HANG:MISSING_ARRIVAL@c10d.collective"
    assert data["missing"] == [5]
    assert {tuple(c["ranks"]) for c in data["classes"]} == {(0, 1, 2, 3, 4, 6, 7), (5,)}
    (trunk,) = data["tree"]
    assert trunk["ranks"] == "0-7"
    assert {(n["ranks"], n["calls"][-1]) for n in trunk["children"]} == {
        ("0-4, 6-7", "<all_reduce>"),
        ("5", "handler vllm/model_executor/layers/linear.py:10"),
    }
    tree = verdict.tree(width=90)
    assert all(len(line) <= 90 for line in tree.splitlines())
    assert "[0-4, 6-7]" in tree
    assert "<all_reduce>" in tree


def test_staircase_of_a_thousand_ranks_is_rendered() -> None:
    """Every rank one call deeper than the one before: the tree splits at every level."""
    deep = [Frame("recurse", "app/deep.py", 3)] * 1500
    stacks = {rank: still((*make.WORK, *deep[: rank + 1])) for rank in range(1200)}
    verdict = judge(make.bundle(stacks))
    assert verdict.tree()
    assert json.dumps(verdict.to_json())
