"""``nvsnap-conformance experiment``: questions that are answered by comparing arms."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from nvsnap_conformance.experiments.apparatus import Apparatus


@click.group()
def experiment() -> None:
    """Run an experiment: engines that differ in one thing at a time, compared."""


@experiment.command()
@click.option("--target", metavar="NAME|PATH", default="vllm-gpu", show_default=True, help="Whose engines.")
@click.option("--tp", "size", type=click.IntRange(min=1), default=2, show_default=True, metavar="N")
@click.option("--arm", "names", multiple=True, metavar="NAME", help="This arm only. May be given again.")
@click.option(
    "--arms", "file", type=click.Path(path_type=Path), metavar="FILE",
    help="A file of arms (TOML) in place of the shipped one.",
)  # fmt: skip
@click.option(
    "--out", metavar="DIR",
    help="Folder of the record. Default: a new one below ./nvs-runs.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the record in --out: decided arms are kept.")
@click.option(
    "--at-once", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="So many engines side by side on the same GPUs.",
)  # fmt: skip
@click.option("--seconds", type=click.IntRange(min=0), metavar="S", help="Begin no arm after so long.")
@click.option(
    "--bandwidth", is_flag=True, help="Time pinned copies first, and relate the checkpoints to them."
)
@click.option("--rehearse", is_flag=True, help="With a stand-in for engine and driver; needs no GPU.")
@click.option("--list", "listing", is_flag=True, help="List the arms, and run none.")
def teardown(  # noqa: PLR0917 - click passes options by name
    target: str,
    size: int,
    names: tuple[str, ...],
    file: Path | None,
    out: str | None,
    resume: bool,
    at_once: int,
    seconds: float | None,
    bandwidth: bool,
    rehearse: bool,
    listing: bool,
) -> None:
    """Say which cross-GPU state must go before a device checkpoint can be restored.

    Each arm is a fresh engine with its own control, taken through one cycle of the driver's checkpoint. Exit
    codes: 0 every arm is decided, 6 some are not, 7 none is, 2 usage.
    """
    from nvsnap_conformance.errors import UsageError  # noqa: PLC0415 - not for --help
    from nvsnap_conformance.experiments.plan import SHIPPED, read_plan  # noqa: PLC0415

    plan = read_plan(file or SHIPPED)
    chosen = plan.select(names)
    if listing:
        for arm in chosen:
            click.echo(f"{arm.name:<3} {arm.summary}\n    {arm.factors}")
        return
    _require_meaning(size, rehearse=rehearse, bandwidth=bandwidth, target_given=_given("target"))
    if resume and out is None:
        raise UsageError("--resume without --out", next_step="name the folder to go on with")
    from nvsnap_conformance.experiments.runner import Experiment  # noqa: PLC0415
    from nvsnap_conformance.report.place import (  # noqa: PLC0415
        named_folder,
        new_folder,
        require_writable,
    )
    from nvsnap_conformance.report.writing import writing  # noqa: PLC0415
    from nvsnap_conformance.termination import interrupting  # noqa: PLC0415

    folder = new_folder() if out is None else named_folder(out)
    require_writable(folder)
    with (
        interrupting(),
        _apparatus(target, size, at_once=at_once, rehearse=rehearse) as apparatus,
        writing(folder),
    ):
        run = Experiment(
            plan,
            chosen,
            apparatus,
            folder,
            at_once=at_once,
            resume=resume,
            bandwidth=bandwidth,
            seconds=seconds,
            say=_say,
        ).run()
    assert run.experiment is not None  # it is one
    for conclusion in run.experiment.conclusions:
        click.echo(conclusion.statement)
    click.echo(f"record: {folder}\n{run.verdict}")
    sys.exit(run.exit_code)


def _given(option: str) -> bool:
    """Whether an option of the running command was given, rather than left at its default."""
    source = click.get_current_context().get_parameter_source(option)
    return source not in {ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP}


def _require_meaning(size: int, *, rehearse: bool, bandwidth: bool, target_given: bool) -> None:
    """Raise :class:`UsageError` for options with which the experiment, or a rehearsal, says nothing."""
    from nvsnap_conformance.errors import UsageError  # noqa: PLC0415 - not for --help
    from nvsnap_conformance.gpus import SIZES  # noqa: PLC0415

    several = [at for at in SIZES if at > 1]
    if size < min(several):
        raise UsageError(
            f"--tp {size}: there is nothing between GPUs with one rank, so that no teardown of it can matter",
            cause="the experiment is about state that crosses GPUs",
            next_step=f"use --tp {min(several)} or more",
        )
    if not rehearse:
        return
    if size not in several:
        raise UsageError(
            f"--tp {size}: no engine is run at this size, so that there is nothing to rehearse",
            next_step=f"use one of --tp {', '.join(map(str, several))}",
        )
    if bandwidth:
        raise UsageError(
            "--bandwidth means nothing with --rehearse: stand-ins copy nothing",
            next_step="leave one of the two out",
        )
    if target_given:
        raise UsageError(
            "--target means nothing with --rehearse: stand-ins take the place of its engines",
            next_step="leave one of the two out",
        )


def _apparatus(target: str, size: int, *, at_once: int, rehearse: bool) -> Apparatus:
    if rehearse:
        from nvsnap_conformance.experiments.standin import StandInApparatus  # noqa: PLC0415

        return StandInApparatus(size)
    from nvsnap_conformance.experiments.apparatus import TargetApparatus  # noqa: PLC0415
    from nvsnap_conformance.targets.model import load_target  # noqa: PLC0415

    return TargetApparatus(load_target(target), size, at_once=at_once, say=_say)


def _say(text: str) -> None:
    click.echo(f"  {text}", err=True)
