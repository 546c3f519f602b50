"""All checks of the hooks' contract that need no engine, over a group of ranks."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import HooksSpec, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded, UsageError
from nvsnap_conformance.held_folder import CHECK, held
from nvsnap_conformance.hooks import contract
from nvsnap_conformance.lifecycle import accounting, report_form
from nvsnap_conformance.lifecycle.driver import OBSERVER, LifecycleDriver, Variant
from nvsnap_conformance.lifecycle.trace import Verb
from nvsnap_conformance.outcomes import Finding, finding
from nvsnap_conformance.testing.ranks import REHEARSAL_OBSERVER, WORKER, RankGroup, require_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nvsnap_conformance.lifecycle.driver import CycleRecord

OBSERVER_SECONDS = 60.0
"""Allowance of the observer's first look, in seconds: it may import the engine, whatever hooks may take."""

CYCLES = 2
"""One cycle shows what is forgotten, the second what is left over."""


@dataclass(frozen=True)
class HooksReport:
    """What was found, by clause; a clause without findings holds."""

    findings: Mapping[str, list[Finding]]

    @property
    def conformant(self) -> bool:
        """Whether every clause holds."""
        return not any(self.findings.values())

    def __str__(self) -> str:
        rows = []
        for clause, found in self.findings.items():
            rows.append(f"{'broken' if found else 'holds ':<7} {clause}")
            rows += [f"        [{one.signature}] {one.message}" for one in found]
        return "\n".join(rows)


