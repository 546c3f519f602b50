"""Sees to it that ``run`` runs cases: options of pytest that show something instead are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LIST = "`nvsnap-conformance list` shows the cases; plain `pytest --collect-only` collects them"
_FIXTURES = "use plain pytest with this option in a checkout"

_INSTEAD: Mapping[str, tuple[str, str]] = {
    "collectonly": ("--collect-only", _LIST),
    "setupplan": ("--setup-plan", "use --setup-show, which runs the cases too; " + _LIST),
    "setuponly": ("--setup-only", "use --setup-show, which runs the cases too; " + _LIST),
    "showfixtures": ("--fixtures", _FIXTURES),
    "show_fixtures_per_test": ("--fixtures-per-test", _FIXTURES),
    "markers": ("--markers", _FIXTURES),
    "cacheshow": ("--cache-show", "a run keeps no cache of pytest's"),
    "help": ("--help", "use `nvsnap-conformance run --help`, or `pytest --help` for pytest's own options"),
    "version": ("--version", "use `nvsnap-conformance --version`, or `pytest --version` for pytest's own"),
}
"""What pytest calls an option, how it is written, and what to do instead. The first that is set is named."""


class WholeRun:
    """A pytest plugin: refuses options that run nothing, and tells whether the session got to its verdict."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """``roots`` are the folders of the shipped cases, which are all that a run collects."""
        self._roots = {str(root) for root in roots}
        self._refusal: UsageError | None = None
        self._began = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> pytest.ExitCode | None:
        """End before anything is collected where an option would have pytest run nothing."""
        for name, (option, instead) in _INSTEAD.items():
            if config.getoption(name, None):
                self._refusal = UsageError(
                    f"pytest's option {option} runs no case, so that a run with it can have no verdict",
                    cause="it was given after --, or in PYTEST_ADDOPTS",
                    next_step=instead,
                )
                return pytest.ExitCode.USAGE_ERROR
        others = [word for word in config.getoption("file_or_dir", ()) if word not in self._roots]
        if others:
            self._refusal = UsageError(
                f"{others[0]!r} is no option of pytest, and a run collects no file but the shipped cases",
                cause="it was given after --, or in PYTEST_ADDOPTS",
                next_step="choose cases with --profile, or with -- -k EXPRESSION",
            )
            return pytest.ExitCode.USAGE_ERROR
        return None

    def pytest_sessionstart(self) -> None:
        """Note that a session began, which ends with a verdict of its own."""
        self._began = True

    def require(self, status: int) -> None:
        """Raise :class:`UsageError` where pytest, ended with ``status``, was kept from running cases."""
        if self._refusal is not None:
            raise self._refusal
        if status == pytest.ExitCode.OK and not self._began:
            # `--version` alone is answered before any plugin is asked.
            raise UsageError(
                "pytest ended without running a case",
                cause="an option after --, or in PYTEST_ADDOPTS, has it show something instead",
                next_step="leave it out; see `nvsnap-conformance --version` and `nvsnap-conformance list`",
            )
