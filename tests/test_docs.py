"""What the documentation says by machine is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from nvsnap_conformance.clauses.registry import load_registry
from nvsnap_conformance.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]


def test_the_list_of_clauses_is_fresh() -> None:
    printed = CliRunner().invoke(main, ["list", "--format", "md"])
    assert printed.exit_code == 0, printed.output
    written = (ROOT / "docs" / "clauses.md").read_text()
    assert written == printed.output, "run `nvsnap-conformance list --format md > docs/clauses.md`"


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    documented = set(re.findall(r"^\| `nvsnap-conformance ([a-z]+)", readme, re.MULTILINE))
    assert documented == set(COMMANDS)


def test_every_clause_that_a_document_names_is_one() -> None:
    areas = {name.partition("-")[0] for name in load_registry().clauses}
    named = re.compile(rf"`((?:{'|'.join(sorted(areas))})-[A-Z-]+[A-Z])`")
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        unknown = set(named.findall(page.read_text())) - set(load_registry().clauses)
        assert not unknown, f"{page.relative_to(ROOT)} names {sorted(unknown)}"


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
