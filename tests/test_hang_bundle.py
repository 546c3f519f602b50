"""Bundles on disk: complete, private, readable elsewhere, and refused with a reason when damaged."""

from __future__ import annotations

import contextlib
import json
import shutil
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import Rank
from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.hang import bundle as bundles
from nvsnap_conformance.hang.model import Bundle, Role, Rung
from nvsnap_conformance.hang.verdict import VerdictKind, judge
from nvsnap_conformance.processes import ProcessId
from tests.planted import synthetic as make
from tests.planted import victims

if TYPE_CHECKING:
    from pathlib import Path
from typing import Any

SECRET = "swordfish-4711"


def some_bundle() -> Bundle:
    stacks = {rank: [make.collective("all_reduce")] * 3 for rank in range(4)}
    stacks[2] = [make.at("handler")] * 3
    return make.bundle(stacks, fronts=[(make.front(), [make.CORE_WAITS] * 3)], evidence={"progress": []})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    bundle = some_bundle()
    bundles.write_bundle(bundle, tmp_path / "b")
    again = bundles.read_bundle(tmp_path / "b")
    assert again == bundle
    assert judge(again).summary == judge(bundle).summary
    assert bundles.is_bundle(tmp_path / "b")
    assert not bundles.is_bundle(tmp_path)


def test_live_bundle_is_private_complete_and_free_of_secrets(tmp_path: Path) -> None:
    code = f"import signal\ndef f(word):\n    print('up', flush=True)\n    signal.pause()\nf('{SECRET}')"
    folder = tmp_path / "b"
    with victims.python(code, f"--token={SECRET}", env={"API_KEY": SECRET}) as (one, _):
        bundle = bundles.collect_bundle(
            one,
            ranks=[Rank(0, one, None, "test")],
            folder=folder,
            deadline=Deadline.after(30.0),
            interval=0.05,
        )
    assert [len(r.samples) for r in bundle.rounds] == [1, 1, 1]
    assert [r.native for r in bundle.rounds] == [False, False, True]
    assert bundle.world_size == 1
    assert bundle.rounds[0].samples[0].rung is Rung.BLOCKING
    assert bundles.read_bundle(folder) == bundle
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert {p.name for p in files} == {"bundle.json", "round-0.json", "round-1.json", "round-2.json"}
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert SECRET not in path.read_text()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "stacks").stat().st_mode) == 0o700


def test_locals_are_there_only_when_asked(tmp_path: Path) -> None:
    code = f"import signal\ndef f(word):\n    print('up', flush=True)\n    signal.pause()\nf('{SECRET}')"
    with victims.python(code) as (one, _):
        bundles.collect_bundle(
            one, ranks=[Rank(0, one, None, "test")], folder=tmp_path, deadline=Deadline.after(30.0),
            interval=0.05, native_round=False, with_locals=True,
        )  # fmt: skip
    assert SECRET in (tmp_path / "stacks" / "round-0.json").read_text()


def test_dead_engine_gives_a_bundle_that_says_so(tmp_path: Path) -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        rank = Rank(0, one, None, "test")
    bundle = bundles.collect_bundle(
        one, ranks=[rank], folder=tmp_path, deadline=Deadline.after(30.0), interval=0.05
    )
    assert all(s.rung is Rung.GONE for r in bundle.rounds for s in r.samples)
    assert judge(bundle).kind is VerdictKind.DEAD_RANK


def test_nothing_found_is_said(tmp_path: Path) -> None:
    bundle = bundles.collect_bundle(
        ProcessId(2**22 - 1, 1.0), ranks=None, folder=tmp_path, deadline=Deadline.after(30.0), interval=0.05
    )
    assert bundle.members == ()
    verdict = judge(bundle)
    assert verdict.kind is VerdictKind.UNKNOWN
    assert "no rank was found" in verdict.paragraph()


def test_short_deadline_takes_fewer_rounds_and_says_so(tmp_path: Path) -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        bundle = bundles.collect_bundle(
            one, ranks=[Rank(0, one, None, "test")], folder=tmp_path, deadline=Deadline.after(0.0)
        )
    assert len(bundle.rounds) == 1
    assert any("1 of 3 rounds" in p for p in bundle.problems)
    assert judge(bundle).kind is VerdictKind.UNKNOWN


def test_folder_that_cannot_be_written_is_an_environment_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFailure, match="cannot write the hang bundle"):
        bundles.collect_bundle(None, ranks=None, folder=tmp_path / "file" / "b", deadline=Deadline.after(1.0))


