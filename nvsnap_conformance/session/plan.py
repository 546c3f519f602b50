"""From collected items to the plan of a session: which cases, on which arms, in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.catalogue import load_catalogue
from nvsnap_conformance.session.arms import Arm
from nvsnap_conformance.shipped import case_roots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.session.options import Selection
    from nvsnap_conformance.session.state import ConformanceSession

ARM_FIXTURES = ("arm", "host_arm")


def clauses_of(item: pytest.Item) -> list[str]:
    """Return the clause IDs of an item, those of its own marks and of its class and module."""
    return list(dict.fromkeys(str(name) for mark in item.iter_markers("clause") for name in mark.args))


def arm_of(item: pytest.Item) -> Arm | None:
    """Return the arm that an item was parametrised with, ``None`` where it asks for none."""
    callspec = getattr(item, "callspec", None)
    for name in ARM_FIXTURES:
        if callspec is not None and name in callspec.params:
            arm = callspec.params[name]
            # pytest gives a placeholder where there is no arm at all: none of the mutants fits a size.
            return arm if isinstance(arm, Arm) else None
    return None


def belongs(item: pytest.Item, selection: Selection) -> bool:
    """Whether an item is this session's: by its clauses, its arm, and the parameters of its mutant."""
    arm = arm_of(item)
    if arm is None or not selection.wants(clauses_of(item), arm):
        return False
    if arm.mutant is None or not arm.mutant.parameters:
        return True
    callspec = item.callspec  # type: ignore[attr-defined] # there is one: it has the arm
    given = [value for name, value in callspec.params.items() if name not in ARM_FIXTURES]
    return not given or any(value in arm.mutant.parameters for value in given)


def not_collected(config: pytest.Config, items: Sequence[pytest.Item]) -> set[tuple[str, str]]:
    """Return the clauses, by arm, of which the words of the command line collect some cases and not others.

    Of the shipped cases, that is: nobody knows what others there are.
    """
    words = [str(word) for word in config.getoption("file_or_dir", ())]
    if not words or set(words) == {str(root) for root in case_roots()}:
        return set()
    of_parameters = {word.rpartition("::")[2].partition("[")[0] for word in words if "[" in word}
    clauses = {name for item in items if _function(item) in of_parameters for name in clauses_of(item)}
    collected = {(item.path, _function(item)) for item in items}
    for clause in {name for item in items for name in clauses_of(item)}:
        shipped = {(case.file, case.nodeid.rpartition("::")[2]) for case in load_catalogue().cases_of(clause)}
        if shipped & collected and not shipped <= collected:
            clauses.add(clause)
    return {
        (name, arm.id)
        for item in items
        if (arm := arm_of(item)) is not None
        for name in clauses_of(item)
        if name in clauses
    }


def _function(item: pytest.Item) -> str:
    """Return the name of an item's function, without its parameters."""
    return getattr(item, "originalname", None) or item.name


def plan_items(session: ConformanceSession, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the session does not want and order the rest, in place.

    Cases that share an engine stand together; those that spoil or end it come last. Prerequisites of a
    clause come before it.
    """
    selection = session.selection
    order = {clause.id: index for index, clause in enumerate(selection.registry.order())}
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        names = clauses_of(item)
        if not names:
            kept.append(item)
            continue
        for name in names:
            selection.registry.clause(name)
        arm = arm_of(item)
        if arm is None and not set(ARM_FIXTURES) & set(getattr(item, "fixturenames", ())):
            raise pytest.UsageError(
                f"{item.nodeid}: a case with a clause takes the fixture 'arm' (it needs an engine) or "
                "'host_arm' (it brings its own processes)"
            )
        if arm is not None and belongs(item, selection):
            kept.append(item)
            for name in names:
                item.user_properties.append(("clause", name))
            item.user_properties.append(("arm", arm.id))
        else:
            dropped.append(item)

    def rank(item: pytest.Item) -> tuple[int, str, int, int, int, str]:
        arm = arm_of(item)
        names = clauses_of(item)
        if arm is None or not names:
            return (0, "", 0, 0, 0, "")
        if item.get_closest_marker("ends_engine"):
            # After the case that spoils an engine comes the one that can still use it.
            stage = 2 if item.get_closest_marker("takes_spoiled_engine") else 3
        elif item.get_closest_marker("spoils_engine"):
            stage = 1
        else:
            stage = 0
        dirty = int(arm.mutant.dirty) if arm.mutant else 0
        return (
            1 if arm.target is None else 2,
            arm.engine_key,
            stage,
            dirty,
            max(order[name] for name in names),
            arm.id,
        )

    kept.sort(key=rank)
    session.plan(kept, collected=items)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = kept
