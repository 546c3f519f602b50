"""Bundles recorded from real ranks of every shape: judged again, each gives the verdict of its live run."""

from __future__ import annotations

import json
import re
import shutil
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvsnap_conformance.hang import commands
from nvsnap_conformance.hang.bundle import is_bundle, read_bundle
from nvsnap_conformance.hang.mutants import judge_by_one_sample
from nvsnap_conformance.hang.verdict import VerdictKind, judge
from tests.planted.record import SHAPES

BUNDLES = sorted(p for p in (Path(__file__).parent / "data" / "bundles").iterdir() if p.is_dir())
PLANTED = {shape.name: shape for shape in SHAPES}


def test_every_shape_is_recorded() -> None:
    assert set(PLANTED) <= {folder.name for folder in BUNDLES}


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda p: p.name)
def test_recorded_bundle_gives_the_live_verdict(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    verdict = judge(read_bundle(folder))
    assert verdict.to_json() == expected
    if folder.name in PLANTED:
        planted = PLANTED[folder.name]
        assert (verdict.kind, verdict.missing) == (planted.kind, planted.missing)


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda p: p.name)
def test_inspect_says_the_same(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    assert is_bundle(folder)
    result = CliRunner().invoke(commands.inspect, [str(folder), "--format", "json"])
    assert json.loads(result.stdout) == expected
    assert result.exit_code == int(expected["hang"] or expected["kind"] == VerdictKind.DEAD_RANK.value)
    text = CliRunner().invoke(commands.inspect, [str(folder)])
    assert text.stdout.startswith(expected["kind"])


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda p: p.name)
def test_recorded_bundle_names_no_machine(folder: Path) -> None:
    for path in folder.rglob("*.json"):
        assert not re.search(r'"/(?:root|home|tmp|work|usr|opt)\b', path.read_text()), path


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda p: p.name)
def test_verdict_does_not_depend_on_where_a_bundle_lies(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    for path in copy.rglob("*"):
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert judge(read_bundle(copy)).to_json() == judge(read_bundle(folder)).to_json()


def test_the_seeds_split_is_in_the_text() -> None:
    """What the person who read eight dumps by hand had to find out, in one paragraph."""
    folder = next(p for p in BUNDLES if p.name == "rank_local_fallback")
    text = judge(read_bundle(folder)).paragraph()
    assert "get_fi_ar_workspace" in text
    assert "vllm/distributed/device_communicators/flashinfer_all_reduce.py" in text
    assert "6 ranks (0-2, 4-5, 7) in mnnvl workspace" in text
    assert "2 ranks (3, 6) in trtllm workspace" in text


def test_known_bad_judge_takes_the_slow_rank_for_a_hang() -> None:
    """What the mutant is for: a bundle of several looks is not one look again."""
    bundle = read_bundle(next(p for p in BUNDLES if p.name == "straggler"))
    assert not judge(bundle).is_hang
    assert judge_by_one_sample(bundle).is_hang
