"""The state of one conformance session: selection, engines, cases seen so far, and the record."""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nvsnap_conformance import __version__
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.outcomes import SEVERITY, UNJUDGED, ExitCode, Outcome
from nvsnap_conformance.report.model import (
    CaseRecord,
    ClauseRecord,
    EngineRecord,
    MutantRecord,
    RunRecord,
)
from nvsnap_conformance.report.place import unwritten
from nvsnap_conformance.report.writing import Hold
from nvsnap_conformance.session.execution import NOT_RUN, forget, ran
from nvsnap_conformance.session.judge import (
    Blocked,
    ClauseVerdict,
    Extent,
    Judgement,
    apply_expectation,
    clause_verdicts,
    exit_code,
    is_kill,
    judge_exception,
    shipped_for,
    verdict_text,
)
from nvsnap_conformance.session.keeping import RecordKeeper
from nvsnap_conformance.session.options import resolve
from nvsnap_conformance.session.plan import arm_of, belongs, clauses_of, not_collected
from nvsnap_conformance.session.pool import EnginePool
from nvsnap_conformance.session.telling import Telling
from nvsnap_conformance.termination import Terminations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.hooks.standins import Observation as StandInObservation
    from nvsnap_conformance.lifecycle.images import ImageObservation
    from nvsnap_conformance.lifecycle.observe import CycleObservation
    from nvsnap_conformance.session.arms import Arm

_PHASES: pytest.StashKey[list[tuple[Judgement, float]]] = pytest.StashKey()
REPORT_KEY = "nvs_conformance"
"""The attribute under which a report carries the case's record to the controller."""

BUNDLE: pytest.StashKey[str] = pytest.StashKey()
"""Where a fixture leaves the path of a stack bundle that it took for its case."""