def test_nothing_else_in_a_folder_is_touched(tmp_path: Path) -> None:
    """The folder may be anybody's: an older bundle in it goes, and nothing else."""
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "hay.txt").write_text("mine too")
    mode = tmp_path.stat().st_mode
    bundles.write_bundle(some_bundle(), tmp_path)
    bundles.write_bundle(replace(some_bundle(), rounds=some_bundle().rounds[:1]), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "stacks" / "hay.txt").read_text() == "mine too"
    assert tmp_path.stat().st_mode == mode
    assert len(bundles.read_bundle(tmp_path).rounds) == 1


def test_cut_short_bundle_is_a_bundle(tmp_path: Path) -> None:
    """Rounds are written one by one: what a killed run leaves can be judged."""
    bundle = some_bundle()
    bundles.write_bundle(bundle, tmp_path)
    (tmp_path / "stacks" / "round-2.json").unlink()
    again = bundles.read_bundle(tmp_path)
    assert len(again.rounds) == 2
    assert judge(again).kind is VerdictKind.MISSING_ARRIVAL


def test_damaged_round_is_left_out_and_named(tmp_path: Path) -> None:
    bundles.write_bundle(some_bundle(), tmp_path)
    (tmp_path / "stacks" / "round-1.json").write_text("{}")
    again = bundles.read_bundle(tmp_path)
    assert len(again.rounds) == 2
    assert any("round-1.json cannot be read" in p for p in again.problems)
    assert "round-1.json" in judge(again).paragraph()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "holds no hang bundle"),
        ("", "damaged"),
        ("[]", "no hang bundle"),
        ('{"format": "other"}', "no hang bundle"),
        ('{"format": "nvsnap-hang-bundle", "version": 99}', "version 99"),
        ('{"format": "nvsnap-hang-bundle", "version": true}', "version True"),
        ('{"format": "nvsnap-hang-bundle", "version": 1, "bundle": {}}', "damaged"),
        ('{"format": "nvsnap-hang-bundle", "version": 1, "bundle": 7}', "damaged"),
    ],
    ids=[
        "missing",
        "empty",
        "list",
        "other format",
        "other version",
        "version true",
        "no fields",
        "no mapping",
    ],
)
def test_what_is_no_bundle_is_refused_with_a_reason(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(bundles.BundleError) as caught:
        bundles.read_bundle(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def judged_or_refused(folder: Path) -> None:
    """A bundle is judged, or refused with a typed error that names it; nothing else may happen."""
    with contextlib.suppress(bundles.BundleError):
        verdict = judge(bundles.read_bundle(folder))
        assert verdict.kind in VerdictKind
        assert verdict.tree()


def test_absurd_world_size_is_no_engine(tmp_path: Path) -> None:
    bundles.write_bundle(replace(some_bundle(), world_size=10**15), tmp_path)
    assert judge(bundles.read_bundle(tmp_path)).kind is VerdictKind.UNKNOWN


def test_told_world_size_that_these_ranks_cannot_have_is_not_taken() -> None:
    """A variable that is inherited from elsewhere must not make a bundle that nobody can judge."""
    size = ("WORLD_SIZE", "2")
    with victims.python(victims.SLEEPER, env=dict([size])) as (one, _):
        members = [replace(make.member(5), pid=one.pid)]
        bundle = bundles.begin_bundle(members)
    assert bundle.world_size is None
    assert any("told to be 2" in problem for problem in bundle.problems)


def test_copies_of_a_round_are_no_rounds(tmp_path: Path) -> None:
    """One look and what an editor or a person left of it: no hang is made of that."""
    bundles.write_bundle(some_bundle(), tmp_path)
    stacks = tmp_path / "stacks"
    for name in ("round-0 copy.json", "round-0~.json", "round-0.json~", "round-7.json", "round-٣.json"):
        shutil.copy(stacks / "round-2.json", stacks / name)
    again = bundles.read_bundle(tmp_path)
    assert [taken.index for taken in again.rounds] == [0, 1, 2]
    assert len(again.problems) == 5
    assert "round-7.json is left out: it says that it is round 2" in judge(again).paragraph()
    for number in (0, 1):
        (stacks / f"round-{number}.json").unlink()
    assert judge(bundles.read_bundle(tmp_path)).kind is VerdictKind.UNKNOWN


def test_rounds_of_another_recording_are_left_out(tmp_path: Path) -> None:
    other = replace(some_bundle(), taken_at="2026-01-01T00:00:09.000+00:00")
    kept = [bundles.with_round(replace(other, rounds=()), taken).rounds[0] for taken in other.rounds]
    bundles.write_bundle(replace(other, rounds=tuple(kept)), tmp_path / "other")
    bundles.write_bundle(some_bundle(), tmp_path / "b")
    shutil.copy(tmp_path / "other" / "stacks" / "round-1.json", tmp_path / "b" / "stacks")
    again = bundles.read_bundle(tmp_path / "b")
    assert [taken.index for taken in again.rounds] == [0, 2]
    assert "round-1.json is left out: it is of another recording" in again.problems
    # One that was written before rounds said whose they are: its processes are no members.
    text = (tmp_path / "b" / "stacks" / "round-2.json").read_text()
    (tmp_path / "b" / "stacks" / "round-2.json").write_text(text.replace('"pid":1000', '"pid":9999'))
    assert [taken.index for taken in bundles.read_bundle(tmp_path / "b").rounds] == [0]


def test_live_rounds_say_whose_they_are(tmp_path: Path) -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        rank = Rank(0, one, None, "test")
        bundle = bundles.collect_bundle(
            one, ranks=[rank], folder=tmp_path, deadline=Deadline.after(30.0), interval=0.05
        )
    assert {taken.recording for taken in bundle.rounds} == {bundle.taken_at}
    assert bundles.read_bundle(tmp_path) == bundle


@pytest.mark.parametrize("how", ["missing", "a file", "empty"])
def test_rounds_that_cannot_be_read_are_named(tmp_path: Path, how: str) -> None:
    bundles.write_bundle(some_bundle(), tmp_path)
    shutil.rmtree(tmp_path / "stacks")
    if how == "a file":
        (tmp_path / "stacks").write_text("")
    elif how == "empty":
        (tmp_path / "stacks").mkdir()
    verdict = judge(bundles.read_bundle(tmp_path))
    assert verdict.kind is VerdictKind.UNKNOWN
    assert "stacks/" in verdict.paragraph()
    assert "gone" not in verdict.tree()


def test_verdict_of_an_older_bundle_goes_with_it(tmp_path: Path) -> None:
    bundles.write_text(tmp_path, "verdict.txt", "somebody's own")
    bundles.create_folder(tmp_path)
    assert (tmp_path / "verdict.txt").exists()
    bundles.write_bundle(some_bundle(), tmp_path)
    bundles.write_text(tmp_path, "verdict.json", "{}")
    bundles.create_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["stacks"]


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damaged_files_never_crash_it(tmp_path: Path, data: st.DataObject) -> None:
    bundles.write_bundle(some_bundle(), tmp_path)
    name = data.draw(st.sampled_from(["bundle.json", "stacks/round-0.json", "stacks/round-2.json"]))
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1))
        content[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=8))
    path.write_bytes(bytes(content))
    judged_or_refused(tmp_path)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
