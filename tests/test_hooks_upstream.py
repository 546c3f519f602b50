"""The engine's own hooks: conformant with the target's owned expectations, and not without them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.commands.run import with_hooks
from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.outcomes import Outcome
from nvsnap_conformance.report.record import read_results
from nvsnap_conformance.targets.model import load_target, shipped_targets

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.report.model import RunRecord

SECONDS = 1200
TARGET = shipped_targets()["vllm-cpu-upstream"]


def run(out: Path, *options: str) -> tuple[int, RunRecord, str]:
    done = subprocess.run(
        [sys.executable, "-m", "nvsnap_conformance.cli", "run", "--out", str(out), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    return done.returncode, read_results(out / "results.json"), done.stdout[-6000:]


def test_conformant_with_its_expectations(tmp_path: Path) -> None:
    code, record, text = run(tmp_path, "--hooks", "upstream")
    assert (code, record.targets) == (0, ["vllm-cpu-upstream"]), text
    expected = {entry.clause for entry in load_target(TARGET).expect}
    missed = {clause.clause for clause in record.clauses if clause.outcome is Outcome.XFAILED}
    assert missed == expected, text


def test_not_conformant_without_them(tmp_path: Path) -> None:
    text = TARGET.read_text()
    owned = next(line for line in text.splitlines() if line.startswith("expect_from"))
    bare = tmp_path / "bare.toml"
    bare.write_text(text.replace(owned, ""))
    assert load_target(bare).expect == ()
    # What needs no injected failure is enough to tell, and takes seconds.
    cases = "reports or contract"
    code, record, text = run(tmp_path / "out", "--target", str(bare), "--", "-k", cases)
    assert code == 1, text
    failed = {clause.clause for clause in record.clauses if clause.outcome is Outcome.FAILED}
    assert failed >= {"HOOKS-ALL-RANKS-REPORT", "HOOKS-SUCCESS-MEANS-RELEASED"}


def test_hooks_by_name_stand_for_a_shipped_target() -> None:
    assert with_hooks((), "upstream") == ("vllm-cpu-upstream",)
    assert with_hooks((), "reference") == ("vllm-cpu",)
    assert with_hooks(("mine.toml",), None) == ("mine.toml",)
    with pytest.raises(UsageError, match="Did you mean 'upstream'"):
        with_hooks((), "upstrem")
    with pytest.raises(UsageError, match="exclude each other"):
        with_hooks(("mine.toml",), "upstream")
