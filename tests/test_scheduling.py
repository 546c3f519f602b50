"""Which cases pytest-xdist keeps on one worker."""

from __future__ import annotations

import pytest

from nvsnap_conformance.session.scheduling import group

GROUPS = {
    "host": "host",
    "host-mutant=only-locks": "host-mutant=only-locks",
    "some-target-tp1": "engine 1",
    "some-target-tp2": "engine 2",
    "some-target-tp1-mutant=tires": "tires",
    "some-target-tp1-mutant=tires-early": "tires-early",
}


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("suites/a.py::test_a[host]", "host"),
        ("suites/a.py::test_a[gpu-host]", "host"),
        ("suites/a.py::test_a[stand-in-host-mutant=only-locks]", "host-mutant=only-locks"),
        ("suites/a.py::test_a[some-target-tp1]", "engine 1"),
        ("suites/a.py::test_a[some-target-tp2-workspace-prepare-first]", "engine 2"),
        ("suites/a.py::test_a[some-target-tp1-mutant=tires]", "tires"),
        ("suites/a.py::test_a[some-target-tp1-mutant=tires-early]", "tires-early"),
        ("suites/a.py::test_a[some-target-tp16]", "suites/a.py::test_a[some-target-tp16]"),
        ("suites/a[b]/c.py::test_a[host]", "host"),
        ("tests/test_b.py::test_plain", "tests/test_b.py::test_plain"),
    ],
)
def test_a_case_s_group_is_its_engine_s_or_its_mutant_s(nodeid: str, expected: str) -> None:
    assert group(nodeid, GROUPS) == expected
