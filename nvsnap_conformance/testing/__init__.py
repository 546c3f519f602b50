"""For authors of hooks: try a class against the contract without an engine.

``check_hooks`` starts one process for each rank, brings the class in as an engine would, and returns what the
suite's own checks find. ``RankGroup`` is that group of ranks, for tests of one's own.
"""

from __future__ import annotations

from nvsnap_conformance.testing.check import HooksReport, check_hooks
from nvsnap_conformance.testing.ranks import RankGroup

__all__ = ["HooksReport", "RankGroup", "check_hooks"]
