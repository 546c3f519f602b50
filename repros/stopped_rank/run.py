"""Run this repro by hand: ``python run.py [--fixed] [--python INTERPRETER]``."""

from __future__ import annotations

from pathlib import Path

from nvsnap_conformance.hang.repro import demonstrate

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    demonstrate(
        HERE / "ranks.py",
        broken={"stopped": [3]},
    )
