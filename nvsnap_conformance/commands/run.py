"""``nvsnap-conformance run``: the shipped cases through pytest, in this process."""

from __future__ import annotations

import datetime
import os
import sys
from importlib import metadata
from pathlib import Path

import click

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.outcomes import ExitCode

_CONFIGURATION = Path(__file__).resolve().with_name("session.toml")
_ENTRY_POINT = "nvsnap_conformance"


class _Run(click.Command):
    """A command that takes words of its own as options only: those for pytest stand after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; raise :class:`UsageError` for a word before ``--`` that belongs to no option."""
        after = args[args.index("--") + 1 :] if "--" in args else []
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("pytest_args", ())
        if len(words) > len(after):
            raise UsageError(
                f"{words[0]!r} is no option of run",
                cause="run takes options only; what is meant for pytest stands after --",
                next_step="name a target with --target, a profile with --profile; see "
                "`nvsnap-conformance run --help`",
            )
        return rest


@click.command(cls=_Run, context_settings={"ignore_unknown_options": False})
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME|PATH",
    help="Target under test: a shipped name or a TOML file. May be given again. Default: vllm-cpu, which "
    "then claims whatever this machine can do.",
)
@click.option(
    "--hooks", metavar="NAME",
    help="Hooks under test on the default engine: reference, or upstream (the engine's own). Stands for the "
    "shipped target that has them.",
)  # fmt: skip
@click.option(
    "--inject", metavar="WAY",
    help="How the loader gets into the engine: extension, plugin or sitecustomize. Default: the target's.",
)  # fmt: skip
@click.option("--profile", metavar="NAME", help="Run the clauses of this profile only.")
@click.option(
    "--tp", "sizes", multiple=True, type=click.IntRange(min=1), metavar="N",
    help="Tensor parallel size, out of those of the target. May be given again.",
)  # fmt: skip
@click.option(
    "--mutant", "mutants", multiple=True, metavar="NAME|all",
    help="Put a shipped known-bad implementation in place of the one under test. May be given again.",
)  # fmt: skip
@click.option(
    "--out", metavar="DIR",
    help="Folder of the run record. Default: a new one below ./nvs-runs.",
)  # fmt: skip
@click.option("--cold", is_flag=True, help="Start every engine cold.")
@click.option("-v", "--verbose", count=True, help="Pass -v on to pytest.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGS]...")
def run(  # noqa: PLR0917 - click passes options by name
    targets: tuple[str, ...],
    hooks: str | None,
    inject: str | None,
    profile: str | None,
    sizes: tuple[int, ...],
    mutants: tuple[str, ...],
    out: str | None,
    cold: bool,
    verbose: int,
    pytest_args: tuple[str, ...],
) -> None:
    """Run the conformance cases against a target.

    Everything that is named is checked before anything is started. What follows -- is passed on to
    pytest.
    """
    from nvsnap_conformance.report.place import (  # noqa: PLC0415 - not for --help
        named_folder,
        new_folder,
        require_writable,
    )

    targets = with_hooks(targets, hooks)
    check_selection(targets, profile, sizes, mutants, inject=inject)
    folder = new_folder() if out is None else named_folder(out)
    require_writable(folder)
    options: list[str] = ["-v"] * verbose
    options += [f"--nvs-target={target}" for target in targets]
    options += [f"--nvs-inject={inject}"] if inject else []
    options += [f"--nvs-profile={profile}"] if profile else []
    options += [f"--nvs-tp={size}" for size in sizes]
    options += [f"--nvs-mutant={name}" for name in mutants]
    options += [f"--nvs-out={folder}", f"--junitxml={folder / 'junit.xml'}"]
    options += ["--nvs-cold"] if cold else []
    sys.exit(run_pytest([*options, *pytest_args]))


def with_hooks(targets: tuple[str, ...], hooks: str | None) -> tuple[str, ...]:
    """Return the targets that ``--target`` and ``--hooks`` ask for together.

    Raises :class:`UsageError` for both at once, and for hooks that no shipped target has.
    """
    from nvsnap_conformance.suggest import did_you_mean  # noqa: PLC0415 - not for --help
    from nvsnap_conformance.targets.model import (  # noqa: PLC0415
        DEFAULT_TARGET,
        load_target,
        shipped_targets,
    )

    if hooks is None:
        return targets
    known: dict[str, str] = {}
    for name in (DEFAULT_TARGET, *shipped_targets()):
        known.setdefault(load_target(name).hooks.source, name)
    if targets:
        raise UsageError(
            "--hooks and --target exclude each other",
            cause="a target says itself which hooks it has",
            next_step="set [hooks] source in a target file of your own",
        )
    if hooks not in known:
        raise UsageError(
            f"no shipped target has hooks called {hooks!r}",
            next_step=f"{did_you_mean(hooks, known)}; hooks of your own are named in a target file",
        )
    return (known[hooks],)


def check_selection(
    targets: tuple[str, ...],
    profile: str | None,
    sizes: tuple[int, ...],
    mutants: tuple[str, ...],
    *,
    inject: str | None = None,
) -> None:
    """Raise the error of the first thing that cannot be taken; start nothing."""
    from nvsnap_conformance.clauses.registry import load_registry  # noqa: PLC0415 - not for --help
    from nvsnap_conformance.mutants import load_mutants  # noqa: PLC0415
    from nvsnap_conformance.targets.model import DEFAULT_TARGET, load_target  # noqa: PLC0415

    registry = load_registry()
    if profile is not None:
        registry.profile(profile)
    load_mutants().select(mutants)
    today = datetime.datetime.now(datetime.UTC).date()
    in_environment = tuple(filter(None, os.environ.get("NVS_TARGET", "").split(",")))
    for name in targets or in_environment or (DEFAULT_TARGET,):
        target = load_target(name)
        if inject is not None:
            target.injected_by(inject)
        target.require_tensor_parallel(sizes)
        target.expectations().validate(registry, today=today)


def run_pytest(options: list[str]) -> int:
    """Run the shipped cases with ``options``; return the exit code of the command line.

    Neither the user's configuration nor their conftest files are read, and nothing is written beside
    the cases. Raises :class:`UsageError` for an option with which pytest runs no case.
    """
    import pytest  # noqa: PLC0415 - not for --help

    from nvsnap_conformance.commands.whole_run import WholeRun  # noqa: PLC0415
    from nvsnap_conformance.shipped import case_roots, shipped_root  # noqa: PLC0415

    root = shipped_root()
    fixed = [
        *("-p", _plugin(), "-p", "no:cacheprovider"),
        *("-c", str(_CONFIGURATION), f"--rootdir={root}", f"--confcutdir={root}"),
        *(str(folder) for folder in case_roots()),
    ]
    whole = WholeRun(case_roots())
    status = int(pytest.main([*fixed, *options], plugins=[whole]))
    whole.require(status)
    # pytest's own codes have no place beside the suite's: what they say is said by one of these.
    return {
        int(pytest.ExitCode.INTERRUPTED): int(ExitCode.INCOMPLETE),
        int(pytest.ExitCode.INTERNAL_ERROR): int(ExitCode.ENVIRONMENT),
        int(pytest.ExitCode.USAGE_ERROR): int(ExitCode.USAGE),
        int(pytest.ExitCode.NO_TESTS_COLLECTED): int(ExitCode.INCOMPLETE),
    }.get(status, status)


def _plugin() -> str:
    """Return the name to load the plugin by: its entry point's, or its module's where none is installed."""
    installed = metadata.entry_points(group="pytest11", name=_ENTRY_POINT)
    return _ENTRY_POINT if installed else "nvsnap_conformance.plugin"
