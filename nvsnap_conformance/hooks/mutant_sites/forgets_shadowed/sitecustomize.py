"""Known-bad: takes the place of another sitecustomize and does not run it."""

from nvsnap_hooks import arrival

arrival.as_sitecustomize(None, None)
