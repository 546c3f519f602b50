"""``nvsnap-conformance doctor``: what this machine can run, and how to get what it lacks."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from nvsnap_conformance.outcomes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.doctor import Diagnosis, Lack


@click.command()
@click.option("--target", metavar="NAME|PATH", help="Look at this target instead of the default, vllm-cpu.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--install-criu",
    is_flag=True,
    help="First take CRIU from a newer Debian release into the suite's cache; the system is not touched.",
)
def doctor(target: str | None, form: str, install_criu: bool) -> None:
    """Say what this machine can run, what each profile lacks and how to get it.

    Exit code 0 only where every profile of the target can run completely, else 7.
    """
    from nvsnap_conformance.capabilities import probe  # noqa: PLC0415 - not for --help
    from nvsnap_conformance.clauses.registry import load_registry  # noqa: PLC0415
    from nvsnap_conformance.doctor import diagnose  # noqa: PLC0415
    from nvsnap_conformance.targets.model import DEFAULT_TARGET, load_target  # noqa: PLC0415

    if install_criu:
        from nvsnap_conformance.checkpoint import criu_install  # noqa: PLC0415

        criu = criu_install.install_criu(lambda text: click.echo(text, err=True))
        click.echo(f"CRIU {criu.version} at {criu.program}", err=True)
    diagnosis = diagnose(load_target(target or DEFAULT_TARGET), load_registry(), probe())
    if form == "json":
        click.echo(json.dumps(diagnosis.to_json(), indent=1))
    else:
        _show(diagnosis)
    sys.exit(int(ExitCode.CONFORMANT if diagnosis.can_run else ExitCode.ENVIRONMENT))


def _show(diagnosis: Diagnosis) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    machine = Table("capability", "here", "detail", title="This machine", title_justify="left")
    for item in diagnosis.capabilities.items.values():
        if item.present:
            detail = (
                item.detail if not item.value or item.value in item.detail else f"{item.value}, {item.detail}"
            )
            machine.add_row(item.name, Text("yes", "green"), Text(detail.strip(", ")))
        else:
            machine.add_row(item.name, Text("no", "yellow"), Text(item.why_not))
    console.print(machine)
    table = Table("profile", "can run", "what it lacks, and how to get it", title_justify="left")
    table.title = f"Target {diagnosis.target} ({diagnosis.engine})"
    if diagnosis.engine_lacks:
        table.add_row("(engine)", Text("no", "red"), Text(_lines(diagnosis.engine_lacks)))
    for profile in diagnosis.profiles:
        able = profile.can_run and not diagnosis.engine_lacks
        text = _lines(profile.lacks)
        if profile.left_out:
            text += ("\n" if text else "") + "skipped with a reason: " + _lines(profile.left_out)
        table.add_row(profile.name, Text("yes", "green") if able else Text("no", "red"), Text(text))
    console.print(table)
    for note in diagnosis.notes:
        console.print(Text.assemble(("note: ", "bold"), note), soft_wrap=True)
    verdict = "can run" if diagnosis.can_run else "cannot run completely"
    console.print(Text(f"The target {diagnosis.target} {verdict} on this machine.", "bold"))


def _lines(lacks: Sequence[Lack]) -> str:
    lines: list[str] = []
    for lack in lacks:
        clauses = f" for {', '.join(lack.clauses)}" if lack.clauses else ""
        how = f"\n  -> {lack.how_to_get}" if lack.how_to_get else ""
        lines.append(f"{lack.need}{clauses}: {lack.why}{how}")
    return "\n".join(lines)
