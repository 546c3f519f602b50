"""What is put on an engine's PYTHONPATH: a thin loader, and hooks that an RPC names later.

Runs in the engine's interpreter: standard library and the engine only, never the suite.
"""

VERSION = "0.1.0"
"""Version of the injected package, reported with every reply."""
