"""From collected items to the plan of a session: which cases, on which arms, in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.session.arms import Arm

if TYPE_CHECKING:
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
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = kept
