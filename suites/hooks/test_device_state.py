"""What hooks do with captured graphs, workspaces and groups: order, aliases, renewed groups, failures.

Stand-ins behind vLLM's own names make this visible in an engine on CPU, see
:mod:`nvsnap_conformance.hooks.standins`. One cycle serves seven clauses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.hooks import released, standins, teardown, threads, unsupported
from nvsnap_conformance.hooks.injection import INJECT_PACKAGE
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec
    from nvsnap_conformance.outcomes import Finding
    from nvsnap_conformance.session.arms import Arm
    from nvsnap_conformance.session.state import ConformanceSession

SECONDS = 120.0

BOUND = 3.0
"""What the shipped hooks are told to bound their waits by, in seconds; a vendor's may have its own bound."""

BOUND_CALL = 12.0
"""Allowance for a call to hooks that are told :data:`BOUND`, or to the engine's own, in seconds."""

FAILURES: dict[str, dict[str, Any]] = {
    "workspace-prepare-first": {"what": "workspace-prepare", "rank": "first"},
    "group-destroyed-last": {"what": "destroy-group", "rank": "last", "nth": 1},
    "group-made-first": {"what": "new-group", "rank": "first", "nth": 1},
    "workspace-restore-last": {"what": "workspace-restore", "rank": "last"},
    "memory-restore-half": {"what": "memory-restore", "rank": "first", "nth": 1},
}
"""Where a call is made to fail: each step of the two verbs that is seen from outside the hooks."""


@pytest.fixture
def seen(
    arm: Arm, engine: EngineHandle, hooks: HooksSpec, conformance_session: ConformanceSession
) -> standins.Observation:
    """Give the arm's one cycle over stand-ins, the groups' order of registration turned on the last rank."""
    cycles = conformance_session.stand_in_cycles
    if arm.id not in cycles:
        cycles[arm.id] = standins.observe(engine, hooks, deadline=Deadline.after(SECONDS), permute=True)
    return cycles[arm.id]


@pytest.mark.clause("HOOKS-TEARDOWN-ORDER")
def test_groups_go_last(seen: standins.Observation) -> None:
    """No group is destroyed while a captured graph or a workspace that uses it is there."""
    require(_judged(seen) + standins.check_order(seen))


@pytest.mark.clause("HOOKS-REBUILD-ORDER")
def test_groups_come_first(seen: standins.Observation) -> None:
    """No workspace is mapped again before the groups are made that its memory is exchanged over."""
    require(standins.check_rebuild_order(seen) or _judged(seen))


@pytest.mark.clause("HOOKS-SAME-ORDER-ON-RANKS")
def test_ranks_go_in_one_order(seen: standins.Observation) -> None:
    """All ranks destroy and make groups in one order, although they registered them in different ones."""
    require(_judged(seen) + standins.check_same_order(seen))


@pytest.mark.clause("HOOKS-ALIAS-ONCE")
def test_an_aliased_workspace_is_visited_once(seen: standins.Observation) -> None:
    """A workspace that is in both of the engine's slots is released and restored once."""
    require(_judged(seen) + standins.check_alias_once(seen))


@pytest.mark.clause("HOOKS-DEVICE-STATE-RELEASED")
def test_graphs_and_workspaces_are_released(seen: standins.Observation) -> None:
    """After prepare no captured graph and no mapped workspace is left but what is called unsupported."""
    require(standins.check_completed(seen) + standins.check_released(seen))


@pytest.mark.clause("HOOKS-WORKSPACE-FOLLOWS-GROUP")
def test_a_workspace_comes_back_over_the_group_in_force(seen: standins.Observation) -> None:
    """After restore every workspace is mapped, over the group that is there now."""
    require(standins.check_completed(seen) + standins.check_follows_group(seen))


@pytest.mark.clause("HOOKS-EXCHANGE-BY-IDENTITY")
def test_an_exchange_goes_and_comes_back_as_an_object(seen: standins.Observation) -> None:
    """A released all-to-all manager is gone; after restore all that held it hold the one in its place."""
    require(standins.check_exchange(seen) or _judged(seen))


@pytest.mark.clause("HOOKS-BACKENDS-AGREE")
def test_two_backends_are_refused(engine: EngineHandle, hooks: HooksSpec) -> None:
    """Ranks that hold workspaces of two backends are refused in time, before anything is touched."""
    require(
        standins.check_backends_agree(
            standins.observe(engine, _bounded(hooks), deadline=Deadline.after(SECONDS), unlike=True)
        )
    )


@pytest.mark.clause("HOOKS-TEARDOWN-REFUSED")
@pytest.mark.parametrize("where", ["every", "last"])
def test_a_teardown_that_cannot_be_done_is_refused(
    engine: EngineHandle, hooks: HooksSpec, where: str
) -> None:
    """Hooks that are to suspend NCCL, over a library that cannot, refuse on every rank and touch nothing."""
    asked = teardown.asked_to_suspend(_bounded(hooks))
    seen = standins.observe(engine, asked, deadline=Deadline.after(SECONDS), old_nccl=where)
    require(teardown.check_refused(seen))


@pytest.mark.clause("HOOKS-UNSUPPORTED-SERVES-ON")
def test_a_workspace_that_cannot_be_torn_down_is_told(engine: EngineHandle, hooks: HooksSpec) -> None:
    """Every rank tells of a workspace that cannot be torn down, and the engine serves on as before."""
    seen = unsupported.observe(engine, _bounded(hooks), deadline=Deadline.after(SECONDS))
    require(unsupported.check_told(seen) + unsupported.check_serves_on(seen))


@pytest.mark.clause("HOOKS-ANY-THREAD")
def test_hooks_work_from_any_thread(engine: EngineHandle, hooks: HooksSpec) -> None:
    """Prepare and restore from a new thread each, on every rank, act on the worker's device."""
    seen = standins.observe(engine, threads.in_fresh_threads(hooks), deadline=Deadline.after(SECONDS))
    require(threads.check_any_thread(seen))


@pytest.mark.clause("HOOKS-FAILURE-TOLD-BY-ALL")
@pytest.mark.ends_engine
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_on_one_rank_is_told_by_all(
    engine: EngineHandle, hooks: HooksSpec, arm: Arm, failure: str
) -> None:
    """A step that fails on one rank ends the call on every rank in time, and every rank says so."""
    chosen = FAILURES[failure]
    rank = 0 if chosen["rank"] == "first" else arm.tensor_parallel - 1
    shipped = hooks.implementation.startswith(f"{INJECT_PACKAGE}.")
    seen = standins.observe(
        engine,
        _bounded(hooks),
        deadline=Deadline.after(SECONDS),
        verb_seconds=BOUND_CALL if shipped else standins.VERB_SECONDS,
        fault={**chosen, "rank": rank},
    )
    require(
        standins.check_failure_told(seen, rank=rank, what=str(chosen["what"]), nth=int(chosen.get("nth", 0)))
    )


def _judged(seen: standins.Observation) -> list[Finding]:
    """Check that the cycle went through, and released something of which it can be told how."""
    return standins.check_completed(seen) + released.check_anything_released(seen)


def _bounded(hooks: HooksSpec) -> HooksSpec:
    return replace(hooks, options={**hooks.options, "rendezvous_seconds": BOUND})
