"""The known-bad reports and statuses over ranks without an engine: each breaks its clause as declared."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.hooks.injection import INJECT
from nvsnap_conformance.outcomes import ConformanceFailure, require
from nvsnap_conformance.testing import check_hooks

if TYPE_CHECKING:
    from pathlib import Path

# The reference's work needs torch and an engine. Here it is done on the rehearsal's resources: a mutant in
# front of this class changes what it reports as it does the reference's.
WORK = """
from nvsnap_hooks.errors import HookRefused
from nvsnap_hooks.reference import PREPARED, SERVING, EngineState, ReferenceHooks, _outcome
from nvsnap_hooks import mutants, report_mutants

STATE = EngineState()


class Work(ReferenceHooks):
    def __init__(self, worker, options):
        self.worker, self.options, self.state = worker, options, STATE

    def _require_known_engine(self):
        import vllm
        if not vllm.__version__.startswith(("0.32.", "0.33.")):
            raise HookRefused(vllm.__version__)

    def prepare(self):
        return self.work(SERVING, PREPARED, "released", lambda resource: resource.release())

    def restore(self):
        return self.work(PREPARED, SERVING, "rebuilt", lambda resource: resource.rebuild())

    def work(self, wanted, reached, outcome, act):
        self._require_known_engine()
        self._require_state(wanted)
        told = []
        for resource in self.worker.resources.values():
            if resource.releasable:
                act(resource)
            told.append(_outcome(resource, outcome if resource.releasable else "unsupported", "", 0.0))
        self.state.name = reached
        return {"state": reached, "problem": None, "resources": told}
"""

SHOWN = {
    "odd-outcome",
    "defers-everything",
    "omits-from-report",
    "held-called-absent",
    "rank-zero-only",
    "names-state-before",
    "problem-behind-success",
    "lists-twice",
    "malformed-entries",
    "status-raises",
    "status-of-no-form",
    "status-always-serving",
    "refuses-every-version",
    "accepts-any-version",
}


def declared() -> dict[str, dict[str, Any]]:
    entries = tomllib.loads((INJECT.parent / "mutants.toml").read_text())["mutant"]
    return {entry["name"]: entry for entry in entries if entry["name"] in SHOWN}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path


def test_the_work_without_a_mutant_conforms(folder: Path) -> None:
    report = check_hooks("work:Work", path=folder)
    assert report.conformant, str(report)


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_a_mutant_is_killed_for_its_reason(folder: Path, name: str) -> None:
    mutant = declared()[name]
    known_bad = mutant["implementation"].removeprefix("nvsnap_hooks.").replace(":", ".")
    with (folder / "work.py").open("a") as file:
        file.write(f"\n\nclass Bad({known_bad}, Work):\n    pass\n")
    report = check_hooks("work:Bad", path=folder)
    for clause in mutant["kills"]:
        # As a case does: the first of the gravest findings is what a kill is counted by.
        with pytest.raises(ConformanceFailure) as failure:
            require(report.findings[clause])
        assert str(failure.value.signature) == mutant["signature"], str(report)
