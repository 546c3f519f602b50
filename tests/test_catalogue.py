"""The catalogue: cases and their clauses, read without importing."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.catalogue import Catalogue, load_catalogue, read_catalogue, require_cases
from nvsnap_conformance.clauses.registry import load_registry
from nvsnap_conformance.errors import RegistryError

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, source: str) -> Catalogue:
    root = folder / "suites"
    (root / "area").mkdir(parents=True)
    (root / "area" / "test_it.py").write_text(textwrap.dedent(source))
    return read_catalogue([root], load_registry())


def bindings(catalogue: Catalogue) -> dict[str, tuple[str, ...]]:
    return {case.nodeid.partition("::")[2]: case.clauses for case in catalogue.cases}


def test_marks_of_functions_classes_and_modules(tmp_path: Path) -> None:
    catalogue = read(
        tmp_path,
        """
        import pytest
        from pytest import mark
        raise RuntimeError("a catalogue that imports this has failed")

        pytestmark = [pytest.mark.slow, pytest.mark.clause("LIFE-ORDER")]

        @pytest.mark.clause("LIFE-REPEATS", "LIFE-ORDER")
        @pytest.mark.parametrize("n", [1, 2])
        def test_function(n): ...

        async def test_async(): ...

        @mark.clause("LIFE-ALL-STOPPED")
        class TestClass:
            pytestmark = pytest.mark.clause("LIFE-TOKENS-EQUAL")

            def test_method(self): ...

            def helper(self): ...

            class TestInner:
                @pytest.mark.clause("LIFE-REPEATS")
                def test_deep(self): ...

        def helper(): ...
        """,
    )
    assert bindings(catalogue) == {
        "test_function": ("LIFE-REPEATS", "LIFE-ORDER"),
        "test_async": ("LIFE-ORDER",),
        "TestClass::test_method": ("LIFE-ALL-STOPPED", "LIFE-ORDER", "LIFE-TOKENS-EQUAL"),
        "TestClass::TestInner::test_deep": (
            "LIFE-REPEATS",
            "LIFE-ALL-STOPPED",
            "LIFE-ORDER",
            "LIFE-TOKENS-EQUAL",
        ),
    }
    first = catalogue.cases[0]
    assert first.nodeid == "suites/area/test_it.py::test_function"
    assert [case.nodeid for case in catalogue.cases_of("LIFE-TOKENS-EQUAL")] == [
        "suites/area/test_it.py::TestClass::test_method",
        "suites/area/test_it.py::TestClass::TestInner::test_deep",
    ]


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("def test_bare(): ...\n", 1, "test_bare is bound to no clause"),
        (
            'import pytest\n@pytest.mark.clause("LIFE-ODER")\ndef test_a(): ...\n',
            2,
            "Did you mean 'LIFE-ORDER'",
        ),
        ("import pytest\n@pytest.mark.clause(NAME)\ndef test_a(): ...\n", 2, "no string literal"),
        ("import pytest\n@pytest.mark.clause(*NAMES)\ndef test_a(): ...\n", 2, "no string literal"),
        ("import pytest\n@pytest.mark.clause\ndef test_a(): ...\n", 2, "one or more clause IDs"),
        ("import pytest\n@pytest.mark.clause()\ndef test_a(): ...\n", 2, "one or more clause IDs"),
        ('import pytest\n@pytest.mark.clause(id="LIFE-ORDER")\ndef test_a(): ...\n', 2, "one or more"),
        ("def test_a(:\n", 1, "not Python"),
    ],
)
def test_refuses_with_file_and_line(tmp_path: Path, source: str, line: int, words: str) -> None:
    with pytest.raises(RegistryError) as caught:
        read(tmp_path, source)
    assert f"test_it.py:{line}: " in str(caught.value)
    assert words in str(caught.value)


def test_another_objects_clause_is_no_mark(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="bound to no clause"):
        read(tmp_path, 'import sql\n@sql.clause("LIFE-ORDER")\ndef test_a(): ...\n')


def test_a_clause_without_a_case_is_an_error(tmp_path: Path) -> None:
    catalogue = read(tmp_path, 'import pytest\n@pytest.mark.clause("LIFE-ORDER")\ndef test_a(): ...\n')
    with pytest.raises(RegistryError) as caught:
        require_cases(catalogue, load_registry())
    assert "LIFE-REPEATS (lifecycle.toml)" in str(caught.value)
    assert "LIFE-ORDER" not in str(caught.value).splitlines()[0]


def test_shipped_cases_and_clauses_agree() -> None:
    catalogue = load_catalogue()
    for name in load_registry().clauses:
        assert catalogue.cases_of(name), name
