"""The command line ``nvsnap-conformance``: an import-light group whose commands are loaded when called."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from nvsnap_conformance import __version__
from nvsnap_conformance.errors import EnvironmentFailure, NvsnapError
from nvsnap_conformance.outcomes import ExitCode
from nvsnap_conformance.suggest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COMMANDS: dict[str, tuple[str, str]] = {
    "audit": ("nvsnap_conformance.commands.audit:audit", "Say what runs have left on this host."),
    "compare": (
        "nvsnap_conformance.commands.compare:compare",
        "Compare two records, or one with expectations.",
    ),
    "experiment": (
        "nvsnap_conformance.commands.experiment:experiment",
        "Answer a question by comparing arms.",
    ),
    "inspect": ("nvsnap_conformance.hang.commands:inspect", "Judge a stack bundle again, or sum up a run."),
    "watch": ("nvsnap_conformance.hang.commands:watch", "Watch ranks, and say who hangs and why."),
    "doctor": ("nvsnap_conformance.commands.doctor:doctor", "Say what this machine can run."),
    "list": ("nvsnap_conformance.commands.listing:list_", "List clauses, cases and mutants."),
    "run": ("nvsnap_conformance.commands.run:run", "Run the conformance cases against a target."),
}
"""Every command: ``module:attribute``, and its line in the help."""


_OUTPUT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE})
"""What a write to standard output can fail with."""


class LazyGroup(click.Group):
    """A group that imports a command only when it is called, and prints errors in the suite's own form."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of all commands."""
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return a command."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command in ``args``, offering the nearest name for an unknown one."""
        if args and not args[0].startswith("-") and args[0] not in self._lazy:
            ctx.fail(f"No such command {args[0]!r}. {did_you_mean(args[0], self._lazy)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(self._lazy.items())])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the command line, which prints the help where that is asked for."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # What is shown may hold any text: no character ends a command.
                stream.reconfigure(errors="backslashreplace")
        with _ended_by_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of the suite ends with its message and its exit code."""
        with _ended_by_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _ended_by_errors() -> Iterator[None]:
    """End the program with a code of its own for whatever is no verdict: Python's 1 says "not conformant".

    One that is interrupted is incomplete. An error that nobody expected keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(int(ExitCode.INCOMPLETE))
    except NvsnapError as error:
        show_error(error)
        sys.exit(int(error.exit_code))
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:  # noqa: BLE001 - the last place that can keep it from looking like a verdict
        if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT:
            _end_without_output(error)
        import traceback  # noqa: PLC0415 - only when there is something to print

        traceback.print_exc()
        show_error(
            EnvironmentFailure(
                f"the suite itself failed: {type(error).__name__}",
                next_step="report it with the lines above; it says nothing about the target",
            )
        )
        sys.exit(int(ExitCode.ENVIRONMENT))


def _end_without_output(error: OSError) -> NoReturn:
    """End where standard output takes nothing more; quietly where its reader went away, as ``head`` does."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # What is still buffered must not fail again at the interpreter's end, with a code of its own.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    if error.errno != errno.EPIPE:
        show_error(
            EnvironmentFailure(
                f"cannot write the output: {error.strerror}",
                cause="the disk that standard output goes to is full, or broken",
                next_step="make room, or send it elsewhere",
            )
        )
    sys.exit(int(ExitCode.ENVIRONMENT))


def show_error(error: NvsnapError) -> None:
    """Print what failed, the likely cause and the next step to stderr."""
    from rich.console import Console  # noqa: PLC0415 - only when there is something to print
    from rich.text import Text  # noqa: PLC0415

    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), error.what))
    for label, text in (("likely cause: ", error.cause), ("next step: ", error.next_step)):
        if text:
            console.print(Text.assemble((label, "bold"), text))


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 conformant, 1 not conformant, 2 usage, 6 incomplete, 7 environment.",
)
@click.version_option(__version__, prog_name="nvsnap-conformance")
def main() -> None:
    """Conformance and regression suite for checkpoint/restore of multi-GPU LLM inference engines."""


if __name__ == "__main__":
    main()
