"""The known-bad hooks and their declarations belong together."""

from __future__ import annotations

import inspect
import sys
import tomllib
from pathlib import Path
from typing import Any

from nvsnap_conformance.hooks.injection import INJECT

sys.path.insert(0, str(INJECT))  # as an engine's PYTHONPATH has it

from nvsnap_hooks import device_mutants, mutants, report_mutants
from nvsnap_hooks.reference import ReferenceHooks

DECLARED = Path(mutants.__file__).parents[2] / "mutants.toml"


def classes() -> dict[str, Any]:
    return {
        f"{module.__name__}:{name}": found
        for module in (mutants, report_mutants, device_mutants)
        for name, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, ReferenceHooks) and found.__module__ == module.__name__
    }


def declared() -> dict[str, bool]:
    with DECLARED.open("rb") as file:
        entries = tomllib.load(file)["mutant"]
    return {
        entry["implementation"]: entry.get("dirty", False) for entry in entries if entry["layer"] == "hooks"
    }


def test_every_mutant_is_declared_and_says_the_same_of_its_engine() -> None:
    assert {name: found.DIRTY for name, found in classes().items()} == declared()


def test_every_mutant_differs_from_the_reference() -> None:
    for name, found in classes().items():
        own = set(vars(found)) - {"__module__", "__doc__", "DIRTY", "FORGOTTEN", "EXTRA", "VARIABLE"}
        assert own, f"{name} overrides nothing"
        assert found.__doc__, f"{name} does not say what is wrong with it"
