"""The shipped cases and the clauses that they are bound to, read with ``ast`` and without importing.

So the catalogue works without an engine, a GPU or a collection. A case is a function ``test*`` in a
file ``test_*.py``, at module level or in a class ``Test*``; it is bound with
``@pytest.mark.clause("ID", ...)`` on itself, on its class or in a ``pytestmark``.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvsnap_conformance.clauses.registry import Registry, load_registry
from nvsnap_conformance.errors import RegistryError
from nvsnap_conformance.shipped import case_roots
from nvsnap_conformance.suggest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MARK = "clause"

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Case:
    """One case: its pytest node id relative to the shipped root, its clauses, and where it stands."""

    nodeid: str
    clauses: tuple[str, ...]
    file: Path
    line: int


@dataclass(frozen=True)
class Catalogue:
    """All cases, in the order of files and lines."""

    cases: tuple[Case, ...]

    def cases_of(self, clause_id: str) -> tuple[Case, ...]:
        """Return the cases that are bound to a clause."""
        return tuple(case for case in self.cases if clause_id in case.clauses)


@functools.cache
def load_catalogue() -> Catalogue:
    """Return the catalogue of the shipped cases, read once per process and checked against the registry."""
    catalogue = read_catalogue(case_roots(), load_registry())
    require_cases(catalogue, load_registry())
    return catalogue


def read_catalogue(roots: Sequence[Path], registry: Registry) -> Catalogue:
    """Read the cases below ``roots``.

    Raises :class:`RegistryError`, naming file and line, for a case bound to no clause, an unknown
    clause, and a mark whose arguments are not string literals.
    """
    cases: list[Case] = []
    for root in roots:
        for file in sorted(root.rglob("test_*.py")):
            cases.extend(_cases_of_file(file, root.parent, registry))
    return Catalogue(tuple(cases))


def require_cases(catalogue: Catalogue, registry: Registry) -> None:
    """Raise :class:`RegistryError` naming the clauses that no case is bound to."""
    bound = {clause for case in catalogue.cases for clause in case.clauses}
    missing = [f"{clause.id} ({clause.area}.toml)" for clause in registry.order() if clause.id not in bound]
    if missing:
        raise RegistryError(
            f"no case is bound to {', '.join(missing)}",
            cause="a clause without a case would pass without having been looked at",
            next_step="write a case with @pytest.mark.clause, or remove the clause",
        )


def _cases_of_file(file: Path, base: Path, registry: Registry) -> Iterator[Case]:
    try:
        module = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except SyntaxError as error:
        raise RegistryError(f"{file}:{error.lineno}: not Python: {error.msg}") from None
    nodeid = file.relative_to(base).as_posix()
    yield from _cases_of_body(module.body, (), nodeid, file, registry)


def _cases_of_body(
    body: list[ast.stmt], inherited: tuple[str, ...], nodeid: str, file: Path, registry: Registry
) -> Iterator[Case]:
    for statement in body:
        if _assigns_pytestmark(statement):
            inherited += tuple(_clauses_in(_values(statement), file, registry))
    for statement in body:
        if isinstance(statement, _Function) and statement.name.startswith("test"):
            own = _clauses_in(statement.decorator_list, file, registry)
            clauses = tuple(dict.fromkeys([*own, *inherited]))
            if not clauses:
                raise RegistryError(
                    f"{file}:{statement.lineno}: the case {statement.name} is bound to no clause",
                    next_step='mark it with @pytest.mark.clause("CLAUSE-ID")',
                )
            yield Case(f"{nodeid}::{statement.name}", clauses, file, statement.lineno)
        elif isinstance(statement, ast.ClassDef) and statement.name.startswith("Test"):
            own = _clauses_in(statement.decorator_list, file, registry)
            yield from _cases_of_body(
                statement.body, (*own, *inherited), f"{nodeid}::{statement.name}", file, registry
            )


def _assigns_pytestmark(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        targets: list[ast.expr] = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    else:
        return False
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _values(statement: ast.stmt) -> list[ast.expr]:
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.List | ast.Tuple):
        return value.elts
    return [value] if value is not None else []


def _clauses_in(marks: Sequence[ast.expr], file: Path, registry: Registry) -> list[str]:
    """Return the clause IDs that ``marks`` (decorators or elements of pytestmark) name."""
    found: list[str] = []
    for mark in marks:
        callee = mark.func if isinstance(mark, ast.Call) else mark
        if not (isinstance(callee, ast.Attribute) and callee.attr == MARK and _is_mark(callee.value)):
            continue
        place = f"{file}:{mark.lineno}"
        if not isinstance(mark, ast.Call) or not mark.args or mark.keywords:
            raise RegistryError(f"{place}: the mark clause takes one or more clause IDs and nothing else")
        for argument in mark.args:
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise RegistryError(
                    f"{place}: an argument of the mark clause is no string literal",
                    cause="the catalogue reads the marks without importing the file",
                    next_step='write the IDs out: @pytest.mark.clause("CLAUSE-ID")',
                )
            if argument.value not in registry.clauses:
                raise RegistryError(
                    f"{place}: no clause is called {argument.value!r}",
                    next_step=did_you_mean(argument.value, registry.clauses),
                )
            found.append(argument.value)
    return found


def _is_mark(node: ast.expr) -> bool:
    """Whether ``node`` is ``pytest.mark`` or a ``mark`` imported from pytest."""
    if isinstance(node, ast.Attribute):
        return node.attr == "mark" and isinstance(node.value, ast.Name) and node.value.id == "pytest"
    return isinstance(node, ast.Name) and node.id == "mark"
