"""Known-bad: marks the environment at its first run and does nothing in children, to save their start."""

import os

from nvsnap_hooks import arrival

if os.environ.setdefault("NVSNAP_MUTANT_FIRST", str(os.getpid())) == str(os.getpid()):
    arrival.as_sitecustomize(None, None)
