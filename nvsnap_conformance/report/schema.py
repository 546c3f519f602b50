"""Writes the published JSON schema of the run record: ``python -m nvsnap_conformance.report.schema FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nvsnap_conformance.report.model import RunRecord


def write_schema(path: Path) -> None:
    """Write the schema of ``results.json`` to ``path``."""
    path.write_text(json.dumps(RunRecord.model_json_schema(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_schema(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results.schema.json"))
