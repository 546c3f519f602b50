"""Settings of the project's own tests."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["pytester"]

# A slow machine is no defect: times are benchmarks, never asserts.
settings.register_profile("nvsnap", deadline=None)
settings.load_profile("nvsnap")