class ConformanceSession:
    """Everything that the plugin's hooks share."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.selection = resolve(config)
        self.worker = getattr(config, "workerinput", {}).get("workerid")
        name = f"events-{self.worker}.jsonl" if self.worker else "events.jsonl"
        self.stream = RecordKeeper(self.selection.out, name)
        self.pool = EnginePool(self.selection, self.stream, self.progress, worker=self.worker)
        self.pool.on_start = self._engine_started
        self.started = datetime.now(UTC)
        self.cases: list[CaseRecord] = []
        self.engines: list[EngineRecord] = []
        self.engine_versions: dict[str, str] = {}
        self._untold: list[tuple[EngineRecord, str, str]] = []
        self.cycles: dict[str, CycleObservation] = {}
        self.images: dict[str, ImageObservation] = {}
        self.stand_in_cycles: dict[str, StandInObservation] = {}
        self.final: RunRecord | None = None
        self.left_out: set[tuple[str, str]] = set()
        """Clauses, by arm, of which a case was deselected, or not collected though others were."""
        self.planned: dict[tuple[str, str], int] = {}
        """How many cases of each clause there are on each arm; with workers, once one of them has ended."""
        self.troubles: list[NvsnapError] = []
        self._terminations = Terminations()
        self._telling = Telling()
        self.collect_only = bool(config.getoption("collectonly"))
        if self.collect_only:
            return
        self.stream.emit(
            "session",
            targets=[target.name for target in self.selection.targets],
            profiles=list(self.selection.profiles),
            mutants=[mutant.name for mutant in self.selection.mutants],
            command=sys.argv,
            worker=self.worker,
        )
        if self.stream.failure is not None:
            raise self.stream.failure
        self._hold = Hold(self.selection.out)
        self._terminations.arm()

    # -- what the user sees -------------------------------------------------------------------------

    def header(self) -> list[str]:
        """Return the lines of the session's header."""
        chosen = self.selection
        how = " (picked by default)" if chosen.host_cases else " (picked for GPUs)"
        how = how if chosen.auto_picked else ""
        lines = [
            (
                f"nvsnap-conformance {__version__}: target {', '.join(t.name for t in chosen.targets)}"
                f"{how}, "
                f"TP {sorted({arm.tensor_parallel for arm in chosen.engine_arms()})}, "
                f"profiles {', '.join(chosen.profiles)}"
            ),
        ]
        if not self.collect_only:
            lines.append(f"record: {chosen.out}")
        ways = {target.hooks.inject.value for target in chosen.targets} - {"extension"}
        if ways:
            lines.append(f"loader by {', '.join(sorted(ways))}")
        lines += [f"missing: {lack}" for lack in chosen.lacks]
        if chosen.mutants:
            lines.append(f"mutants: {', '.join(mutant.name for mutant in chosen.mutants)}")
        variables = sorted(name for name in os.environ if name.startswith(("NVS_", "NVSNAP_")))
        if variables:
            lines.append(f"environment: {', '.join(f'{name}={os.environ[name]}' for name in variables)}")
        return lines

    def progress(self, text: str) -> None:
        """Show one line while something long is going on; workers only record it."""
        self.stream.emit("progress", text=text)
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        if reporter is None or self.worker:
            return
        if capture is None:
            reporter.ensure_newline()
            reporter.write_line(f"  {text}")
            return
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(f"  {text}")
            reporter.flush()

    # -- one case -----------------------------------------------------------------------------------

    def before_case(self, item: pytest.Item) -> None:
        """Raise the skip of a case whose prerequisite failed or whose capability nobody claims."""
        arm, clauses = arm_of(item), clauses_of(item)
        if arm is None or not clauses:
            return
        forget(item)
        self.stream.emit("case-start", nodeid=item.nodeid, arm=arm.id, clauses=clauses)
        if arm.target is not None and self.selection.lacks:
            pytest.skip(f"missing: {'; '.join(self.selection.lacks)}")
        if arm.mutant is None:  # under a mutant each clause meant for it must see it by itself
            self._check_prerequisites(clauses, arm)
        self._check_capabilities(clauses, arm)

    def _check_prerequisites(self, clauses: list[str], arm: Arm) -> None:
        for clause in clauses:
            for needed in self.selection.registry.clause(clause).prerequisites:
                outcomes = [case.outcome for case in self.cases_seen(needed, arm)]
                bad = [outcome for outcome in outcomes if not outcome.conformant]
                if bad:
                    raise Blocked(f"blocked: {clause} needs {needed}, which ended {bad[0]} on {arm.id}")

    def _check_capabilities(self, clauses: list[str], arm: Arm) -> None:
        needs = [need for name in clauses for need in self.selection.registry.clause(name).needs]
        if not needs:
            return
        from nvsnap_conformance.capabilities import decide, probe  # noqa: PLC0415 - only where needed
        from nvsnap_conformance.errors import EnvironmentFailure  # noqa: PLC0415

        capabilities = probe()
        claims = None
        if arm.target is not None:
            capabilities = capabilities.with_target(arm.target, self.engine_versions.get(arm.target.name))
            claims = None if arm.auto_picked else arm.target.claims.capabilities
        decision = decide(needs, capabilities, claims=claims)
        if decision.action == "skip":
            pytest.skip(decision.reason)
        if decision.action == "fail":
            raise EnvironmentFailure(
                f"a claimed capability is missing: {decision.reason}",
                next_step="`nvsnap-conformance doctor` says how to get it; or take the claim back",
            )

    def cases_seen(self, clause: str, arm: Arm) -> list[CaseRecord]:
        """Return the finished cases of a clause on an arm, in this process."""
        return [case for case in self.cases if clause in case.clauses and case.arm == arm.id]

    def after_phase(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Judge one phase; after the last one, put the case's record on the report."""
        arm, clauses = arm_of(item), clauses_of(item)
        if arm is None or not clauses:
            return
        judgement = Judgement(Outcome.PASSED)
        if call.excinfo is not None:
            judgement = judge_exception(call.excinfo.value)
            self._tell(call.excinfo.value, judgement, arm, report)
            shipped = shipped_for(arm, self.selection, self.engine_versions)
            judgement = apply_expectation(judgement, clauses, arm, shipped)
        phases = item.stash.setdefault(_PHASES, [])
        phases.append((judgement, call.duration))
        if judgement.outcome is Outcome.XFAILED:
            report.outcome = "skipped"
            report.wasxfail = judgement.expectation or ""
        if call.when == "teardown":
            case = self._case_record(item, arm, clauses, phases)
            raw = case.model_dump(mode="json")
            engines = [
                {"engine": engine.model_dump(mode="json"), "target": target, "version": version}
                for engine, target, version in self._untold
            ]
            self._untold.clear()
            # xdist carries extra attributes of a report to the controller, as long as they are JSON values.
            setattr(report, REPORT_KEY, {"case": raw, "engines": engines})
            self.stream.emit("case", **raw)
            if self.worker:  # the controller gets it with the report; prerequisites are looked up here
                self.cases.append(case)

    def _tell(self, error: BaseException, judgement: Judgement, arm: Arm, report: pytest.TestReport) -> None:
        """Put the suite's own words in the place of pytest's traceback, which the events keep."""
        words = self._telling.words(error, judgement, arm)
        if words is not None and not self.config.getoption("fulltrace"):
            self.stream.emit(
                "traceback", nodeid=report.nodeid, text="".join(traceback.format_exception(error))
            )
            report.longrepr = words

    def _case_record(
        self, item: pytest.Item, arm: Arm, clauses: list[str], phases: list[tuple[Judgement, float]]
    ) -> CaseRecord:
        # A case that was skipped has a passed teardown; SEVERITY puts a skip last, so look for it first.
        passed = phases[0][0] if ran(item) else Judgement(Outcome.NOT_RUN, message=NOT_RUN)
        telling = [j for j, _ in phases if j.outcome is not Outcome.PASSED] or [passed]
        worst = min(telling, key=lambda j: SEVERITY.index(j.outcome))
        return CaseRecord(
            nodeid=item.nodeid,
            arm=arm.id,
            mutant=arm.mutant.name if arm.mutant else None,
            clauses=clauses,
            outcome=worst.outcome,
            signature=str(worst.signature) if worst.signature else None,
            message=worst.message,
            expectation=worst.expectation,
            met=list(dict.fromkeys(text for judgement, _ in phases for text in judgement.met)),
            seconds=round(sum(seconds for _, seconds in phases), 3),
            bundle=item.stash.get(BUNDLE, None),
        )

    # -- what reports bring -------------------------------------------------------------------------

    def take_report(self, report: pytest.TestReport) -> None:
        """Add the case that a report carries, if any, and write the record as it now stands."""
        told: dict[str, Any] | None = getattr(report, REPORT_KEY, None)
        if told is None:
            return
        self._take_engines(told["engines"])
        self.cases.append(CaseRecord.model_validate(told["case"]))
        if not self.worker:
            self.stream.results(self._record("running", None, None))
            self._stop_without_record()

    def _stop_without_record(self) -> None:
        """Have pytest run no further case once the record cannot be written."""
        if self.stream.failure is not None:
            for name in ("session", "dsession"):  # the latter is pytest-xdist's controller
                loop = self.config.pluginmanager.get_plugin(name)
                if loop is not None:
                    loop.shouldstop = self.stream.failure.what

    def _take_engines(self, raw: list[dict[str, Any]]) -> None:
        """Add the engines that came up for a case."""
        for entry in raw:
            self.engines.append(EngineRecord.model_validate(entry["engine"]))
            self.engine_versions[entry["target"]] = entry["version"]

    def _engine_started(self, engine: EngineRecord, target: str, version: str) -> None:
        self.engine_versions[target] = version
        self._untold.append((engine, target, version))
        self.stream.emit("engine", **engine.model_dump(mode="json"))

    # -- the end ------------------------------------------------------------------------------------

    def finish(self, exitstatus: int) -> int:
        """Close every engine, write the final record, return the exit status of the session."""
        try:
            self.pool.close()
        except NvsnapError as error:
            self.troubles.append(error)
        if self.worker or self.collect_only:
            self.stream.close()
            return exitstatus
        aborted = exitstatus in {pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR}
        broken = self.stream.failure is not None or bool(self.troubles)
        self.final = self._final(exitstatus, aborted=aborted, broken=broken)
        self.stream.results(self.final)
        if self.stream.failure is not None:
            self.troubles.insert(0, self.stream.failure)
            self.final = self._final(exitstatus, aborted=aborted, broken=True)
        code = self.final.exit_code
        self.stream.emit("end", state=self.final.state, verdict=self.final.verdict, exit_code=code)
        self.stream.close()
        self._hold.close()
        self._terminations.disarm()
        return exitstatus if code is None else code

    def _final(self, exitstatus: int, *, aborted: bool, broken: bool) -> RunRecord:
        """Return the record as it ends; ``broken`` runs have the machine's verdict, whatever was judged."""
        code = ExitCode.ENVIRONMENT if broken else None if aborted else self._exit_code(exitstatus)
        return self._record("aborted" if aborted else "complete", code, datetime.now(UTC))

    def file_failed(self, error: OSError) -> None:
        """Take the error of a file that a reporter of pytest's could not write at the end (``junit.xml``).

        One of the record's own that was cut short is removed: no reader could tell.
        """
        junit = self.config.getoption("xmlpath", None)
        path = Path(error.filename or junit or self.selection.out).resolve()
        if path.is_file() and path.is_relative_to(self.selection.out):
            path.unlink()
        if self.stream.failure is None:  # else it is the same disk, and has been told
            self.troubles.append(unwritten(path, error))

    def _exit_code(self, exitstatus: int) -> ExitCode:
        ours = {case.nodeid for case in self.cases}
        # A plain test beside the cases, or an error at collection, must not be lost in our own count.
        other = exitstatus == pytest.ExitCode.TESTS_FAILED and self._failed_elsewhere(ours)
        return exit_code(self._verdicts(), self._missing(), other_failures=other)

    def _failed_elsewhere(self, ours: set[str]) -> bool:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return False
        reports = [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
        return any(getattr(report, "nodeid", "") not in ours for report in reports)

    def _verdicts(self) -> list[ClauseVerdict]:
        extent = Extent(self.planned, self.left_out)
        return clause_verdicts(self.cases, self.selection, self.engine_versions, extent)

    def plan(self, items: Sequence[pytest.Item], *, collected: Sequence[pytest.Item]) -> None:
        """Note how many cases of each clause are to run on each arm, out of those that were collected."""
        count = Counter(
            (name, arm.id) for item in items if (arm := arm_of(item)) is not None for name in clauses_of(item)
        )
        self.planned = dict(count)
        self.left_out |= not_collected(self.config, collected)
        self._tell_controller()

    def take_extent(self, told: dict[str, Any]) -> None:
        """Take over what a worker planned, which every worker plans alike, and what it left out."""
        self.planned |= {(clause, arm): count for clause, arm, count in told.get("nvs_planned", ())}
        self.left_out |= {(clause, arm) for clause, arm in told.get("nvs_left_out", ())}

    def _tell_controller(self) -> None:
        if self.worker:
            output: dict[str, Any] = self.config.workeroutput  # type: ignore[attr-defined]
            output["nvs_planned"] = [(*key, count) for key, count in self.planned.items()]
            output["nvs_left_out"] = sorted(self.left_out)

    def leave_out(self, items: Sequence[pytest.Item]) -> None:
        """Note cases of this session that are deselected: their clauses are not executed as a whole."""
        for item in items:
            arm, names = arm_of(item), clauses_of(item)
            if arm is not None and belongs(item, self.selection):
                self.left_out |= {(name, arm.id) for name in names}
        self._tell_controller()

    def _missing(self) -> list[str]:
        executed = {
            (verdict.clause, verdict.arm)
            for verdict in self._verdicts()
            if verdict.outcome not in {Outcome.SKIPPED, Outcome.NOT_RUN} and not verdict.open
        }
        executed -= self.left_out
        return sorted(f"{clause}@{arm}" for clause, arm in self.selection.must_run() - executed)

    def _record(self, state: str, code: ExitCode | None, ended: datetime | None) -> RunRecord:
        verdicts = self._verdicts()
        degraded = sorted({item for engine in self.engines for item in engine.degraded})
        mutant_of = {arm.id: arm.mutant for arm in self._arms()}
        registry, profiles = self.selection.registry, self.selection.profiles
        clauses = [
            ClauseRecord(
                clause=verdict.clause,
                arm=verdict.arm,
                mutant=mutant.name if (mutant := mutant_of.get(verdict.arm)) else None,
                level=registry.clause(verdict.clause).level.value,
                must_run=any(registry.clause(verdict.clause).must_run_in(name) for name in profiles),
                outcome=verdict.outcome,
                note=verdict.note,
            )
            for verdict in verdicts
        ]
        return RunRecord(
            suite_version=__version__,
            state=state,  # type: ignore[arg-type] # one of the three literals
            started=self.started,
            ended=ended,
            command=list(sys.argv),
            targets=[target.name for target in self.selection.targets],
            profiles=list(profiles),
            machine={
                "kernel": platform.release(),
                "system": platform.platform(),
                "cores": os.cpu_count(),
                "memory_bytes": psutil.virtual_memory().total,
                "python": platform.python_version(),
                "root": os.geteuid() == 0,
            },
            engines=self.engines,
            cases=self.cases,
            clauses=clauses,
            mutants=self._mutants(),
            missing=self._missing(),
            degraded=degraded,
            verdict=state if code is None else verdict_text(code, degraded),
            exit_code=None if code is None else int(code),
        )

    def _arms(self) -> list[Arm]:
        return [*self.selection.engine_arms(), *self.selection.host_arms()]

    def _mutants(self) -> list[MutantRecord]:
        records: list[MutantRecord] = []
        for mutant in self.selection.mutants:
            killed = sorted(
                {
                    clause
                    for case in self.cases
                    if case.mutant == mutant.name and is_kill(case, mutant.signature)
                    for clause in case.clauses
                    if clause in mutant.kills
                }
            )
            judged = {
                clause
                for case in self.cases
                if case.mutant == mutant.name and case.outcome not in UNJUDGED
                for clause in case.clauses
            }
            records.append(
                MutantRecord(
                    name=mutant.name,
                    meant=list(mutant.kills),
                    killed_by=killed,
                    survived=sorted(set(mutant.kills) & judged - set(killed)),
                    untried=sorted(set(mutant.kills) - judged),
                )
            )
        return records

    def summary(self, reporter: pytest.TerminalReporter) -> None:
        """Print outcomes by clause, what is missing, and the verdict."""
        if self.final is None or self.worker:
            return
        from nvsnap_conformance.report.terminal import write_summary  # noqa: PLC0415 - only at the end

        write_summary(reporter, self.final, self.selection.out, self.troubles)
