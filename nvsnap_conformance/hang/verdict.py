"""The verdict over a bundle: which ranks diverged, where, and whose collective is missing.

A pure function of the bundle, so that a recorded one is judged again anywhere and with the same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvsnap_conformance.hang import corroborate, signs, wording
from nvsnap_conformance.hang.answer import Confidence, Verdict, VerdictKind
from nvsnap_conformance.hang.coherence import contradictions, looked_for
from nvsnap_conformance.hang.collectives import FrameRegistry, Kind, load
from nvsnap_conformance.hang.merge import Condition, View, classes, split
from nvsnap_conformance.hang.observation import Observation

if TYPE_CHECKING:
    from nvsnap_conformance.hang.model import Bundle

__all__ = ["Confidence", "Verdict", "VerdictKind", "judge"]


def judge(bundle: Bundle, registry: FrameRegistry | None = None) -> Verdict:
    """Judge a bundle; ``registry`` defaults to the shipped frames. Never raises for what a bundle holds."""
    return _Judge(bundle, registry or load()).verdict()


class _Judge(Observation):
    """Asks the questions, in order of how certain an answer is."""

    def verdict(self) -> Verdict:
        """Try the questions in order of how certain an answer is."""
        if not self.ranks:
            return self.make(VerdictKind.UNKNOWN, Confidence.LOW, "No rank was found to be sampled.")
        if wrong := contradictions(self.bundle):
            return self.make(
                VerdictKind.UNKNOWN, Confidence.LOW, f"the data contradict themselves: {'; '.join(wrong)}."
            )
        if self.rounds < 2:
            return self.make(
                VerdictKind.UNKNOWN,
                Confidence.LOW,
                f"{self.rounds} round(s) of samples never tell a hang from work.",
            )
        dead = self._dead()
        if dead is not None:
            return dead
        seconds = looked_for(self.bundle.rounds)
        if seconds < signs.LEAST_SECONDS:
            return self.make(
                VerdictKind.UNKNOWN,
                Confidence.LOW,
                f"looks over {seconds:.2f} s tell no hang from work, that takes {signs.LEAST_SECONDS} s.",
            )
        for question in (self._diverged, self._missing, self._together, self._control):
            answer = question()
            if answer is not None:
                return answer
        return self._rest()

    # --- the questions, in order -------------------------------------------------------------------

    def _dead(self) -> Verdict | None:
        gone = [v for v in self.ranks if v.condition is Condition.GONE]
        present = {v.member.rank for v in self.ranks}
        size = self.bundle.world_size or 0
        absent = set(range(size)) - present
        ranks = tuple(sorted({v.member.rank for v in gone if v.member.rank is not None} | absent))
        if not ranks:
            return None
        others = [v for v in self.ranks if v.condition is not Condition.GONE]
        parts = [f"{wording.ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} no living process"]
        if absent:
            parts.append(f"of {self.bundle.world_size} ranks only {len(present)} were found")
        parts += [wording.where(g) for g in classes(others)]
        return self.make(VerdictKind.DEAD_RANK, Confidence.HIGH, "; ".join(parts) + ".", missing=ranks)

    def _diverged(self) -> Verdict | None:
        best: tuple[int, Verdict] | None = None
        for members, waiting in self.collective_groups():
            absent = _without(members, waiting)
            answer = self._branches(waiting, absent) or (None if absent else self._paths(waiting))
            if answer and (best is None or len(members) < best[0]):
                best = (len(members), answer)
        return best[1] if best else None

    def _branches(self, waiting: list[View], absent: list[View]) -> Verdict | None:
        """Two arms of one choice that exclude each other, each with waiting ranks: that is certain."""
        by_choice: dict[str, dict[str, list[View]]] = {}
        for view in waiting:
            for choice, arm in (view.position.branches if view.position else {}).items():
                by_choice.setdefault(choice, {}).setdefault(arm.id, []).append(view)
        for choice, arms in sorted(by_choice.items()):
            if len(arms) > 1:
                return self._divergence(list(arms.values()), absent, choice, certain=True)
        return None

    def _paths(self, waiting: list[View]) -> Verdict | None:
        """Nobody is missing and yet nothing moves: different operations, or one from different calls."""
        if len(waiting) < 2 or any(signs.lively(v) for v in waiting):
            return None
        by_wait: dict[object, list[View]] = {}
        for view in waiting:
            by_wait.setdefault(view.position.wait if view.position else None, []).append(view)
        if len(by_wait) > 1:
            if _hand_over(waiting):
                return None
            return self._divergence(list(by_wait.values()), [], "", certain=True)
        by_place: dict[object, list[View]] = {}
        for view in waiting:
            by_place.setdefault(view.position.key if view.position else None, []).append(view)
        if len(by_place) > 1:
            return self._divergence(list(by_place.values()), [], "", certain=False)
        return None

    def _divergence(
        self, parts: list[list[View]], absent: list[View], choice: str, *, certain: bool
    ) -> Verdict:
        parts.sort(key=lambda views: (-len(views), min(v.member.rank or 0 for v in views)))
        first, second = parts[0][0].position, parts[1][0].position
        assert first is not None
        assert second is not None
        frames = split(first, second)
        sentences = []
        if frames:
            lines = "" if frames[0].line == frames[1].line else f" and {frames[1].line}"
            sentences.append(
                f"the ranks split in {frames[0].name} ({frames[0].file}:{frames[0].line}{lines})"
            )
        sentences += [f"{wording.count(views)} in {wording.what(views)}" for views in parts]
        why = (
            "two different collectives of one group at once can never complete"
            if certain
            else "one operation called from different places, with nobody missing: the order of two groups "
            "or the number of calls differs between the ranks"
        )
        sentences.append(why)
        if absent:
            sentences.append("besides, " + "; ".join(wording.where(g) for g in classes(absent)))
        everyone = [view for views in parts for view in views]
        confidence = self.confidence(everyone, Confidence.HIGH if certain else Confidence.MEDIUM)
        smaller = tuple(sorted(v.member.rank or 0 for views in parts[1:] for v in views))
        place = choice or (first.entry.id if first.entry else "")
        return self.make(
            VerdictKind.DIVERGED_BRANCH,
            confidence,
            "; ".join(sentences) + ".",
            missing=smaller,
            place=place,
            split=frames or (),
        )

    def _missing(self) -> Verdict | None:
        """Tell who is missing where some wait for others, and whether it still comes."""
        candidates = []
        for members, waiting in self.collective_groups():
            absent = _without(members, waiting)
            # Who goes from one collective to the next is not held up by ranks of another group.
            if absent and not all(signs.lively(v) for v in waiting):
                # Ranks that wait in another group's collective are held up themselves.
                held = all(v.condition is Condition.GATHERED for v in absent)
                candidates.append((held, self._absence(waiting, absent)))
        if candidates and all(held for held, _ in candidates):
            waiting = [v for v in self.ranks if v.condition is Condition.GATHERED]
            parts = [list(group.views) for group in classes(waiting)]
            return self._divergence(parts, [], "", certain=False)
        if candidates:
            order = list(VerdictKind)
            # Whoever is held up by nobody comes first; of those, the surest kind in the smallest group.
            return min(candidates, key=lambda c: (c[0], order.index(c[1].kind), len(c[1].missing)))[1]
        idle = [v for v in self.ranks if v.condition is Condition.IDLE]
        busy = [v for v in self.ranks if v.condition not in (Condition.IDLE, Condition.UNREADABLE)]
        if idle and busy and self.front_waits():
            return self._absence(idle, busy)
        stopped = [v for v in self.ranks if v.condition is Condition.STOPPED]
        if stopped and len(stopped) < len(self.ranks):
            return self._absence(_without(self.ranks, stopped), stopped)
        return None

    def _absence(self, waiting: list[View], absent: list[View]) -> Verdict:
        held = [v for v in absent if v.condition is Condition.GATHERED]
        if len(held) < len(absent):
            absent = _without(absent, held)  # they wait elsewhere for somebody themselves
        coming = [v for v in absent if signs.comes(v)]
        unreadable = [v for v in absent if v.condition is Condition.UNREADABLE]
        others = _without(_without(absent, coming), unreadable)
        doubtful = [v for v in others if signs.doubtful(v)]
        stuck = _without(others, doubtful)
        late = coming + doubtful
        waits = "; ".join(wording.where(g) for g in classes(waiting))
        place = next((v.position.entry.id for v in waiting if v.position and v.position.entry), "")
        if stuck:
            missing = tuple(sorted(v.member.rank or 0 for v in stuck))
            text = f"{waits}; missing: " + "; ".join(wording.where(g) for g in classes(stuck))
            if late:
                text += "; on the way: " + "; ".join(wording.where(g) for g in classes(late))
            if unreadable:
                text += "; not told: " + "; ".join(wording.where(g) for g in classes(unreadable))
            text += wording.lock_note(stuck, waiting)
            guessed = unreadable or any(v.condition is Condition.ELSEWHERE for v in stuck)
            return self.make(
                VerdictKind.MISSING_ARRIVAL,
                self.confidence(waiting + stuck, Confidence.MEDIUM if guessed else Confidence.HIGH),
                text + ".",
                missing=missing,
                place=place,
            )
        if unreadable:
            missing = tuple(sorted(v.member.rank or 0 for v in unreadable))
            reasons = "; ".join(wording.where(g) for g in classes(unreadable))
            return self.make(
                VerdictKind.UNKNOWN,
                Confidence.LOW,
                f"{waits}; the others cannot be read, so nothing tells whether they come: {reasons}.",
                missing=missing,
            )
        text = f"{waits}; late but at work: " + "; ".join(wording.where(g) for g in classes(late))
        if doubtful:
            text += " (too few signs, or too few looks, to call that stuck)"
        return self.make(
            VerdictKind.STRAGGLER,
            self.confidence(waiting, Confidence.LOW if doubtful else Confidence.MEDIUM),
            text + ".",
            missing=tuple(sorted(v.member.rank or 0 for v in late)),
            place=place,
        )

    def _together(self) -> Verdict | None:
        """Nobody is missing: everyone waits, and for something that is no rank."""
        found = self.ranks
        conditions = {v.condition for v in found}
        if conditions & {Condition.UNREADABLE, Condition.MOVING, Condition.PHASE, Condition.IDLE}:
            return None
        groups = classes(found)
        if conditions == {Condition.STOPPED}:
            why = "every rank is stopped, the whole engine is frozen"
        elif Condition.DEVICE in conditions:
            return self._jam(found)
        elif any(signs.busy(v) or signs.works(v) for v in found) or _places(found) > 1:
            return None
        elif Condition.GATHERED in conditions:
            if len(found) == 1:
                return None  # nobody waits for himself: those that he waits for were not found
            unsure = self._one_after_the_other(found)
            if unsure is not None:
                return unsure
            why = (
                "every rank has arrived at the same place and nothing comes of it (a device, a rank that was "
                "not found, or groups used in different orders)"
            )
        else:
            why = (
                "everyone waits at the same place, nobody is missing; what they wait for is no rank of this "
                "engine (a lock, a device or a peer outside)"
            )
        return self.make(
            VerdictKind.ALL_TOGETHER,
            self.confidence(found, Confidence.MEDIUM),
            f"{why}: " + "; ".join(wording.where(g) for g in groups) + ".",
            place=wording.first_entry(found),
        )

    def _jam(self, found: list[View]) -> Verdict | None:
        """Hosts wait for devices: a long step does so too, so only sources beside the stacks make it sure."""
        others = [v for v in found if v.condition is not Condition.DEVICE]
        if any(signs.busy(v) or signs.works(v) for v in others) or any(signs.lively(v) for v in found):
            return None
        evidence = self.bundle.evidence
        behind = tuple(r for r in corroborate.behind(evidence) if r in {v.member.rank for v in found})
        sure = bool(behind) or corroborate.devices_stand(evidence)
        text = "hosts wait for their devices: " + "; ".join(wording.where(g) for g in classes(found))
        if behind:
            text += f"; by the flight recorder {wording.ranks(behind)} launched less than the others wait for"
        elif not sure:
            text += "; a long step looks the same, and no other source tells them apart"
        return self.make(
            VerdictKind.DEVICE_JAM,
            self.confidence(found, Confidence.MEDIUM if sure else Confidence.LOW),
            text + ".",
            missing=behind,
            place=wording.first_entry([v for v in found if v.condition is Condition.DEVICE]),
        )

    def _one_after_the_other(self, found: list[View]) -> Verdict | None:
        """Tell a loop of collectives, in which every look finds everyone in the same one, from a stuck one.

        Threads that work in collectives are woken all the time. Those that spin are not: then only a
        counter that stands still, or more looks, make it certain.
        """
        spinning = [v for v in found if v.activity.cpu > signs.WAKING]
        sure = self.rounds >= signs.SURE_ROUNDS or corroborate.pending_and_frozen(self.bundle.evidence)
        if not any(signs.lively(v) for v in found) and (not spinning or sure):
            return None
        return self.make(
            VerdictKind.PROGRESSING,
            Confidence.LOW,
            "every look finds every rank in the same collective, and the ranks are at work: one collective "
            "after the other, as far as so few looks tell: "
            + "; ".join(wording.where(g) for g in classes(found))
            + ".",
        )

    def _control(self) -> Verdict | None:
        if not all(v.condition is Condition.IDLE for v in self.ranks):
            return None
        if not self.front_waits():
            return self.make(
                VerdictKind.PROGRESSING,
                self.confidence(self.ranks, Confidence.MEDIUM),
                "every rank waits for work, and no front waits for a rank: the engine is idle.",
            )
        fronts = "; ".join(
            f"{v.member.title or v.label} is {wording.place(v)}" for v in self.waiting_fronts()
        )
        return self.make(
            VerdictKind.CONTROL_ONLY,
            self.confidence(self.ranks, Confidence.HIGH),
            "every rank waits for work"
            + (f" while {fronts}" if fronts else " while requests are pending")
            + ": a request or an answer was lost between them.",
            missing=(),
        )

    def _rest(self) -> Verdict:
        unreadable = [v for v in self.ranks if v.condition is Condition.UNREADABLE]
        groups = classes(self.ranks)
        where = "; ".join(wording.where(g) for g in groups[:6])
        if unreadable:
            missing = tuple(sorted(v.member.rank or 0 for v in unreadable))
            return self.make(
                VerdictKind.UNKNOWN,
                Confidence.LOW,
                f"partial data, {len(unreadable)} of {len(self.ranks)} ranks cannot be read: {where}.",
                missing=missing,
            )
        lively = [v for v in self.ranks if signs.comes(v) or signs.lively(v)]
        if lively:
            return self.make(
                VerdictKind.PROGRESSING,
                self.confidence(lively, Confidence.MEDIUM),
                f"nobody waits for a rank that does not come: {where}.",
            )
        return self.make(
            VerdictKind.UNKNOWN, Confidence.LOW, f"nothing moves, and no known wait explains it: {where}."
        )


def _places(found: list[View]) -> int:
    """Count places by what is waited for, not by line: alike loops around one wait are one place."""
    return len({v.position.wait if v.position else (v.kernel, "", ()) for v in found})


def _without(found: list[View], left_out: list[View]) -> list[View]:
    pids = {v.member.pid for v in left_out}
    return [v for v in found if v.member.pid not in pids]


def _hand_over(waiting: list[View]) -> bool:
    """Whether all wait for single peers (a pipeline): different operations are no divergence there."""
    return all(v.position is not None and v.position.kind is Kind.P2P for v in waiting)
