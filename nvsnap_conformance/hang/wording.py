"""The words of a verdict's summary: who is where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.hang.collectives import Kind, bare_name
from nvsnap_conformance.hang.merge import Condition, span

if TYPE_CHECKING:
    from nvsnap_conformance.hang.merge import Group, View


VERBS = {
    Condition.GATHERED: "in ",
    Condition.WAITING: "in ",
    Condition.DEVICE: "in ",
    Condition.CONTROL: "in ",
    Condition.PHASE: "in ",
    Condition.ELSEWHERE: "in ",
    Condition.IDLE: "idle: ",
}


def lock_note(stuck: list[View], waiting: list[View]) -> str:
    """Name a thread that is stuck serving requests in a rank that others make requests to."""
    if not any(v.position is not None and v.position.kind is Kind.HANDSHAKE for v in stuck):
        return ""
    for view in waiting:
        for thread in view.threads:
            if thread.work is not None:
                return (
                    f"; in {view.label} the thread {thread.thread or '?'} is stuck at "
                    f"{thread.leaf.file}:{thread.leaf.line} in {bare_name(thread.leaf.name)}() while its "
                    "main thread waits for those who ask: a lock held across a collective"
                )
    return ""


def first_entry(found: list[View]) -> str:
    """Return the id of the first known wait among ``found``, for the signature's place."""
    return next((v.position.entry.id for v in found if v.position and v.position.entry), "")


def ranks(ranks: tuple[int, ...]) -> str:
    """Write ranks: ``rank 3``, ``ranks 0-2, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {span(ranks)}"


def count(found: list[View]) -> str:
    """Write how many ranks there are, and which."""
    ranks = tuple(sorted(v.member.rank or 0 for v in found))
    return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} ({span(ranks)})"


def what(found: list[View]) -> str:
    """Write what the ranks of one class do."""
    position = found[0].position
    return position.describe() if position else "?"


def where(group: Group) -> str:
    """Write who is in a class, and where."""
    return f"{count(list(group.views))} {VERBS.get(group.condition, '')}{group.describe()}"


def place(view: View) -> str:
    """Write where one process is, with a verb that fits its condition."""
    return VERBS.get(view.condition, "") + view.describe()
