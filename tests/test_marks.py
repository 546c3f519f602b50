"""Selection by markers: which cases have which, and when targets for GPUs are picked."""

from __future__ import annotations

import pytest

from nvsnap_conformance.clauses.registry import load_registry
from nvsnap_conformance.session import marks
from nvsnap_conformance.session.arms import Arm
from nvsnap_conformance.targets.model import load_target

NOTHING: set[str] = set()


@pytest.mark.parametrize(
    ("expression", "marked", "selected"),
    [
        ("gpu", {"gpu"}, True),
        ("multigpu", {"gpu"}, False),
        ("not multigpu", {"gpu"}, True),
        ("gpu and not slow", {"gpu"}, True),
        ("multigpu or criu", NOTHING, False),
        ("world_size(n=2)", NOTHING, True),
        ("world_size(n=4)", NOTHING, False),
        ("world_size", NOTHING, True),
        ("gpu and", {"gpu"}, False),
        ("", {"gpu"}, False),
    ],
)
def test_selects(expression: str, marked: set[str], selected: bool) -> None:
    assert marks.selects(expression, marked, 2) is selected


@pytest.mark.parametrize(
    ("expression", "sizes"),
    [
        ("gpu", [1, 2, 4, 8]),
        ("multigpu", [2, 4, 8]),
        ("multigpu and world_size(n=2)", [2]),
        ("world_size(n=4) and gpu", [4]),
        ("gpu and not world_size(n=1)", [2, 4, 8]),
        ("gpu and (world_size(n=1) or world_size(n=8))", [1, 8]),
        ("multigpu and world_size(n=3)", [3]),
        ("multigpu and criu", [2, 4, 8]),
        ("multigpu and not criu", [2, 4, 8]),
        ("criu and multicast and gpu", [1, 2, 4, 8]),
        ("gpu and clause", [1, 2, 4, 8]),
        ("gpu and (spoils_engine or ends_engine) and not slow", [1, 2, 4, 8]),
        ("multigpu or criu", [2, 4, 8]),
        ("not (not multigpu)", [2, 4, 8]),
        ("multigpu and world_size(n=1)", []),
        ("gpu and not gpu", []),
        ("world_size(n=2)", []),
        ("world_size(n=2) and criu", []),
        ("criu and not gpu", []),
        ("gpu and world_size(2)", []),
        ("gpu and 1", []),
    ],
)
def test_sizes_at_which_an_expression_asks_for_gpus(expression: str, sizes: list[int]) -> None:
    assert marks.asked_sizes(expression) == sizes


@pytest.mark.parametrize("expression", ["", "slow", "not gpu", "not multigpu", "gpu or not gpu", "criu"])
def test_no_target_for_gpus_is_picked(expression: str) -> None:
    assert marks.pick(expression) is None


def test_what_is_missing_is_said_and_still_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    picked = marks.pick("multigpu")
    assert picked is not None
    assert [target.engine.tensor_parallel for target in picked.targets] == [(2,)]
    assert "2 GPUs are needed, 0 can be used" in picked.lacks[0]
    assert "no distribution called vllm" in picked.lacks[1]


def test_sizes_are_those_that_the_expression_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvsnap_conformance.targets.model.count_visible", lambda: 4)
    sizes = {
        expression: [target.engine.tensor_parallel for target in picked.targets]
        for expression in ("gpu", "multigpu", "gpu and not multigpu")
        if (picked := marks.pick(expression))
    }
    assert sizes == {"gpu": [(1, 2, 4)], "multigpu": [(2, 4)], "gpu and not multigpu": [(1,)]}


def test_a_size_that_the_expression_names_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for expression, size, lack in (
        ("multigpu and world_size(n=2)", 2, "2 GPUs are needed, 0 can be used"),
        ("multigpu and criu", 2, "2 GPUs are needed, 0 can be used"),
        ("gpu and world_size(n=4)", 4, "4 GPUs are needed, 0 can be used"),
        ("gpu and world_size(n=3)", 3, "no engine is run on 3 GPUs: sizes are 1, 2, 4, 8"),
    ):
        picked = marks.pick(expression)
        assert picked is not None
        assert [target.engine.tensor_parallel for target in picked.targets] == [(size,)]
        assert lack in picked.lacks[0]


def test_marks_of_cases() -> None:
    registry = load_registry()

    def names(arm: Arm, *clauses: str) -> list[str]:
        return [mark.name for mark in marks.marks_of(arm, clauses, registry)]

    gpu = load_target("vllm-gpu")
    assert names(Arm(gpu, 2), "LIFE-ORDER") == ["world_size", "gpu", "multigpu"]
    assert names(Arm(gpu, 1), "LIFE-ORDER") == ["world_size", "gpu"]
    assert names(Arm(load_target("vllm-cpu"), 2), "IMAGE-HOLDS-STATE") == ["criu", "world_size"]
    assert names(Arm(None, 0), "DEVICE-READ-BACK") == []
