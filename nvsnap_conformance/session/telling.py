"""How a failure is told on the terminal: what the suite raised itself in its own words, and once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.outcomes import ConformanceFailure, Outcome

if TYPE_CHECKING:
    from nvsnap_conformance.session.arms import Arm
    from nvsnap_conformance.session.judge import Judgement


class Telling:
    """Words for the failures of one session.

    The suite's own errors carry what failed, the cause and the next step: the suite's source adds nothing for
    whoever meets them. An error of the machine is met by every case of an engine, and told in full once.
    """

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def words(self, error: BaseException, judgement: Judgement, arm: Arm) -> str | None:
        """Return what stands for pytest's traceback, ``None`` where that is to stay: nobody foresaw it."""
        machine = judgement.outcome is Outcome.ENVIRONMENT
        if not (machine or isinstance(error, NvsnapError | ConformanceFailure)):
            return None
        text = str(error)
        first = error.what if isinstance(error, NvsnapError) else text.partition("\n")[0]
        if machine:
            key = (arm.engine_key, first)
            if key in self._told:
                return f"as above: {first}"
            self._told.add(key)
        return f"{text}\n[{judgement.signature}]" if isinstance(error, ConformanceFailure) else text
