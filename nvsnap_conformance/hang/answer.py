"""What a verdict is: its kinds, how sure it is, and everything that led to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.hang import render
from nvsnap_conformance.hang.merge import Condition, Group, Node, View
from nvsnap_conformance.outcomes import Finding, Outcome, Signature

if TYPE_CHECKING:
    from nvsnap_conformance.hang.model import Frame


class VerdictKind(StrEnum):
    """What a bundle shows."""

    DIVERGED_BRANCH = "DIVERGED_BRANCH"
    """Two different collectives of one group at once."""
    MISSING_ARRIVAL = "MISSING_ARRIVAL"
    """Some wait for others that stay elsewhere."""
    STRAGGLER = "STRAGGLER"
    """Some wait for others that move or are in a long legitimate phase: late, but no hang."""
    ALL_TOGETHER = "ALL_TOGETHER"
    """Everyone waits at the same place: for a device, a lock or a peer outside."""
    DEVICE_JAM = "DEVICE_JAM"
    """The hosts wait for their devices, or for room in their launch queues."""
    DEAD_RANK = "DEAD_RANK"
    """A rank has no process any more."""
    CONTROL_ONLY = "CONTROL_ONLY"
    """The ranks are idle while the front waits for them."""
    PROGRESSING = "PROGRESSING"
    """Nothing is stuck."""
    UNKNOWN = "UNKNOWN"
    """The data do not tell."""


HANGS = frozenset(
    {
        VerdictKind.DIVERGED_BRANCH,
        VerdictKind.MISSING_ARRIVAL,
        VerdictKind.ALL_TOGETHER,
        VerdictKind.DEVICE_JAM,
        VerdictKind.CONTROL_ONLY,
    }
)

_OUTCOMES = {
    **dict.fromkeys(HANGS, Outcome.HANG),
    VerdictKind.DEAD_RANK: Outcome.CRASH,
    VerdictKind.UNKNOWN: Outcome.UNKNOWN,
    VerdictKind.STRAGGLER: Outcome.FAILED,
    VerdictKind.PROGRESSING: Outcome.FAILED,
}


class Confidence(StrEnum):
    """How much the data carry the verdict."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True)
class Verdict:
    """A verdict with everything that led to it.

    ``missing`` are the ranks that others wait for (or that diverged as the smaller part, which need not
    be the culprit), ``place`` names the collective or the choice for the signature, ``split`` where two
    paths part: one frame per path.
    """

    kind: VerdictKind
    confidence: Confidence
    summary: str
    missing: tuple[int, ...] = ()
    place: str = ""
    split: tuple[Frame, ...] = ()
    evidence: tuple[str, ...] = ()
    groups: tuple[Group, ...] = field(default=(), repr=False)
    fronts: tuple[View, ...] = field(default=(), repr=False)
    root: Node = field(default_factory=lambda: Node(None), repr=False, compare=False)
    rounds: int = 0

    @property
    def is_hang(self) -> bool:
        """Whether it says that nothing will move again by itself; never with low confidence."""
        return self.kind in HANGS and self.confidence is not Confidence.LOW

    @property
    def settled(self) -> bool:
        """Whether no rank moved."""
        return all(group.condition is not Condition.MOVING for group in self.groups)

    @property
    def unclear_pids(self) -> frozenset[int]:
        """The processes of which native frames would tell more: settled, but not in a known wait."""
        known = {Condition.GATHERED, Condition.IDLE, Condition.GONE, Condition.UNREADABLE, Condition.MOVING}
        return frozenset(
            view.member.pid
            for group in self.groups
            for view in group.views
            if view.condition not in known and not view.native
        )

    @property
    def signature(self) -> Signature:
        """Return ``HANG:KIND``, with the place where one is known."""
        return Signature("HANG", self.kind.value, self.place or None)

    @property
    def outcome(self) -> Outcome:
        """The outcome of a case whose deadline passed with this verdict.

        A deadline alone never says hang: what still moves is late, which is a plain failure, and what only
        looks like a hang is unknown.
        """
        if self.kind in HANGS and not self.is_hang:
            return Outcome.UNKNOWN
        return _OUTCOMES[self.kind]

    def paragraph(self) -> str:
        """Return one paragraph: ranks x place x missing, with confidence and evidence."""
        return render.paragraph(self)

    def tree(self, *, width: int = 110) -> str:
        """Return the space-time tree as text for a terminal of ``width`` columns."""
        return render.tree(self, width=width)

    def finding(self) -> Finding:
        """Return the verdict as a finding of a check."""
        return Finding(self.paragraph(), self.signature, self.outcome, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return render.to_json(self)
