"""The clause registry and the registry of mutants: what they accept, and what they refuse and how."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.clauses.registry import Registry, load_registry, read_registry
from nvsnap_conformance.errors import RegistryError, UsageError
from nvsnap_conformance.mutants import load_mutants, read_mutants

if TYPE_CHECKING:
    from pathlib import Path

PROFILES = """
[[profile]]
name = "core"
summary = "All of it."
"""


def clause(identifier: str, extra: str = "") -> str:
    return textwrap.dedent(f"""
        [[clause]]
        id = "{identifier}"
        level = "MUST"
        sentence = "It holds."
        profiles = ["core"]
        {extra}
        [clause.source]
        project = "example"
        reference = "what it shows"
        url = "https://example.org/1"
        """)


def registry_of(folder: Path, areas: dict[str, str], profiles: str = PROFILES) -> Registry:
    (folder / "profiles.toml").write_text(profiles)
    for name, text in areas.items():
        (folder / f"{name}.toml").write_text(text)
    return read_registry(folder)


def refusal(folder: Path, areas: dict[str, str], profiles: str = PROFILES) -> str:
    with pytest.raises(RegistryError) as caught:
        registry_of(folder, areas, profiles)
    return str(caught.value)


def test_area_is_the_file_and_order_puts_prerequisites_first(tmp_path: Path) -> None:
    areas = {
        "alpha": clause("A-LAST", 'prerequisites = ["B-FIRST"]') + clause("A-OTHER"),
        "beta": clause("B-FIRST", 'must_run = ["core"]'),
    }
    registry = registry_of(tmp_path, areas)
    assert [c.id for c in registry.order()] == ["B-FIRST", "A-LAST", "A-OTHER"]
    assert registry.clause("A-LAST").area == "alpha"
    assert registry.profile("core").must_run == {"B-FIRST"}
    assert registry.clause("B-FIRST").must_run_in("core")
    assert not registry.clause("A-LAST").must_run_in("core")


def test_prerequisites_are_followed_through(tmp_path: Path) -> None:
    area = (
        clause("A-ONE")
        + clause("A-TWO", 'prerequisites = ["A-ONE"]')
        + clause("A-THREE", 'prerequisites = ["A-TWO"]')
    )
    assert registry_of(tmp_path, {"a": area}).prerequisites_of("A-THREE") == ("A-ONE", "A-TWO")


@pytest.mark.parametrize(
    ("area", "words"),
    [
        (clause("A-ONE") + clause("A-ONE"), ["a.toml", "A-ONE", "already declared"]),
        (clause("A-ONE", 'prerequisites = ["A-TOW"]') + clause("A-TWO"), ["'A-TOW'", "Did you mean 'A-TWO'"]),
        (
            clause("A-ONE", 'prerequisites = ["A-TWO"]') + clause("A-TWO", 'prerequisites = ["A-ONE"]'),
            ["cycle", "A-ONE -> A-TWO"],
        ),
        (clause("A-ONE", 'needs = ["gpus>>2"]'), ["clause[0].needs", "no capability expression"]),
        (clause("A-ONE", 'must_run = ["other"]'), ["clause[0].must_run", "not among the clause's profiles"]),
        (clause("A-ONE").replace('"core"', '"cor"'), ["unknown profile 'cor'", "Did you mean 'core'"]),
        (clause("A-1"), ["clause[0].id", "never numbers"]),
        (clause("A-ONE").replace("It holds.", "It holds. So there."), ["clause[0].sentence", "one sentence"]),
        (clause("A-ONE", 'must_runn = ["core"]'), ["'clause[0].must_runn'", "Did you mean 'must_run'"]),
        (clause("A-ONE").replace('level = "MUST"', ""), ["'clause[0].level' is missing"]),
        (clause("A-ONE").replace("https:", "http:"), ["clause[0].source.url"]),
        (clause("A-ONE", "area = 'b'"), ["unknown key 'clause[0].area'"]),
        ("[[clause]\n", ["a.toml", "no valid TOML"]),
        ("", ["'clause' is missing"]),
    ],
)
def test_refuses_with_file_and_key(tmp_path: Path, area: str, words: list[str]) -> None:
    message = refusal(tmp_path, {"a": area})
    for word in words:
        assert word in message
    assert "a.toml" in message or "cycle" in message


def test_refuses_a_profile_without_clauses(tmp_path: Path) -> None:
    profiles = PROFILES + PROFILES.replace("core", "empty")
    assert "profile 'empty' has no clause" in refusal(tmp_path, {"a": clause("A-ONE")}, profiles)


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(RegistryError, match="Did you mean 'LIFE-ORDER'"):
        load_registry().clause("LIFE-ODER")
    with pytest.raises(RegistryError, match="Did you mean 'lifecycle'"):
        load_registry().profile("lifecycles")


def test_shipped_registry_is_whole() -> None:
    registry = load_registry()
    assert {"hooks", "lifecycle", "liveness"} <= set(registry.profiles)
    for profile in registry.profiles.values():
        assert profile.must_run
        # A run of one profile must be able to tell a blocked clause from a failed one.
        for name in profile.clauses:
            assert set(registry.clause(name).prerequisites) <= set(profile.clauses), (profile.name, name)


def mutants_file(folder: Path, name: str, **changes: str) -> Path:
    keys = {
        "layer": '"hooks"',
        "implementation": '"m:C"',
        "kills": '["A-ONE"]',
        "summary": '"Bad."',
    } | changes
    body = "\n".join(f"{key} = {value}" for key, value in keys.items())
    path = folder / f"{name}.toml"
    path.write_text(f'[[mutant]]\nname = "{name}"\n{body}\n')
    return path


def test_mutants_are_found_by_name_and_by_clause(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, {"a": clause("A-ONE") + clause("A-TWO")})
    (tmp_path / "m").mkdir()
    files = [mutants_file(tmp_path / "m", "one"), mutants_file(tmp_path / "m", "two", dirty="true")]
    mutants = read_mutants(files, registry)
    assert [m.name for m in mutants.select(["all"])] == ["one", "two"]
    assert [m.name for m in mutants.select(["two", "one", "two"])] == ["two", "one"]
    assert [m.name for m in mutants.killers_of("A-ONE")] == ["one", "two"]
    assert mutants.uncovered() == ("A-TWO",)
    assert mutants.mutant("two").dirty
    with pytest.raises(UsageError, match="Did you mean 'one'"):
        mutants.mutant("onee")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kills": '["A-ONCE"]'}, "'kills' names the unknown clause 'A-ONCE'"),
        ({"kills": "[]"}, "mutant[0].kills"),
        ({"layer": '"engin"'}, "mutant[0].layer"),
        ({"dirtyy": "true"}, "unknown key 'mutant[0].dirtyy'"),
    ],
)
def test_mutants_refuse_with_file_and_key(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    registry = registry_of(tmp_path, {"a": clause("A-ONE")})
    with pytest.raises(RegistryError) as caught:
        read_mutants([mutants_file(tmp_path, "bad", **changes)], registry)
    assert words in str(caught.value)
    assert "bad.toml" in str(caught.value)


def test_mutants_refuse_a_name_twice_and_the_name_all(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, {"a": clause("A-ONE")})
    path = mutants_file(tmp_path, "one")
    with pytest.raises(RegistryError, match="'one' is already declared in"):
        read_mutants([path, path], registry)
    with pytest.raises(RegistryError, match="cannot be called 'all'"):
        read_mutants([mutants_file(tmp_path, "all")], registry)


def test_every_shipped_clause_has_a_mutant() -> None:
    assert load_mutants().uncovered() == ()


def test_each_source_says_what_it_shows_and_leads_to_a_place() -> None:
    clauses = load_registry().order()
    shown = [clause.source.reference for clause in clauses]
    assert len(set(shown)) == len(shown)
    for clause in clauses:
        parts = clause.source.url.removeprefix("https://").rstrip("/").split("/")
        assert parts[0] != "github.com" or len(parts) > 4, f"{clause.id}: a whole repository"
        assert "tree" not in parts, f"{clause.id}: a whole folder"
        assert "criu-dev" not in parts, f"{clause.id}: a branch that moves"
