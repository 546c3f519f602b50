"""What the judge sees: a bundle read into views, groups and the tree, and what its questions share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.hang import corroborate, wording
from nvsnap_conformance.hang.answer import HANGS, Confidence, Verdict, VerdictKind
from nvsnap_conformance.hang.groups import subgroups
from nvsnap_conformance.hang.merge import Condition, View, classes, prefix_tree, views
from nvsnap_conformance.hang.model import Bundle, Frame, Role
from nvsnap_conformance.hang.position import Analyser

if TYPE_CHECKING:
    from nvsnap_conformance.hang.collectives import FrameRegistry


class Observation:
    """A bundle, read: views of ranks and fronts, their groups, and the tree."""

    def __init__(self, bundle: Bundle, registry: FrameRegistry) -> None:
        self.bundle = bundle
        analyser = Analyser(registry)
        found = views(bundle, analyser)
        self.ranks = [v for v in found if v.member.role is Role.RANK and v.member.rank is not None]
        self.fronts = [v for v in found if v.member.role in (Role.CORE, Role.FRONT)]
        self.rounds = len(bundle.rounds)
        self.notes = list(bundle.problems)
        numbers = {view.member.pid: view.member.rank or 0 for view in self.ranks}
        self.root = prefix_tree(
            (numbers[sample.pid], index, position)
            for index, taken in enumerate(bundle.rounds)
            for sample in taken.samples
            if sample.pid in numbers and (position := analyser.sample(sample)) is not None
        )

    def collective_groups(self) -> list[tuple[list[View], list[View]]]:
        """Return the groups in whose collectives ranks wait: all their members, and those that wait.

        Where the call tells the axis it is the waiting rank's own group along it, else the smallest group
        that spans all ranks at that place (tensor-parallel first: those are by far the most).
        """
        waiting = [v for v in self.ranks if v.condition is Condition.GATHERED]
        known = subgroups(self.ranks) if waiting else []
        found: dict[frozenset[int], set[int]] = {}
        for group in classes(waiting):
            axis = group.position.group if group.position else ""
            parts = [g for g in known if g.axis == axis]
            if not parts:
                pids = {v.member.pid for v in group.views}
                fitting = [g for g in known if pids <= g.pids]
                parts = [min(fitting, key=lambda g: (len(g.pids), g.axis != "tp"))]
            for part in parts:
                own = {v.member.pid for v in group.views if v.member.pid in part.pids}
                if own:
                    found.setdefault(part.pids, set()).update(own)
        return [
            (
                [v for v in self.ranks if v.member.pid in pids],
                [v for v in self.ranks if v.member.pid in own],
            )
            for pids, own in found.items()
        ]

    def waiting_fronts(self) -> list[View]:
        """Return the fronts that wait for the ranks."""
        return [v for v in self.fronts if v.condition is Condition.CONTROL]

    def front_waits(self) -> bool:
        """Whether a front waits for the ranks, by its stack or by counters."""
        return bool(self.waiting_fronts()) or corroborate.pending_and_frozen(self.bundle.evidence)

    def confidence(self, deciding: list[View], ceiling: Confidence) -> Confidence:
        """Lower the ceiling for torn reads, for few rounds and for places the registry does not know."""
        order = list(Confidence)
        level = order.index(ceiling)
        if any(v.torn for v in deciding):
            level = max(level, 1)
        if self.rounds < 3 or any(v.rounds < 2 for v in deciding if v.condition is not Condition.STOPPED):
            level = max(level, 1)
        return order[min(level, len(order) - 1)]

    def make(
        self,
        kind: VerdictKind,
        confidence: Confidence,
        summary: str,
        *,
        missing: tuple[int, ...] = (),
        place: str = "",
        split: tuple[Frame, ...] = (),
    ) -> Verdict:
        """Return a verdict with the evidence that every kind comes with."""
        evidence = [*self.notes]
        settled = [v for v in self.ranks if v.settled]
        if self.rounds >= 2:
            times = [s.at for taken in self.bundle.rounds for s in taken.samples]
            evidence.append(
                f"{len(settled)} of {len(self.ranks)} ranks settled over {self.rounds} rounds, "
                f"{max(times, default=0.0) - min(times, default=0.0):.1f} s"
            )
        spinning = [v.member.rank or 0 for v in settled if v.activity.cpu > 0.15]
        if spinning and kind in HANGS:
            evidence.append(
                f"{wording.ranks(tuple(spinning))} burning CPU without moving, which is no progress"
            )
        evidence += corroborate.remarks(self.bundle.evidence)
        sources = sorted({v.member.source for v in self.ranks if v.member.source})
        if sources:
            evidence.append(f"ranks known from: {', '.join(sources)}")
        return Verdict(
            kind,
            confidence,
            summary[:1].upper() + summary[1:],
            missing,
            place,
            split,
            tuple(evidence),
            tuple(classes(self.ranks)),
            tuple(self.fronts),
            self.root,
            self.rounds,
        )
