"""Laws of merge and verdict, over arbitrary ranks, rounds and stacks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from nvsnap_conformance.hang.collectives import load
from nvsnap_conformance.hang.merge import Condition, View, classes, prefix_tree, span, view, views
from nvsnap_conformance.hang.model import Bundle, Frame, Reading, Rung, Sample, Thread
from nvsnap_conformance.hang.position import Analyser
from nvsnap_conformance.hang.verdict import VerdictKind, judge
from tests.planted import synthetic as make

PLACES = [
    make.collective("all_reduce"),
    make.collective("barrier"),
    make.arm("mnnvl"),
    make.arm("trtllm"),
    make.IDLE,
    make.at("handler"),
    make.at("handler", 11),
    (*make.WORK, Frame("_compile", "torch/_dynamo/convert_frame.py", 9)),
    (*make.at("launch"), Frame("cudaLaunchKernel", "libcudart.so.13", 0, True)),
    (*make.at("ask"), Frame("SocketIO.readinto", "socket.py", 706)),
]
stacks = st.one_of(st.none(), st.sampled_from(PLACES))
readings = st.builds(
    Reading,
    state=st.sampled_from("RSDTtZ"),
    tracer=st.sampled_from([0, 0, 0, 7]),
    wchan=st.sampled_from(["", "futex_wait_queue", "uvm_wait"]),
    cpu_seconds=st.floats(0, 100),
    tree_cpu_seconds=st.floats(0, 100),
    switches=st.integers(0, 10**6),
    faults=st.integers(0, 10**6),
    read_bytes=st.integers(-1, 10**9),
)


@st.composite
def sampled(draw: st.DrawFn, pid: int, index: int) -> Sample:
    stack = draw(stacks)
    rung = draw(st.sampled_from([Rung.BLOCKING, Rung.NATIVE, Rung.NONBLOCKING, Rung.GONE]))
    reading = draw(st.one_of(st.none(), readings))
    threads = () if stack is None or rung is Rung.GONE else (Thread(pid, "MainThread", stack, main=True),)
    return Sample(pid, float(index), rung if threads or rung is Rung.GONE else Rung.PROC, reading, threads)


@st.composite
def bundles(draw: st.DrawFn, *, most_ranks: int = 8) -> Bundle:
    world = draw(st.integers(1, most_ranks))
    rounds = draw(st.integers(0, 5))
    base = make.bundle({rank: [None] * rounds for rank in range(world)})
    taken = []
    for one in base.rounds:
        samples = tuple(draw(sampled(1000 + rank, one.index)) for rank in range(world))
        taken.append(replace(one, samples=samples))
    return replace(base, rounds=tuple(taken))


def class_of(found: list[View]) -> dict[int, tuple[Condition, object]]:
    return {v.member.rank or 0: (v.condition, v.position.key if v.position else v.kernel) for v in found}


@given(bundles(), st.randoms(use_true_random=False))
def test_order_of_ranks_and_rounds_does_not_matter(bundle: Bundle, random: object) -> None:
    shuffle = random.shuffle  # type: ignore[attr-defined]
    members, rounds = list(bundle.members), list(bundle.rounds)
    shuffle(members)
    shuffle(rounds)
    mixed = []
    for one in rounds:
        samples = list(one.samples)
        shuffle(samples)
        mixed.append(replace(one, samples=tuple(samples)))
    other = replace(bundle, members=tuple(members), rounds=tuple(mixed))
    analyser = Analyser(load())
    assert class_of(views(bundle, analyser)) == class_of(views(other, Analyser(load())))
    first, second = judge(bundle), judge(other)
    for name in ("kind", "missing", "confidence", "summary"):
        assert getattr(first, name) == getattr(second, name)


@given(bundles(most_ranks=6), st.data())
def test_adding_a_rank_never_changes_anothers_class(bundle: Bundle, data: st.DataObject) -> None:
    number = len(bundle.members)
    added = make.member(number)
    rounds = tuple(
        replace(one, samples=(*one.samples, data.draw(sampled(added.pid, one.index))))
        for one in bundle.rounds
    )
    larger = replace(bundle, members=(*bundle.members, added), rounds=rounds)
    before = class_of(views(bundle, Analyser(load())))
    after = class_of(views(larger, Analyser(load())))
    assert {rank: after[rank] for rank in before} == before


@given(bundles())
def test_classes_are_a_partition(bundle: Bundle) -> None:
    found = views(bundle, Analyser(load()))
    members = [v for group in classes(found) for v in group.views]
    assert sorted(v.member.pid for v in members) == sorted(v.member.pid for v in found)


@given(bundles())
@settings(max_examples=200)
def test_a_verdict_is_always_given_and_can_be_written(bundle: Bundle) -> None:
    verdict = judge(bundle)
    assert verdict.kind in VerdictKind
    assert set(verdict.missing) <= {m.rank for m in bundle.members}
    assert verdict.paragraph().startswith(verdict.kind.value)
    assert verdict.tree()
    assert verdict.to_json()["kind"] == verdict.kind.value
    assert str(verdict.signature).startswith("HANG:")


@given(bundles())
def test_a_hang_is_never_seen_in_one_round(bundle: Bundle) -> None:
    verdict = judge(replace(bundle, rounds=bundle.rounds[:1]))
    assert not verdict.is_hang


@given(bundles())
def test_unreadable_ranks_alone_never_make_a_hang(bundle: Bundle) -> None:
    """Partial data gives UNKNOWN: what nobody saw is no evidence."""
    blind = tuple(
        replace(
            one,
            samples=tuple(replace(s, threads=(), rung=Rung.PROC, reading=Reading("S")) for s in one.samples),
        )
        for one in bundle.rounds
    )
    assert judge(replace(bundle, rounds=blind)).kind is VerdictKind.UNKNOWN


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.sampled_from(PLACES)), max_size=60))
def test_tree_holds_every_sample_once(entries: list[tuple[int, int, make.Stack]]) -> None:
    unique = {(rank, index): stack for rank, index, stack in entries}
    analyser = Analyser(load())
    placed = [
        (rank, index, position)
        for (rank, index), stack in unique.items()
        if (position := analyser.thread(Thread(1, "MainThread", stack, main=True))) is not None
    ]
    root = prefix_tree(placed)
    assert root.seen == {
        rank: sum(1 << i for r, i, _ in placed if r == rank) for rank in {r for r, _, _ in placed}
    }
    for rank, index, position in placed:
        node = root
        for frame in position.path:
            node = node.children[frame]
            assert node.seen[rank] >> index & 1


@given(st.sets(st.integers(0, 5000)))
def test_spans_name_exactly_their_numbers(numbers: set[int]) -> None:
    named: set[int] = set()
    for part in span(numbers).split(", ") if numbers else []:
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


@given(st.lists(st.sampled_from(PLACES), min_size=2, max_size=5))
def test_a_rank_that_was_at_two_places_is_never_settled(places: list[make.Stack]) -> None:
    samples = [make.sample(1000, index, stack) for index, stack in enumerate(places)]
    one = view(make.member(0), samples, Analyser(load()))
    keys = {p.key for p in one.positions}
    if len(keys) > 1:
        assert one.condition in {Condition.MOVING, Condition.PHASE, Condition.IDLE}
