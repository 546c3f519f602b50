"""Markers of cases, and which targets a selection by markers asks for.

``pytest -m multigpu`` without a target is a run over the GPUs that are there: the targets for GPUs are picked
in place of the default one, at the sizes that the expression selects.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.capabilities import parse_need
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.gpus import visible
from nvsnap_conformance.targets.model import Target, load_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.clauses.registry import Registry
    from nvsnap_conformance.session.arms import Arm

GPU_TARGETS = ("vllm-gpu",)
"""The shipped targets that are picked for GPUs, one for each engine family; others are named by the user."""

MULTI = 2
"""From this many ranks on a case is one for several GPUs."""


def marks_of(arm: Arm, clauses: Sequence[str], registry: Registry) -> list[pytest.MarkDecorator]:
    """Return the markers of a case with ``clauses`` on ``arm``."""
    needs = {parse_need(need).name for name in clauses for need in registry.clause(name).needs}
    marks = [getattr(pytest.mark, name) for name in ("criu", "multicast") if name in needs]
    if arm.target is not None:
        marks.append(pytest.mark.world_size(n=arm.tensor_parallel))
        marks += [getattr(pytest.mark, name) for name in _of_engine(arm.target, arm.tensor_parallel)]
    return marks


def _of_engine(target: Target, size: int) -> tuple[str, ...]:
    if target.engine.processor != "cuda":
        return ()
    return ("gpu", "multigpu") if size >= MULTI else ("gpu",)


@dataclass(frozen=True)
class Picked:
    """The targets that a marker expression asks for; ``lacks`` says what is not there for them."""

    targets: tuple[Target, ...]
    lacks: tuple[str, ...]


def pick(expression: str) -> Picked | None:
    """Return the targets for GPUs, ``None`` where ``expression`` does not select by them.

    What cannot run is picked all the same: a run in which nothing ran is incomplete, and never green.
    """
    sizes = [
        size for size in (1, MULTI) if selects(expression, {"gpu", *(("multigpu",) if size > 1 else ())})
    ]
    if not expression or not sizes or selects(expression, set()):
        return None
    lacks: list[str] = []
    targets: list[Target] = []
    seen = visible()
    if len(seen.gpus) < sizes[0]:
        lacks.append(
            f"{sizes[0]} GPUs are needed, {len(seen.gpus)} can be used"
            + (f": {seen.why_none}" if seen.why_none else "")
        )
    for name in GPU_TARGETS:
        target = load_target(name)
        try:
            EngineEnvironment.for_target(target)
        except NvsnapError as error:
            lacks.append(f"{name}: {error.what}")
        wanted = tuple(size for size in target.engine.tensor_parallel if min(size, MULTI) in sizes)
        targets.append(target.with_sizes(wanted or (sizes[0],)))
    return Picked(tuple(targets), tuple(lacks))


def selects(expression: str, marks: set[str]) -> bool:
    """Whether a case with ``marks`` (and no others) is selected by a marker expression.

    An expression that cannot be read selects nothing here; pytest itself says what is wrong with it.
    """
    try:
        return _holds(ast.parse(expression.strip(), mode="eval").body, marks)
    except (SyntaxError, ValueError):
        return False


def _holds(node: ast.expr, marks: set[str]) -> bool:
    match node:
        case ast.BoolOp(op=ast.And()):
            return all(_holds(value, marks) for value in node.values)
        case ast.BoolOp():
            return any(_holds(value, marks) for value in node.values)
        case ast.UnaryOp(op=ast.Not()):
            return not _holds(node.operand, marks)
        case ast.Name():
            return node.id in marks
        case ast.Call(func=ast.Name(id=name)):  # a marker with arguments, such as world_size(n=2)
            return name in marks
        case _:
            raise ValueError(ast.dump(node))
