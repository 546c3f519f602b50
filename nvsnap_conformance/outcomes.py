"""Outcomes, signatures and exit codes: the vocabulary in which the suite passes judgement."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIGNATURE = re.compile(
    r"(?P<kind>[A-Z][A-Z0-9_]*):(?P<code>[A-Z0-9][A-Z0-9_.-]*)(@(?P<place>[A-Za-z0-9_.:/-]+))?"
)


class ExitCode(IntEnum):
    """Exit codes of the command line and of a pytest session with the plugin."""

    CONFORMANT = 0
    NOT_CONFORMANT = 1
    USAGE = 2
    INCOMPLETE = 6
    ENVIRONMENT = 7


class Outcome(StrEnum):
    """The outcome of a case or, being the worst of its cases, of a clause."""

    PASSED = "passed"
    XFAILED = "xfailed"
    FAILED = "failed"
    HANG = "hang"
    CRASH = "crash"
    UNKNOWN = "unknown"
    XPASSED = "xpassed"
    BAD_EXPECTATION = "bad-expectation"
    BLOCKED = "blocked"
    SKIPPED = "skipped"
    NOT_RUN = "not-run"
    ENVIRONMENT = "environment"

    @property
    def conformant(self) -> bool:
        """Whether a clause with this outcome may stand in a conformant run."""
        return self in {Outcome.PASSED, Outcome.XFAILED, Outcome.SKIPPED}


UNJUDGED = frozenset({Outcome.SKIPPED, Outcome.NOT_RUN, Outcome.BLOCKED, Outcome.ENVIRONMENT})
"""Outcomes of cases that say nothing of what they were to judge, such as whether a mutant is caught."""

SEVERITY: tuple[Outcome, ...] = (
    Outcome.ENVIRONMENT,
    Outcome.CRASH,
    Outcome.HANG,
    Outcome.FAILED,
    Outcome.BAD_EXPECTATION,
    Outcome.XPASSED,
    Outcome.UNKNOWN,
    Outcome.BLOCKED,
    Outcome.NOT_RUN,
    Outcome.XFAILED,
    Outcome.PASSED,
    Outcome.SKIPPED,
)
"""Worst first; a clause takes the first of these that any of its cases has."""


def worst(outcomes: list[Outcome]) -> Outcome:
    """Return the worst of ``outcomes``, ``NOT_RUN`` where there is none."""
    return min(outcomes, key=SEVERITY.index, default=Outcome.NOT_RUN)


@dataclass(frozen=True)
class Signature:
    """What a failure is, as data: ``KIND:CODE[@place]``, emitted by a check, never parsed out of a log.

    Expectations match a signature exactly, or without its place when they state none.
    """

    kind: str
    code: str
    place: str | None = None

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Read ``KIND:CODE`` or ``KIND:CODE@place``; raise ``ValueError`` for anything else."""
        match = _SIGNATURE.fullmatch(text)
        if match is None:
            raise ValueError(f"not a signature: {text!r}; the form is KIND:CODE or KIND:CODE@place")
        return cls(match["kind"], match["code"], match["place"])

    def matches(self, other: Signature) -> bool:
        """Whether this (expected) signature covers ``other`` (observed)."""
        return (self.kind, self.code) == (other.kind, other.code) and self.place in (None, other.place)

    def __str__(self) -> str:
        return f"{self.kind}:{self.code}" + (f"@{self.place}" if self.place else "")


class ConformanceFailure(AssertionError):  # noqa: N818 - a verdict, not an error of the suite
    """The system under test broke a clause; carries the signature and the evidence of the check.

    ``outcome`` is ``FAILED`` unless the check says that it was a hang, a crash or that it cannot tell
    (``UNKNOWN``, which is never a pass). ``signatures`` are those of all findings: an expectation covers
    the failure only if it covers each of them.
    """

    def __init__(
        self,
        message: str,
        *,
        signature: Signature | str,
        outcome: Outcome = Outcome.FAILED,
        evidence: Mapping[str, Any] | None = None,
        also: tuple[Signature, ...] = (),
    ) -> None:
        super().__init__(message)
        self.signature = Signature.parse(signature) if isinstance(signature, str) else signature
        self.signatures = (self.signature, *also)
        self.outcome = outcome
        self.evidence: Mapping[str, Any] = dict(evidence or {})


@dataclass(frozen=True)
class Finding:
    """The result of one check over recorded observations.

    A check is a plain function that returns a list of findings; an empty list means that it holds. The
    pytest case raises them with :func:`require`, and ``inspect`` prints them for a recorded run.
    """

    message: str
    signature: Signature
    outcome: Outcome = Outcome.FAILED
    evidence: Mapping[str, Any] = field(default_factory=dict)


def finding(message: str, signature: str, *, outcome: Outcome = Outcome.FAILED, **evidence: Any) -> Finding:
    """Build a :class:`Finding` from a signature's text."""
    return Finding(message, Signature.parse(signature), outcome, evidence)


def require(findings: list[Finding]) -> None:
    """Raise the worst of ``findings`` as :class:`ConformanceFailure`, naming the others in its message."""
    if not findings:
        return
    first = min(findings, key=lambda f: SEVERITY.index(f.outcome))
    others = [f for f in findings if f is not first]
    message = first.message
    if others:
        message += "\nalso: " + "\nalso: ".join(f"[{f.signature}] {f.message}" for f in others)
    raise ConformanceFailure(
        message,
        signature=first.signature,
        outcome=first.outcome,
        evidence=first.evidence,
        also=tuple(dict.fromkeys(f.signature for f in others)),
    )
