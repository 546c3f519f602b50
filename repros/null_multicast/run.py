"""Run this repro by hand: ``python run.py [--fixed] [--python INTERPRETER]``."""

from __future__ import annotations

from pathlib import Path

from nvsnap_conformance.hang.repro import demonstrate

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    demonstrate(
        HERE / "ranks.py",
        broken={"form": "used", "backend": "auto"},
        fixed={"form": "today", "backend": "auto"},
        world=2,
        paths=[HERE.parent / "rank_local_fallback" / "standin"],
        preload=["vllm.distributed.device_communicators.flashinfer_all_reduce"],
    )
