"""Run this repro by hand: ``python run.py [--fixed] [--python INTERPRETER]``."""

from __future__ import annotations

from pathlib import Path

from nvsnap_conformance.hang.repro import demonstrate

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    demonstrate(
        HERE / "ranks.py",
        broken={"form": "today", "switch": "0"},
        fixed={"form": "obeyed", "switch": "0"},
        world=2,
        paths=[HERE / "standin", HERE.parent / "rank_local_fallback" / "standin"],
        preload=["fusion_pass:load"],
    )
