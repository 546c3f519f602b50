"""Known-bad hooks whose work is right and whose report is not, or says less than it should.

As in :mod:`nvsnap_hooks.mutants`, each is the reference implementation with one defect.
"""

from __future__ import annotations

from typing import Any, ClassVar

from nvsnap_hooks.mutants import recast
from nvsnap_hooks.reference import PREPARED, SERVING, ReferenceHooks
from nvsnap_hooks.resources import Broadcaster

Report = dict[str, Any]


class SkipsQuietly(ReferenceHooks):
    """Leaves a queue that it does not know alone, says nothing of it, and reports success."""

    DIRTY: ClassVar[bool] = False

    def inventory(self) -> list[Any]:
        """See no queue but the executor's."""
        return [found for found in super().inventory() if not isinstance(found, Broadcaster)]


class ReleasesNothing(ReferenceHooks):
    """Touches nothing, says that it is prepared, and calls something unsupported that nobody has."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Report what there is not."""
        self._require_state(SERVING)
        self.state.name = PREPARED
        entry = {
            "name": "made/up",
            "kind": "flashinfer-workspace",
            "outcome": "unsupported",
            "detail": "",
            "seconds": 0.0,
        }
        return {"state": PREPARED, "problem": None, "resources": [entry]}

    def restore(self) -> Report:
        """Report nothing."""
        self._require_state(PREPARED)
        self.state.name = SERVING
        return {"state": SERVING, "problem": None, "resources": []}


class OmitsFromReport(ReferenceHooks):
    """Releases the tensor-parallel group's CPU side and leaves it out of its report."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and leave one entry out."""
        report = super().prepare()
        report["resources"] = [entry for entry in report["resources"] if entry["name"] != "tp:0/cpu"]
        return report


class CallsHeldAbsent(ReferenceHooks):
    """Releases the tensor-parallel group's CPU side and says that there was none."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and call one entry absent."""
        report = super().prepare()
        for entry in report["resources"]:
            if entry["name"] == "tp:0/cpu":
                entry["outcome"] = "absent"
        return report


class OddOutcome(ReferenceHooks):
    """Reports 'ok', which says nothing."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and call it ok."""
        return recast(super().prepare(), "released", "ok")


class DefersEverything(ReferenceHooks):
    """Calls groups deferred, which only captured graphs may be."""

    DIRTY: ClassVar[bool] = False

    def restore(self) -> Report:
        """Restore, and say that it is to come."""
        return recast(super().restore(), "rebuilt", "deferred")


class NamesStateBefore(ReferenceHooks):
    """Reports the state that it came from as the one that it reached."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and say that the engine serves."""
        return super().prepare() | {"state": SERVING}

    def restore(self) -> Report:
        """Restore, and say that the engine is prepared."""
        return super().restore() | {"state": PREPARED}


class ProblemBehindSuccess(ReferenceHooks):
    """Tells a problem in a report that otherwise reads as a success."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and tell a problem."""
        return super().prepare() | {"problem": "nothing works"}


class ListsTwice(ReferenceHooks):
    """Lists a resource twice, with two outcomes to choose from."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and list the first resource again."""
        report = super().prepare()
        report["resources"] = [report["resources"][0] | {"outcome": "unsupported"}, *report["resources"]]
        return report


class MalformedEntries(ReferenceHooks):
    """Its entries lack how long it took, and have a list for a kind."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and report in a form of its own."""
        report = super().prepare()
        for entry in report["resources"]:
            entry["kind"] = [entry["kind"]]
            del entry["seconds"]
        return report


class StatusRaises(ReferenceHooks):
    """Has no status to tell."""

    DIRTY: ClassVar[bool] = False

    def status(self) -> Report:
        """Raise."""
        raise RuntimeError("no status")


class StatusOfNoForm(ReferenceHooks):
    """Answers status with nothing."""

    DIRTY: ClassVar[bool] = False

    def status(self) -> Any:
        """Return nothing."""
        return None


class StatusAlwaysServing(ReferenceHooks):
    """Says that it serves, whatever it did."""

    DIRTY: ClassVar[bool] = False

    def status(self) -> Report:
        """Return what a constant says."""
        return super().status() | {"state": SERVING}
