"""SIGTERM and SIGHUP as interruptions: a run that is asked to end closes its engines and its record."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Terminations:
    """Turns the first of :data:`SIGNALS` into ``KeyboardInterrupt``; later ones leave the clean-up alone.

    A signal that is ignored (``nohup``) or has a handler already is left alone, and so are all of them
    outside of the main thread, where Python lets no handler be set.
    """

    def __init__(self) -> None:
        self._armed: list[signal.Signals] = []
        self._asked = False

    def arm(self) -> None:
        """Set the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._interrupt)
                    self._armed.append(number)

    def disarm(self) -> None:
        """Give the signals their default action back; idempotent."""
        while self._armed:
            signal.signal(self._armed.pop(), signal.SIG_DFL)

    def _interrupt(self, number: int, _frame: Any) -> None:
        if not self._asked:
            self._asked = True
            raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def interrupting() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``KeyboardInterrupt`` in this context."""
    terminations = Terminations()
    terminations.arm()
    try:
        yield
    finally:
        terminations.disarm()
