"""Settings of the project's own tests."""

from __future__ import annotations

import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what it puts into the background, and programs keep it; some here get interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # And so nohup starts a program.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = ["pytester"]

# A slow machine is no defect: times are benchmarks, never asserts.
settings.register_profile("nvsnap", deadline=None)
settings.load_profile("nvsnap")
