"""Where the shipped cases and repros lie: inside the wheel, or in a checkout."""

from __future__ import annotations

from pathlib import Path

from nvsnap_conformance.errors import EnvironmentFailure

_PACKAGE = Path(__file__).resolve().parent


def shipped_root() -> Path:
    """Return the folder that holds ``suites/`` and ``repros/``.

    That is ``_shipped/`` in an installed wheel and the checkout's root in a source tree (an editable
    install too). Raises :class:`EnvironmentFailure` where neither is there.
    """
    candidates = (_PACKAGE / "_shipped", _PACKAGE.parent)
    for root in candidates:
        if (root / "suites").is_dir():
            return root
    raise EnvironmentFailure(
        f"the shipped cases are missing: no folder 'suites' in {candidates[0]} or {candidates[1]}",
        cause="the installation is incomplete",
        next_step="install the package again: pip install --force-reinstall nvsnap-conformance",
    )


def suites_dir() -> Path:
    """Return the folder of the conformance cases."""
    return shipped_root() / "suites"


def repros_dir() -> Path:
    """Return the folder of the permanent regressions."""
    return shipped_root() / "repros"


def case_roots() -> tuple[Path, ...]:
    """Return the folders that hold cases: suites and repros, as far as they exist."""
    return tuple(folder for folder in (suites_dir(), repros_dir()) if folder.is_dir())