def check_hooks(
    implementation: str,
    *,
    path: Path | None = None,
    options: Mapping[str, Any] | None = None,
    ranks: int = 2,
    worker: str = WORKER,
    observer: HooksSpec = REHEARSAL_OBSERVER,
    python: Path = Path(sys.executable),
    seconds: float = 30.0,
) -> HooksReport:
    """Judge the hooks ``implementation`` (``module:Class``, found below ``path``) on ``ranks`` processes.

    ``worker``, ``observer`` and ``python`` are those of :class:`RankGroup`; ``options`` is passed to the
    class. ``seconds`` bounds each situation; hooks that do not answer by then break its clause with
    ``HOOKS:SILENT``. Every situation has a group of its own, so that none spoils another.

    Raises :class:`UsageError` for what cannot be judged: arguments that :class:`RankGroup` refuses, a time
    that is none, hooks that cannot be imported, an observer that does not see.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UsageError(
            f"seconds={seconds!r} bounds nothing", next_step="give each situation a time above zero"
        )
    require_name("implementation", implementation)
    hooks = HooksSpec(implementation, path, dict(options or {}))
    with RankGroup(ranks, worker=worker, observer=observer, path=path, python=python) as group:
        _require_importable(group, hooks, observer, Deadline.after(seconds))

    def situation(drive: Callable[[RankGroup], dict[str, list[Finding]]], *clauses: str) -> None:
        with RankGroup(ranks, worker=worker, observer=observer, path=path, python=python) as group:
            try:
                findings.update(drive(group))
            except DeadlineExceeded as error:
                findings.update({clause: [finding(str(error), "HOOKS:SILENT")] for clause in clauses})
            except RequestFailed as error:
                findings.update({clause: [finding(str(error), "HOOKS:RAISED")] for clause in clauses})

    def by_contract(clause: str, function: Callable[..., list[Finding]]) -> None:
        def drive(group: RankGroup) -> dict[str, list[Finding]]:
            return {clause: function(group, hooks, ranks=ranks, deadline=Deadline.after(seconds))}

        situation(drive, clause)

    findings: dict[str, list[Finding]] = {}
    by_contract("HOOKS-PREPARE-RESTORE-PAIR", contract.unpaired_calls)
    by_contract("HOOKS-ERROR-IS-VALUE", contract.failing_call)
    by_contract("HOOKS-VERSION-GATE", contract.unknown_version)

    def cycles(group: RankGroup) -> dict[str, list[Finding]]:
        with held(CHECK) as folder:
            driver = LifecycleDriver(group, hooks, None, folder)  # type: ignore[arg-type] # no engine
            records = [driver.run(Variant.HOOKS_ONLY, Deadline.after(seconds)) for _ in range(CYCLES)]
        return judge_cycles(records)

    situation(cycles, *CYCLE_CLAUSES)
    return HooksReport(findings)


def _require_importable(group: RankGroup, hooks: HooksSpec, observer: HooksSpec, deadline: Deadline) -> None:
    """Raise :class:`UsageError` where a rank cannot import the hooks, or its observer does not answer.

    Neither is a finding against the hooks: of what was never run nothing is known.
    """
    try:
        told = group.rpc("snapshot", hooks=OBSERVER, deadline=Deadline.after(OBSERVER_SECONDS))
        blind = next((reply for reply in told if not accounting.is_snapshot(reply)), None)
        if blind is not None:
            raise UsageError(
                f"the observer {observer.implementation} sees nothing on rank {blind.rank}: "
                f"{(blind.error or {}).get('message') or blind.value!r}",
                cause="it cannot be imported, fails with this worker, or returns no table of resources",
                next_step="correct observer=, or leave it out for the rehearsal's own worker",
            )
    except (DeadlineExceeded, RequestFailed) as error:
        raise UsageError(
            f"the observer {observer.implementation} does not answer: {error}",
            next_step="try its snapshot() by itself; the traceback, if any, is on stderr",
        ) from error
    try:
        refused = contract.not_imported(group, hooks, deadline)
    except (DeadlineExceeded, RequestFailed):
        return  # a constructor that ends the rank, or never ends, is the hooks' own: each situation tells it
    if refused is not None:
        raise UsageError(
            f"rank {refused.rank}: {(refused.error or {}).get('message')}",
            cause="the module or the class has another name, or its import fails",
            next_step="import it in that interpreter (python=), with path= on sys.path",
        )


CYCLE_CLAUSES = (
    "HOOKS-ALL-RANKS-REPORT",
    "HOOKS-STATUS-TRUE",
    "HOOKS-OUTCOME-HONEST",
    "HOOKS-PREPARE-RELEASES",
    "HOOKS-SUCCESS-MEANS-RELEASED",
    "HOOKS-RESTORE-REBUILDS",
)


def judge_cycles(records: list[CycleRecord]) -> dict[str, list[Finding]]:
    """Judge recorded cycles by the clauses that need no engine; ``CYCLE:<VERB>`` where one ended early."""
    found: dict[str, list[Finding]] = {clause: [] for clause in CYCLE_CLAUSES}
    for record in records:
        found["HOOKS-STATUS-TRUE"] += report_form.check_status(record.statuses)
        if record.failure is not None:
            verb, message = record.failure.verb, record.failure.message
            stopped = finding(f"the cycle ended at {verb}: {message}", f"CYCLE:{verb.upper()}")
            for entries in found.values():
                entries.append(stopped)
            continue
        prepare, rebuild = record.replies[Verb.PREPARE], record.replies[Verb.REBUILD]
        before, prepared, after = (record.snapshots[moment] for moment in ("before", "prepared", "after"))
        found["HOOKS-ALL-RANKS-REPORT"] += accounting.check_reports(
            prepare, rebuild, record.statuses, ranks=record.ranks
        )
        found["HOOKS-OUTCOME-HONEST"] += accounting.check_honest(prepare, before)
        found["HOOKS-PREPARE-RELEASES"] += accounting.check_released(prepare, prepared)
        found["HOOKS-SUCCESS-MEANS-RELEASED"] += accounting.check_accounted(prepare, prepared)
        found["HOOKS-RESTORE-REBUILDS"] += accounting.check_rebuilt(before, after)
        found["HOOKS-RESTORE-REBUILDS"] += accounting.check_fresh(prepare, before, after)
    return found
