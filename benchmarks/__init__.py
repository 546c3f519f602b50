"""Benchmarks of the suite itself: ``python -m benchmarks NAME [--json]``."""
