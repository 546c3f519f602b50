"""The commands ``watch`` and ``inspect``."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import EnvironmentFailure, UsageError
from nvsnap_conformance.outcomes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.hang.collectives import FrameRegistry
    from nvsnap_conformance.hang.model import Member
    from nvsnap_conformance.hang.progress import Metrics
    from nvsnap_conformance.hang.verdict import Verdict
    from nvsnap_conformance.processes import ProcessId

_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
_PID = click.IntRange(1, 1 << 22)
"""A pid: 2**22 is PID_MAX_LIMIT of Linux on 64-bit machines (proc(5), /proc/sys/kernel/pid_max)."""

_DAY = 86400.0
_FOREVER = 10 * 365 * _DAY


@click.command()
@click.option("--pid", "pids", multiple=True, type=_PID, help="A rank's process; once per rank, in order.")
@click.option("--tree", "root", type=_PID, help="An engine's root process; its ranks are found.")
@click.option("--out", type=_FOLDER, help="Folder of the bundle [default: nvs-hang-TIME].")
@click.option("--once", is_flag=True, help="Read stacks now, judge, and end.")
@click.option(
    "--stall", default=2.0, show_default=True, help="Seconds without progress before stacks are read."
)
@click.option("--poll", default=0.5, show_default=True, help="Seconds between two polls.")
@click.option("--metrics", default="auto", show_default=True, help="URL of the metrics page, auto, or none.")
@click.option(
    "--timeout",
    default=0.0,
    help="Watch for this many seconds [default: until it ends]; a look that has begun may take 10 s more, "
    "and an engine that is ending 10 s.",
)
@click.option("--locals", "with_locals", is_flag=True, help="Read local variables too.")
@click.option("--registry", type=_FILE, help="More frames, in the format of collectives.toml.")
@click.option("--flight-recorder", type=_FOLDER, help="Folder with torch flight recorder dumps.")
@click.option(
    "--nccl-ras", multiple=True, type=_FILE, help="An answer of ncclras -f json; twice for two polls."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def watch(
    *,
    pids: tuple[int, ...],
    root: int | None,
    out: Path | None,
    once: bool,
    stall: float,
    poll: float,
    metrics: str,
    timeout: float,
    with_locals: bool,
    registry: Path | None,
    flight_recorder: Path | None,
    nccl_ras: tuple[Path, ...],
    form: str,
) -> None:
    """Watch the ranks of an engine and say who is stuck, where, and whose collective is missing.

    With --tree the engine has ended once its root has: one that stays without its ranks is half dead.

    Exit code: 0 nothing is stuck, or the engine ended, 1 a hang or a dead rank, 6 it cannot be told, 7 the
    right to read stacks is missing.
    """
    from nvsnap_conformance.hang import discover, rights  # noqa: PLC0415 - the command line stays light

    if bool(pids) == bool(root):
        raise UsageError("give either --pid (once per rank) or --tree", next_step="watch --tree PID")
    if len(set(pids)) < len(pids):
        raise UsageError(
            "a process is given twice, and one process is one rank", next_step="give each --pid once"
        )
    _check_times(stall, poll, timeout)
    frames = _registry(registry)
    evidence = _evidence(flight_recorder, nccl_ras)
    folder = out or Path(time.strftime("nvs-hang-%Y%m%d-%H%M%S"))
    deadline = Deadline.after(timeout or _FOREVER)
    identities = _identities(pids or (root or 0,))
    engine = identities[0] if root is not None else None
    members = _members(pids, engine, Deadline.after(0.0) if once else deadline)
    rights.require(m.pid for m in members)
    if once:
        verdict = _look(members, folder, with_locals=with_locals, evidence=evidence, frames=frames)
        _report(verdict, folder, form)
        raise SystemExit(_code(verdict))
    from nvsnap_conformance.hang.watch import Watch  # noqa: PLC0415 - as above

    with contextlib.ExitStack() as stack:
        source = _metrics(metrics, members)
        if source is not None:
            stack.callback(source.close)
        answers = source is not None and source.poll() is not None
        if form == "text":
            by = source.name if source and answers else "the kernel's counters"
            click.echo(f"watching {len(members)} process{'es' * (len(members) > 1)} by {by}")
        if source is not None and not answers:
            click.echo(
                f"{source.name} does not answer with a known counter: the kernel's are used until it does",
                err=True,
            )
        observer = Watch(
            members,
            folder,
            metrics=source,
            stall=stall,
            poll=poll,
            registry=frames,
            refresh=None if engine is None else lambda: discover.discover(engine),
            root=engine,
            evidence=lambda: _evidence_now(flight_recorder, nccl_ras, evidence),
            with_locals=with_locals,
            say=lambda text: click.echo(text, err=True),
        )
        stopped = observer.run(deadline)
    if stopped.verdict is None:
        click.echo(json.dumps({"reason": stopped.reason}) if form == "json" else stopped.reason)
        raise SystemExit(ExitCode.CONFORMANT if stopped.told else ExitCode.INCOMPLETE)
    if not stopped.told:
        click.echo(stopped.reason, err=True)
    _report(stopped.verdict, folder, form)
    raise SystemExit(_code(stopped.verdict))


@click.command("inspect")
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--registry", type=_FILE, help="More frames, in the format of collectives.toml.")
@click.option("--flight-recorder", type=_FOLDER, help="Folder with torch flight recorder dumps.")
@click.option(
    "--nccl-ras", multiple=True, type=_FILE, help="An answer of ncclras -f json; twice for two polls."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def inspect(
    folder: Path,
    registry: Path | None,
    flight_recorder: Path | None,
    nccl_ras: tuple[Path, ...],
    form: str,
) -> None:
    """Judge a recorded hang bundle again, or sum up a run record (a folder or a file, told by content).

    Exit code: of a bundle 0 nothing is stuck, 1 a hang or a dead rank, 6 it cannot be told; of a run record
    its own, and 6 where the run did not end.
    """
    from nvsnap_conformance.report import inspected  # noqa: PLC0415 - the command line stays light

    content, folder = inspected.find(folder)
    if content is not inspected.Content.BUNDLE:
        summarise = (
            inspected.record_summary if content is inspected.Content.RECORD else inspected.events_summary
        )
        facts, code = summarise(folder)
        click.echo(json.dumps(facts) if form == "json" else inspected.text(facts))
        raise SystemExit(code)
    verdict = inspect_bundle(folder, registry=registry, evidence=_evidence(flight_recorder, nccl_ras))
    click.echo(json.dumps(verdict.to_json()) if form == "json" else verdict.tree())
    raise SystemExit(_code(verdict))


def inspect_bundle(
    folder: Path, *, registry: Path | None = None, evidence: dict[str, Any] | None = None
) -> Verdict:
    """Read the bundle in ``folder`` and judge it, with more ``evidence`` where given."""
    from dataclasses import replace  # noqa: PLC0415 - the command line stays light

    from nvsnap_conformance.hang.bundle import read_bundle  # noqa: PLC0415
    from nvsnap_conformance.hang.verdict import judge  # noqa: PLC0415

    bundle = read_bundle(folder)
    bundle = replace(bundle, evidence={**bundle.evidence, **(evidence or {})})
    return judge(bundle, _registry(registry))


def _check_times(stall: float, poll: float, timeout: float) -> None:
    """Raise :class:`UsageError` for seconds that cannot be waited for, of which NaN and infinity are some."""
    for name, seconds in (("--stall", stall), ("--poll", poll)):
        if not 0 < seconds <= _DAY:  # false for NaN
            raise UsageError(
                f"{name} {seconds} is not above 0 and at most {_DAY:.0f} seconds",
                next_step=f"leave {name} out, or give seconds such as 0.5",
            )
    if not (math.isfinite(timeout) and 0 <= timeout <= _FOREVER):
        raise UsageError(
            f"--timeout {timeout} is not between 0 and {_FOREVER:.0f} seconds",
            next_step="leave it out to watch until the engine ends",
        )


def _no_such_process(*pids: int) -> UsageError:
    return UsageError(
        f"no such process: {', '.join(map(str, pids))}",
        cause="it has ended, or the pid is one of another container (pid namespace)",
        next_step="find the pids with `pgrep -af vllm`, or give the engine's root process: watch --tree PID",
    )


def _identities(pids: Sequence[int]) -> list[ProcessId]:
    """Return who has these pids now; raises :class:`UsageError` for one that is nobody's or a thread's."""
    from nvsnap_conformance.hang import procfs  # noqa: PLC0415
    from nvsnap_conformance.processes import ProcessId  # noqa: PLC0415

    found = {pid: ProcessId.of(pid) for pid in pids}
    missing = [pid for pid, identity in found.items() if identity is None]
    if missing:
        raise _no_such_process(*missing)
    for pid in pids:
        leader = procfs.leader(pid)
        if leader != pid:
            raise UsageError(
                f"{pid} is a thread of process {leader}, and no process of its own",
                next_step=f"give the process: {leader}",
            )
    return [identity for identity in found.values() if identity is not None]


def _members(pids: tuple[int, ...], root: ProcessId | None, deadline: Deadline) -> list[Member]:
    """Return the members, waiting until ``deadline`` for an engine that has no ranks yet."""
    from nvsnap_conformance.deadline import wait_for  # noqa: PLC0415
    from nvsnap_conformance.errors import DeadlineExceeded  # noqa: PLC0415
    from nvsnap_conformance.hang import discover  # noqa: PLC0415
    from nvsnap_conformance.hang.model import Role  # noqa: PLC0415

    if root is None:
        return discover.listed(pids)

    def found() -> list[Member] | None:
        members = discover.discover(root)
        if not root.alive or any(m.role is Role.RANK for m in members):
            return members
        return None

    try:
        members = wait_for("ranks to appear", found, deadline, interval=1.0)
    except DeadlineExceeded:
        members = []
    if not any(m.role is Role.RANK for m in members):
        raise EnvironmentFailure(
            f"no rank was found below pid {root.pid}",
            cause="no RANK in an environment, no title that tells one, and no two processes alike",
            next_step="name the ranks in order: watch --pid PID --pid PID ...",
        )
    return members


def _registry(path: Path | None) -> FrameRegistry:
    from nvsnap_conformance.hang.collectives import load  # noqa: PLC0415

    return load(path) if path else load()


def _evidence(flight_recorder: Path | None, nccl_ras: tuple[Path, ...]) -> dict[str, Any]:
    from nvsnap_conformance.hang import corroborate  # noqa: PLC0415

    evidence: dict[str, Any] = {}
    if flight_recorder is not None:
        evidence["flight_recorder"] = corroborate.read_flight_recorder(flight_recorder)
    if nccl_ras:
        evidence["nccl_ras"] = [corroborate.read_ras(path) for path in nccl_ras]
    return evidence


def _evidence_now(
    flight_recorder: Path | None, nccl_ras: tuple[Path, ...], before: dict[str, Any]
) -> dict[str, Any]:
    """Return the evidence as it is by now: dumps are written when an engine is stuck, so after the start.

    One that cannot be read at this moment is written at this moment: then ``before`` stands.
    """
    try:
        return _evidence(flight_recorder, nccl_ras)
    except UsageError:
        return before


def _metrics(choice: str, members: list[Member]) -> Metrics | None:
    from nvsnap_conformance.hang.progress import Metrics, find_metrics  # noqa: PLC0415

    if choice == "none":
        return None
    pids = [m.pid for m in members]
    if choice == "auto":
        found = find_metrics(pids)
        return Metrics(found, pids[0]) if found else None
    if not _is_page(choice):
        raise UsageError(
            f"--metrics {choice!r} is no URL", next_step="give http://HOST:PORT/metrics, auto or none"
        )
    return Metrics(choice, pids[0])


def _is_page(text: str) -> bool:
    """Whether ``text`` is a URL that a page can be fetched from."""
    from pydantic import HttpUrl, TypeAdapter, ValidationError  # noqa: PLC0415 - the command line stays light

    try:
        TypeAdapter(HttpUrl).validate_python(text)
    except ValidationError:
        return False
    return True


def _look(
    members: list[Member],
    folder: Path,
    *,
    with_locals: bool,
    evidence: dict[str, Any],
    frames: FrameRegistry,
) -> Verdict:
    from nvsnap_conformance.hang.follow import follow  # noqa: PLC0415

    _, verdict = follow(
        members,
        folder=folder,
        deadline=Deadline.after(60.0),
        reason="asked for",
        evidence=evidence,
        registry=frames,
        with_locals=with_locals,
    )
    return verdict


def _report(verdict: Verdict, folder: Path, form: str) -> None:
    from nvsnap_conformance.hang.bundle import write_text  # noqa: PLC0415

    data = json.dumps(verdict.to_json(), indent=1)
    write_text(folder, "verdict.json", data)
    write_text(folder, "verdict.txt", verdict.tree() + "\n")
    click.echo(data if form == "json" else f"{verdict.tree()}\n\nbundle: {folder}")


def _code(verdict: Verdict) -> int:
    from nvsnap_conformance.hang.verdict import VerdictKind  # noqa: PLC0415
    from nvsnap_conformance.outcomes import Outcome  # noqa: PLC0415

    if verdict.is_hang or verdict.kind is VerdictKind.DEAD_RANK:
        return ExitCode.NOT_CONFORMANT
    return ExitCode.INCOMPLETE if verdict.outcome is Outcome.UNKNOWN else ExitCode.CONFORMANT