def test_changed_values_never_crash_it(tmp_path: Path, data: st.DataObject) -> None:
    """Well-formed JSON with any value in any place."""
    bundles.write_bundle(some_bundle(), tmp_path)
    path = tmp_path / data.draw(st.sampled_from(["bundle.json", "stacks/round-1.json"]))
    content = json.loads(path.read_text())
    node: Any = content
    parent: Any = None
    key: Any = None
    while isinstance(node, dict | list) and node and data.draw(st.integers(0, 5)):
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        parent, key = node, data.draw(st.sampled_from(list(keys)))
        node = node[key]
    value = data.draw(
        st.one_of(st.none(), st.integers(), st.text(max_size=5), st.just([]), st.just({}), st.booleans())
    )
    if parent is not None:
        parent[key] = value
    path.write_text(json.dumps(content))
    judged_or_refused(tmp_path)


def test_members_may_be_given_instead_of_discovered(tmp_path: Path) -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        members = [replace(make.member(5), pid=one.pid, create_time=one.create_time, namespace_pid=one.pid)]
        bundle = bundles.collect_bundle(
            None, ranks=None, members=members, folder=tmp_path, deadline=Deadline.after(30.0), interval=0.05
        )
    assert [(m.rank, m.role) for m in bundle.members] == [(5, Role.RANK)]
    assert bundle.rounds[0].samples[0].threads


def test_no_half_file_is_ever_seen(tmp_path: Path) -> None:
    bundles.write_bundle(some_bundle(), tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]
    assert len(list((tmp_path / "stacks").iterdir())) == 3
