"""``nvsnap-conformance audit``: what runs of the suite have left on this host."""

from __future__ import annotations

import json
import sys

import click

from nvsnap_conformance.outcomes import ExitCode


@click.command()
@click.option("--gpus", "need_gpus", is_flag=True, help="Fail where no GPU can be looked at.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def audit(need_gpus: bool, form: str) -> None:
    """Say what runs of the suite have left on this host, whatever killed them, and what to do about it.

    Living processes, GPUs that are not idle, mounts, shared memory, temporary folders: of every run, also of
    one that still goes on, as far as this user may look. Exit code 0 where nothing is left, 1 where something
    is, 7 where it cannot be told.
    """
    from nvsnap_conformance.audit import look  # noqa: PLC0415 - not for --help
    from nvsnap_conformance.errors import EnvironmentFailure  # noqa: PLC0415

    found = look()
    if form == "json":
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        for left in found.left:
            click.echo(f"{left.what} -> {left.to_do}")
        if found.gpus_unseen:
            click.echo(f"GPUs were not looked at: {found.gpus_unseen}")
        count = len(found.left)
        click.echo(
            f"{count or 'nothing'} {'thing is' if count == 1 else 'things are' if count else 'is'} left"
        )
    if need_gpus and found.gpus_unseen:
        raise EnvironmentFailure(
            f"no GPU was looked at: {found.gpus_unseen}",
            cause="there is no driver, no nvidia-ml-py, or no GPU within CUDA_VISIBLE_DEVICES",
            next_step="see `nvidia-smi` and `nvsnap-conformance doctor`; without --gpus the rest is enough",
        )
    sys.exit(int(ExitCode.NOT_CONFORMANT if found.left else ExitCode.CONFORMANT))
