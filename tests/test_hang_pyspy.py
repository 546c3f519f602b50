"""What py-spy is asked, and what its answer means, also a damaged one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvsnap_conformance.hang import pyspy
from nvsnap_conformance.hang.model import Frame, Reading, Rung
from nvsnap_conformance.hang.verdict import VerdictKind, judge
from tests.planted import synthetic as make

DUMP = [
    {
        "pid": 42,
        "thread_id": 1,
        "thread_name": "MainThread",
        "os_thread_id": 42,
        "active": True,
        "owns_gil": False,
        "frames": [
            {"name": "read", "filename": "/usr/lib/libc.so.6", "module": "/usr/lib/libc.so.6", "line": 0},
            {
                "name": "inner",
                "filename": "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py",
                "module": None,
                "line": 83,
                "locals": [{"name": "secret", "repr": "'x' * 1000"}],
            },
            {"name": "outer", "filename": "/srv/app/job/main.py", "module": None, "line": 3},
        ],
    }
]


def test_answer_becomes_threads_outermost_first() -> None:
    threads, problem = pyspy.parse(json.dumps(DUMP), 42)
    assert problem == ""
    (thread,) = threads
    assert thread.main
    assert [f.name for f in thread.frames] == ["outer", "inner", "read"]
    assert thread.frames[1] == Frame("inner", "torch/distributed/c10d_logger.py", 83)
    assert thread.frames[2].native
    assert thread.frames[1].locals == {"secret": "'x' * 1000"}


def test_main_thread_is_told_by_its_id_and_not_by_its_name() -> None:
    """In a pid namespace the id is that of the namespace; a forked child may keep another's name."""
    record = {**DUMP[0], "thread_name": "Thread-3", "os_thread_id": 7}
    other = {**DUMP[0], "thread_name": "MainThread", "os_thread_id": 9}
    threads, _ = pyspy.parse(json.dumps([record, other]), 7)
    assert [t.main for t in threads] == [True, False]


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/a/lib/python3.12/site-packages/vllm/v1/engine/core.py", "vllm/v1/engine/core.py"),
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/usr/lib/python3/dist-packages/zmq/sugar/poll.py", "zmq/sugar/poll.py"),
        ("/src/vllm/vllm/distributed/parallel_state.py", "vllm/distributed/parallel_state.py"),
        ("/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", "sglang/srt/managers/scheduler.py"),
        ("/srv/app/job/main.py", "app/job/main.py"),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "libc.so.6"),
        ("<string>", "<string>"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
    ],
)
def test_files_are_named_alike_on_every_host(path: str, short: str) -> None:
    assert pyspy.short(path) == short


@pytest.mark.parametrize(
    ("reading", "names"),
    [
        (Reading("S"), [Rung.BLOCKING, Rung.NONBLOCKING]),
        (Reading("R"), [Rung.BLOCKING, Rung.NONBLOCKING]),
        (Reading("T"), [Rung.NONBLOCKING]),
        (Reading("t", tracer=5), [Rung.NONBLOCKING]),
        (Reading("S", tracer=5), [Rung.NONBLOCKING]),
        (Reading("Z"), []),
        (Reading("D"), []),
    ],
)
def test_ladder_begins_where_the_state_allows(reading: Reading, names: list[Rung]) -> None:
    ladder, why = pyspy.rungs(42, reading, native=False, with_locals=False)
    assert [name for name, _ in ladder] == names
    assert bool(why) == (names != [Rung.BLOCKING, Rung.NONBLOCKING])
    assert all("--locals" not in arguments for _, arguments in ladder)


def test_native_rung_comes_first_and_only_when_asked() -> None:
    ladder, _ = pyspy.rungs(42, Reading("S"), native=True, with_locals=True)
    assert [name for name, _ in ladder] == [Rung.NATIVE, Rung.BLOCKING, Rung.NONBLOCKING]
    assert all("--locals" in arguments for _, arguments in ladder)
    stopped, _ = pyspy.rungs(42, Reading("T"), native=True, with_locals=False)
    assert [name for name, _ in stopped] == [Rung.NONBLOCKING]


def test_header_of_a_failed_dump_is_no_answer() -> None:
    threads, problem = pyspy.parse("Process 42: python\nPython v3.11.7\n", 42)
    assert threads == ()
    assert "no JSON" in problem


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)
records = st.fixed_dictionaries(
    {},
    optional={
        "frames": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "name": st.one_of(st.text(max_size=20), json_values),
                    "filename": st.one_of(st.text(max_size=40), json_values),
                    "line": st.one_of(st.integers(), json_values),
                    "module": json_values,
                    "locals": json_values,
                },
            )
            | json_values,
            max_size=6,
        )
        | json_values,
        "os_thread_id": st.one_of(st.integers(), json_values),
        "thread_name": json_values,
        "active": json_values,
    },
)


@given(st.one_of(st.text(), st.lists(records | json_values, max_size=4).map(json.dumps)))
@settings(max_examples=300)
def test_no_answer_ever_crashes_it(text: str) -> None:
    threads, problem = pyspy.parse(text, 42)
    assert isinstance(problem, str)
    for thread in threads:
        assert all(isinstance(f.name, str) and isinstance(f.line, int) for f in thread.frames)


@given(st.data())
def test_a_cut_answer_gives_no_thread_and_a_verdict_all_the_same(data: st.DataObject) -> None:
    whole = json.dumps(DUMP)
    cut = data.draw(st.integers(0, len(whole) - 1))
    threads, problem = pyspy.parse(whole[:cut], 42)
    assert threads == ()
    assert problem


@given(st.lists(records, max_size=3), st.integers(2, 4))
def test_a_rank_with_a_garbled_stack_never_makes_the_judge_fail(garbled: list[Any], rounds: int) -> None:
    threads, _ = pyspy.parse(json.dumps(garbled), 1002)
    wait = make.collective("all_reduce")
    bundle = make.bundle({rank: [wait] * rounds for rank in range(4)})
    taken = tuple(
        replace(one, samples=tuple(replace(s, threads=threads) if s.pid == 1002 else s for s in one.samples))
        for one in bundle.rounds
    )
    verdict = judge(replace(bundle, rounds=taken))
    assert verdict.kind in VerdictKind
    if not any(thread.frames for thread in threads):
        assert verdict.kind is VerdictKind.UNKNOWN


def test_deeply_nested_answer_is_refused() -> None:
    threads, problem = pyspy.parse("[" * 100_000, 42)
    assert threads == ()
    assert problem
