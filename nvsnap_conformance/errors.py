"""Typed errors that say what failed, the likely cause and the next thing to try.

Every error that a user can meet derives from :class:`NvsnapError` and carries the exit code that the
command line and the pytest session end with. A *non-conformant* engine is not an error of this family:
see :class:`nvsnap_conformance.outcomes.ConformanceFailure`.
"""

from __future__ import annotations

from nvsnap_conformance.outcomes import ExitCode


class NvsnapError(Exception):
    """Base of the suite's own errors.

    ``what`` is one sentence on what failed, ``cause`` the likely reason, ``next_step`` a command or a
    change that the reader can try at once. All three are printed.
    """

    exit_code: ExitCode = ExitCode.ENVIRONMENT

    def __init__(self, what: str, *, cause: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.next_step = next_step

    def __str__(self) -> str:
        parts = [self.what]
        if self.cause:
            parts.append(f"Likely cause: {self.cause}")
        if self.next_step:
            parts.append(f"Next step: {self.next_step}")
        return "\n".join(parts)


class UsageError(NvsnapError):
    """The user's input cannot be taken: an unknown name, a malformed file, a wrong option."""

    exit_code = ExitCode.USAGE


class TargetError(UsageError):
    """A target file is missing, malformed, or names something that does not exist."""


class RegistryError(UsageError):
    """The clause registry, a case's marks or a mutant's declaration contradict each other."""


class ExpectationError(UsageError):
    """An expectation names no clause, has expired, or overlaps with another one."""


class EnvironmentFailure(NvsnapError):  # noqa: N818 - "environment failure" is the outcome's name
    """The machine, not the target, broke or lacks something: no engine, no right, no disk, no port."""


class EngineStartError(EnvironmentFailure):
    """An engine did not come up: it exited, or its deadline passed. The log's tail is in ``cause``."""


class DeadlineExceeded(NvsnapError):  # noqa: N818 - what happened, in the usual words
    """A wait with a deadline ended without what it waited for."""
