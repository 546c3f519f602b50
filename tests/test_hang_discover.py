"""From a process tree to ranks, by every source, with the source stated."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.engines.protocol import Rank
from nvsnap_conformance.hang import discover
from nvsnap_conformance.hang.model import Member, Role
from nvsnap_conformance.processes import ProcessId
from tests.planted import victims

if TYPE_CHECKING:
    from collections.abc import Iterator
from pathlib import Path

LAUNCHER = """
import json, os, subprocess, sys
children = []
for argv0, extra in json.loads(sys.argv[1]):
    children.append(subprocess.Popen(
        [argv0, "-c", "import signal; print('up', flush=True); signal.pause()"],
        executable=sys.executable, env={**os.environ, **extra}, stdout=subprocess.PIPE))
    children[-1].stdout.readline()
print("up", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def launched(*children: tuple[str, dict[str, str]], title: str | None = None) -> Iterator[ProcessId]:
    import json

    with victims.python(LAUNCHER, json.dumps(children), title=title) as (root, _):
        yield root


def ranks_of(members: list[Member]) -> list[tuple[int | None, str, str]]:
    return [(m.rank, m.title.split(" ")[0], m.source) for m in members if m.role is Role.RANK]


def test_process_titles_tell_ranks_and_roles() -> None:
    with launched(
        ("VLLM::EngineCore", {}), ("VLLM::Worker_TP1", {}), ("VLLM::Worker_TP0", {}), ("python", {})
    ) as root:
        members = discover.discover(root)
    assert ranks_of(members) == [
        (0, "VLLM::Worker_TP0", "process title"),
        (1, "VLLM::Worker_TP1", "process title"),
    ]
    assert [m.groups for m in members if m.role is Role.RANK] == [{"tp": 0}, {"tp": 1}]
    assert [m.title for m in members if m.role is Role.CORE] == ["VLLM::EngineCore"]
    assert [m.pid for m in members if m.role is Role.FRONT] == [root.pid]


@pytest.mark.parametrize(
    "expected",
    [
        {
            "VLLM::Worker_PP1_TP0": 2,
            "VLLM::Worker_PP0_TP1": 1,
            "VLLM::Worker_PP0_TP0": 0,
            "VLLM::Worker_PP1_TP1": 3,
        },
        {"VLLM::Worker_DP0_TP0": 0, "VLLM::Worker_DP1_TP0": 1},
        {"VLLM::Worker_TP0_DCP0_EP0": 0, "VLLM::Worker_TP1_DCP1_EP1": 1},
        {"sglang::scheduler_TP1": 1, "sglang::scheduler_TP0": 0, "sglang::detokenizer": None},
        {"sglang::scheduler_DP1_ATTN_CP0_TP3_EP3": 3, "sglang::scheduler_DP0_ATTN_CP0_TP2_EP2": 2},
        {"VLLM::Worker": 0},
        {"VLLM::EngineCore": 0},
        {"VLLM::EngineCore_DP0": 0, "VLLM::EngineCore_DP1": 1},
    ],
    ids=[
        "pipeline",
        "data parallel",
        "derived axes",
        "sglang",
        "dp attention",
        "one",
        "uniproc",
        "dp uniproc",
    ],
)
def test_titles_of_every_layout(expected: dict[str, int | None]) -> None:
    with launched(*((title, {}) for title in expected)) as root:
        members = discover.discover(root)
    assert {m.title: m.rank for m in members if "::" in m.title} == expected


def test_titles_without_coordinates_are_a_guess_that_says_so() -> None:
    """Workers that start have no coordinates yet."""
    with launched(("VLLM::Worker", {}), ("VLLM::Worker", {})) as root:
        members = discover.discover(root)
    assert [m.source for m in members if m.role is Role.RANK] == ["start order of equal titles (guess)"] * 2


def test_environment_goes_before_titles() -> None:
    with launched(
        ("VLLM::Worker_TP0", {"RANK": "1", "WORLD_SIZE": "2"}),
        ("VLLM::Worker_TP1", {"RANK": "0", "WORLD_SIZE": "2"}),
    ) as root:
        members = discover.discover(root)
        size = discover.world_size(members)
    assert ranks_of(members) == [
        (0, "VLLM::Worker_TP1", "environment RANK"),
        (1, "VLLM::Worker_TP0", "environment RANK"),
    ]
    assert size == 2


def test_inherited_variable_is_no_rank() -> None:
    """A launcher's own RANK reaches all of its children: it does not tell them apart."""
    shared = {"RANK": "0"}
    with launched(("VLLM::Worker_TP0", shared), ("VLLM::Worker_TP1", shared)) as root:
        members = discover.discover(root)
    assert [m.source for m in members if m.role is Role.RANK] == ["process title"] * 2


def test_alike_siblings_are_ranks_by_order() -> None:
    with launched(("python", {}), ("python", {}), ("python", {})) as root:
        members = discover.discover(root)
    assert [(m.rank, m.source) for m in members if m.role is Role.RANK] == [
        (i, "start order (guess)") for i in range(3)
    ]
    pids = [m.pid for m in members if m.role is Role.RANK]
    assert pids == sorted(pids)


def test_one_process_alone_is_no_rank() -> None:
    with launched(("python", {})) as root:
        assert not any(m.role is Role.RANK for m in discover.discover(root))


def test_adapters_answer_goes_before_everything_and_keeps_the_dead() -> None:
    with launched(("VLLM::Worker_TP0", {"RANK": "1"}), ("VLLM::Worker_TP1", {"RANK": "0"})) as root:
        (first,) = [m for m in discover.discover(root) if m.title == "VLLM::Worker_TP0"]
        answer = [
            Rank(0, ProcessId(first.pid, first.create_time), "GPU-1", "rpc"),
            Rank(1, ProcessId(2**22 - 1, 5.0), None, "rpc"),
        ]
        members = discover.discover(root, answer)
    ranks = [m for m in members if m.role is Role.RANK]
    assert [(m.rank, m.pid, m.source, m.gpu) for m in ranks] == [
        (0, first.pid, "rpc", "GPU-1"),
        (1, 2**22 - 1, "rpc", None),
    ]
    assert ranks[0].groups == {"tp": 0}


def test_listed_pids_are_ranks_in_the_order_given() -> None:
    with victims.python(victims.SLEEPER) as (one, _), victims.python(victims.SLEEPER) as (two, _):
        members = discover.listed([two.pid, one.pid])
    assert [(m.rank, m.pid, m.source) for m in members] == [
        (0, two.pid, "order given"),
        (1, one.pid, "order given"),
    ]


def test_listed_pid_that_is_gone_is_a_rank_too() -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        members = discover.listed([one.pid, 2**22 - 1])
    assert [m.rank for m in members] == [0, 1]


def test_arguments_are_not_kept() -> None:
    """An API key on a command line must not end up in a bundle."""
    with victims.python(victims.SLEEPER, "--api-key", "swordfish") as (one, _):
        (member,) = discover.listed([one.pid])
    assert member.title == f"{Path(sys.executable).name} -c"
    assert "swordfish" not in str(member)


def test_gone_root_has_no_members() -> None:
    assert discover.discover(ProcessId(2**22 - 1, 1.0)) == []
