"""Known-bad ways in: each is an :class:`Injection` by sitecustomize with one defect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.hooks.injection import Injection, Way

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SITES = Path(__file__).resolve().parent / "mutant_sites"


@dataclass(frozen=True)
class ForgetsShadowed(Injection):
    """Its sitecustomize does not run the one that it shadows."""

    way: Way = Way.SITECUSTOMIZE
    site: Path = _SITES / "forgets_shadowed"


@dataclass(frozen=True)
class FailsWithShadowed(Injection):
    """Its sitecustomize fails where the one that it shadows fails."""

    way: Way = Way.SITECUSTOMIZE
    site: Path = _SITES / "fails_with_shadowed"


@dataclass(frozen=True)
class FirstProcessOnly(Injection):
    """Its sitecustomize leaves children alone."""

    way: Way = Way.SITECUSTOMIZE
    site: Path = _SITES / "first_process_only"


@dataclass(frozen=True)
class AnyInterpreter(Injection):
    """Takes every interpreter on trust."""

    way: Way = Way.SITECUSTOMIZE

    def require_reached(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Ask nothing."""
