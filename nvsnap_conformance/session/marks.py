"""Markers of cases, and which targets a selection by markers asks for.

``pytest -m multigpu`` without a target is a run over the GPUs that are there: the targets for GPUs are picked
in place of the default one, at the sizes that the expression selects. So it is with every expression that
selects cases because they run on GPUs, whatever else it asks for.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.capabilities import parse_need
from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.gpus import SIZES, visible
from nvsnap_conformance.targets.model import Target, load_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.clauses.registry import Registry
    from nvsnap_conformance.session.arms import Arm

GPU_TARGETS = ("vllm-gpu",)
"""The shipped targets that are picked for GPUs, one for each engine family; others are named by the user."""

MULTI = 2
"""From this many ranks on a case is one for several GPUs."""

WORLD_SIZE = "world_size"

_MOST = 10
"""How many other markers of an expression are tried with and without; it doubles with each."""


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
    return tuple(sorted(_of_size(size)))


def _of_size(size: int) -> set[str]:
    """Return the markers of a case that runs on ``size`` GPUs."""
    return {"gpu", "multigpu"} if size >= MULTI else {"gpu"}


@dataclass(frozen=True)
class Picked:
    """The targets that a marker expression asks for; ``lacks`` says what is not there for them."""

    targets: tuple[Target, ...]
    lacks: tuple[str, ...]


def pick(expression: str) -> Picked | None:
    """Return the targets for GPUs, ``None`` where ``expression`` does not ask for them.

    What cannot run is picked all the same: a run in which nothing ran is incomplete, and never green.
    """
    asked = asked_sizes(expression)
    if not asked:
        return None
    lacks: list[str] = []
    targets: list[Target] = []
    sizes = [size for size in asked if size in SIZES]
    if not sizes:
        lacks.append(f"no engine is run on {asked[0]} GPUs: sizes are {', '.join(map(str, SIZES))}")
    seen = visible()
    least = min(sizes or asked)
    if len(seen.gpus) < least:
        lacks.append(
            f"{least} GPUs are needed, {len(seen.gpus)} can be used"
            + (f": {seen.why_none}" if seen.why_none else "")
        )
    for name in GPU_TARGETS:
        target = load_target(name)
        try:
            EngineEnvironment.for_target(target)
        except NvsnapError as error:
            lacks.append(f"{name}: {error.what}")
        wanted = tuple(size for size in target.engine.tensor_parallel if size in sizes)
        targets.append(target.with_sizes(wanted or (least,)))
    return Picked(tuple(targets), tuple(lacks))


def asked_sizes(expression: str) -> list[int]:
    """Return the sizes at which ``expression`` asks for engines on GPUs, none where it does not.

    It asks for them where it selects some case because that runs on GPUs, whatever other markers the case
    has, and not every case without any marker.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        if _holds(tree, Marks()):
            return []
        calls = [_call(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):  # pytest itself says what is wrong with it
        return []
    named = {size for name, size in calls if name == WORLD_SIZE and size is not None}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    others = sorted(names - {"gpu", "multigpu", WORLD_SIZE})[:_MOST]
    return [size for size in sorted(named | set(SIZES)) if _asks(tree, size, others)]


def _asks(tree: ast.expr, size: int, others: Sequence[str]) -> bool:
    """Whether a case of ``size`` ranks, with some of ``others``, is selected on GPUs and nowhere else."""
    for chosen in itertools.product((False, True), repeat=len(others)):
        marks = {name for name, has in zip(others, chosen, strict=True) if has}
        on_gpus = Marks(frozenset(marks | _of_size(size)), size)
        elsewhere = Marks(frozenset(marks), size)
        if _holds(tree, on_gpus) and not _holds(tree, elsewhere):
            return True
    return False


def selects(expression: str, marks: set[str], size: int | None = None) -> bool:
    """Whether a case with ``marks`` (and no others) and ``world_size(n=size)`` is selected by an expression.

    An expression that cannot be read selects nothing here; pytest itself says what is wrong with it.
    """
    try:
        return _holds(ast.parse(expression.strip(), mode="eval").body, Marks(frozenset(marks), size))
    except (SyntaxError, ValueError):
        return False


@dataclass(frozen=True)
class Marks:
    """The markers of a case by name, and the argument of its ``world_size``."""

    names: frozenset[str] = frozenset()
    size: int | None = None

    def has(self, name: str) -> bool:
        """Whether the case has a marker, with whatever arguments."""
        return name in self.names or (name == WORLD_SIZE and self.size is not None)


def _holds(node: ast.expr, marks: Marks) -> bool:
    match node:
        case ast.BoolOp():
            held = [_holds(value, marks) for value in node.values]  # of each, for any may be unreadable
            return all(held) if isinstance(node.op, ast.And) else any(held)
        case ast.UnaryOp(op=ast.Not()):
            return not _holds(node.operand, marks)
        case ast.Name():
            return marks.has(node.id)
        case ast.Call():
            name, size = _call(node)
            return marks.has(name) and size in {None, marks.size}
        case _:
            raise ValueError(ast.dump(node))


def _call(node: ast.Call) -> tuple[str, int | None]:
    """Return a marker with arguments by name, and the ``n`` of a ``world_size``."""
    if not isinstance(node.func, ast.Name) or node.args:
        raise ValueError(ast.dump(node))
    given = {word.arg: word.value for word in node.keywords}
    value = given.get("n")
    if node.func.id != WORLD_SIZE or value is None:
        return node.func.id, None
    match value:
        case ast.Constant(value=int(size)):
            return node.func.id, size
        case _:
            raise ValueError(ast.dump(node))
