"""What the hooks report, against what the observer sees in one full lifecycle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.lifecycle import accounting, report_form
from nvsnap_conformance.lifecycle.observe import check_completed
from nvsnap_conformance.lifecycle.trace import Verb
from nvsnap_conformance.outcomes import require

if TYPE_CHECKING:
    from nvsnap_conformance.lifecycle.observe import CycleObservation


@pytest.mark.clause("HOOKS-ALL-RANKS-REPORT")
def test_every_rank_reports_each_verb(cycle: CycleObservation) -> None:
    """Prepare, restore and status are answered by every rank, in step; reports are complete."""
    record = cycle.record
    require(
        check_completed(cycle)
        + accounting.check_reports(
            record.replies.get(Verb.PREPARE, []),
            record.replies.get(Verb.REBUILD, []),
            record.statuses,
            ranks=record.ranks,
        )
    )


@pytest.mark.clause("HOOKS-STATUS-TRUE")
def test_status_tells_the_state(cycle: CycleObservation) -> None:
    """Status says serving before prepare and after restore, and prepared in between, on every rank."""
    require(check_completed(cycle) + report_form.check_status(cycle.record.statuses))


@pytest.mark.clause("HOOKS-OUTCOME-HONEST")
def test_outcomes_agree_with_the_observer(cycle: CycleObservation) -> None:
    """Every held resource is in the report, and nothing is called released that was not held."""
    record = cycle.record
    require(
        check_completed(cycle)
        + accounting.check_honest(record.replies.get(Verb.PREPARE, []), record.snapshots.get("before", []))
    )


@pytest.mark.clause("HOOKS-PREPARE-RELEASES")
def test_released_resources_are_gone(cycle: CycleObservation) -> None:
    """What prepare calls released is not there when the observer looks before the checkpoint."""
    record = cycle.record
    require(
        check_completed(cycle)
        + accounting.check_released(
            record.replies.get(Verb.PREPARE, []), record.snapshots.get("prepared", [])
        )
    )


@pytest.mark.clause("HOOKS-SUCCESS-MEANS-RELEASED")
def test_a_success_leaves_nothing_untold(cycle: CycleObservation) -> None:
    """After a prepare without an error nothing is live but what the report calls unsupported."""
    record = cycle.record
    require(
        check_completed(cycle)
        + accounting.check_accounted(
            record.replies.get(Verb.PREPARE, []), record.snapshots.get("prepared", [])
        )
    )


@pytest.mark.clause("HOOKS-RESTORE-REBUILDS")
def test_restore_brings_everything_back(cycle: CycleObservation) -> None:
    """After restore each rank holds what it held before, no less and no more."""
    record = cycle.record
    before, after = record.snapshots.get("before", []), record.snapshots.get("after", [])
    require(
        check_completed(cycle)
        + accounting.check_rebuilt(before, after, record.replies.get(Verb.REBUILD, []))
        + accounting.check_fresh(record.replies.get(Verb.PREPARE, []), before, after)
    )
