"""Known-bad hooks whose defect shows in what only GPUs hold, or in what one rank's failure does to others.

As in :mod:`nvsnap_hooks.mutants`, each is the reference implementation with one defect.
"""

from __future__ import annotations

import functools
import gc
from typing import Any, ClassVar

from nvsnap_hooks import flashinfer
from nvsnap_hooks.exchange import OverGroups
from nvsnap_hooks.graphs import Graphs
from nvsnap_hooks.holders import Holder
from nvsnap_hooks.reference import ReferenceHooks
from nvsnap_hooks.resources import Absent, DefaultGroup, Group, Unsupported

Report = dict[str, Any]


class GroupsBeforeGraphs(ReferenceHooks):
    """Drops graphs after the groups whose collectives they hold; on GPUs the destroy never returns."""

    DIRTY: ClassVar[bool] = False

    def release_order(self, resources: list[Any]) -> list[Any]:
        """Put the graphs last."""
        return sorted(resources, key=lambda resource: isinstance(resource, Graphs))


class UnsortedGroups(ReferenceHooks):
    """Goes through the groups as each rank registered them, as vLLM's own hooks do."""

    DIRTY: ClassVar[bool] = False

    def release_order(self, resources: list[Any]) -> list[Any]:
        """Order the groups by their registration, the default group last."""
        from vllm.distributed import parallel_state

        registered = list(parallel_state._groups)

        def place(resource: Any) -> int:
            if not isinstance(resource, Group):
                return -1
            name = resource.name.partition("/")[0]
            known = name in registered and not isinstance(resource, DefaultGroup)
            return registered.index(name) if known else len(registered)

        return sorted(resources, key=place)


class AliasTwice(ReferenceHooks):
    """Visits a workspace once for each slot that it is in."""

    DIRTY: ClassVar[bool] = False

    def release(self, resource: Any) -> str:
        """Release an aliased workspace again under its other name."""
        detail = super().release(resource)
        for _ in getattr(resource, "aliases", ()) if isinstance(resource, flashinfer.Workspace) else ():
            super().release(resource)
        return detail


class WeakerTeardown(ReferenceHooks):
    """Drops graphs and groups, leaves FlashInfer's workspaces mapped and does not speak of them."""

    DIRTY: ClassVar[bool] = False

    def inventory(self) -> list[Any]:
        """See no workspace."""
        return [found for found in super().inventory() if not isinstance(found, flashinfer.Workspace)]


class GraphsCalledAbsent(ReferenceHooks):
    """Looks for graphs in the wrong place, finds none and says so."""

    DIRTY: ClassVar[bool] = False

    def inventory(self) -> list[Any]:
        """See no graph."""
        none = Absent(Graphs.name, Graphs.kind, "none was found")
        return [none if isinstance(found, Graphs) else found for found in super().inventory()]


class All2AllSkipped(ReferenceHooks):
    """Skips an all-to-all manager, with a warning that nobody reads."""

    DIRTY: ClassVar[bool] = False

    def inventory(self) -> list[Any]:
        """See no manager."""
        found = super().inventory()
        for resource in found:
            if isinstance(resource, OverGroups):
                _leave(resource.manager, found)
        return [resource for resource in found if resource.kind != OverGroups.kind]


class ExchangeByClass(ReferenceHooks):
    """Keeps the all-to-all managers that it finds by their class, so that of two alike it knows one only."""

    DIRTY: ClassVar[bool] = False

    def inventory(self) -> list[Any]:
        """Take for each manager the last one of its class."""
        found = super().inventory()
        for resource in found:
            if not isinstance(resource, OverGroups):
                continue
            own = resource.manager
            others = [thing for thing in gc.get_objects() if type(thing) is type(own) and thing is not own]
            resource.manager = {type(manager): manager for manager in [own, *others]}[type(own)]
            _leave(own, found)
        return found


class ExchangeNotHandedOut(ReferenceHooks):
    """Gives a rebuilt all-to-all manager to its communicator only; kernels keep what was put in its place."""

    DIRTY: ClassVar[bool] = False

    def rebuild(self, resource: Any, context: Any) -> str:
        """Rebuild, having forgotten the other holders."""
        if not isinstance(resource, OverGroups):
            return super().rebuild(resource, context)
        resource.places = []
        detail = super().rebuild(resource, context)
        resource._owner.all2all_manager = resource.manager
        return detail


class ExchangeOverWorld(ReferenceHooks):
    """Makes an all-to-all manager again over the default group, in place of the group that it is for."""

    DIRTY: ClassVar[bool] = False

    def rebuild(self, resource: Any, context: Any) -> str:
        """Rebuild, a manager over the world."""
        detail = super().rebuild(resource, context)
        if isinstance(resource, OverGroups):
            from torch.distributed import distributed_c10d as c10d

            resource.manager.cpu_group = c10d._get_default_group()
        return detail


class WorkspaceForgotten(ReferenceHooks):
    """Reports a workspace rebuilt that it passes over, as vLLM does once the workspace's group is another."""

    DIRTY: ClassVar[bool] = False

    def rebuild(self, resource: Any, context: Any) -> str:
        """Rebuild all but workspaces."""
        if isinstance(resource, flashinfer.Workspace):
            return "no workspace belongs to this group"
        return super().rebuild(resource, context)


class WorkspaceOverWorld(ReferenceHooks):
    """Restores a workspace over the default group in place of the group that it is for."""

    DIRTY: ClassVar[bool] = False

    def rebuild(self, resource: Any, context: Any) -> str:
        """Rebuild, a workspace over the world."""
        if isinstance(resource, flashinfer.Workspace):
            from torch.distributed import distributed_c10d as c10d

            groups = resource._module._fi_ar_workspace_groups
            groups[id(resource._workspace)] = c10d._get_default_group()
        return super().rebuild(resource, context)


class AnyBackends(ReferenceHooks):
    """Does not ask whether the other ranks' workspaces are of the same backend."""

    DIRTY: ClassVar[bool] = False

    def shared(self, resources: list[Any]) -> list[str]:
        """Name without backends."""
        return [entry.partition(" ")[0] for entry in super().shared(resources)]


class FailureKept(ReferenceHooks):
    """A rank whose own part went well reports success, whatever became of the others."""

    DIRTY: ClassVar[bool] = True

    def _conclude(self, _votes: Any, outcomes: list[Report], reached: str) -> None:
        """Look at the own outcomes only."""
        failed = [o["name"] for o in outcomes if o["outcome"] == "failed"]
        self.state.name, self.state.problem = ("failed", str(failed)) if failed else (reached, None)


class AbandonsLoop(ReferenceHooks):
    """Stops at its first failure and bounds nothing, as an exception in vLLM's loop over groups does.

    Its groups stay open, so its peers wait in the next barrier for the engine's timeout of half an hour.
    """

    DIRTY: ClassVar[bool] = True

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        super().__init__(worker, options)
        self._stopped = False

    def bound(self, resources: list[Any]) -> None:
        """Bound nothing."""

    def release(self, resource: Any) -> str:
        """Release, unless an earlier one failed."""
        if self._stopped:
            raise RuntimeError("not attempted: an earlier one failed")
        try:
            return super().release(resource)
        except Unsupported:
            raise
        except Exception:
            self._stopped = True
            raise


class WorkspacesFirst(ReferenceHooks):
    """Maps workspaces again before there is a group to exchange their memory over."""

    DIRTY: ClassVar[bool] = True

    def rebuild_order(self, resources: list[Any]) -> list[Any]:
        """Put the workspaces first."""
        ordered = super().rebuild_order(resources)
        return sorted(ordered, key=lambda resource: not isinstance(resource, flashinfer.Workspace))

    def rebuild(self, resource: Any, context: Any) -> str:
        """Rebuild, a workspace over whatever is in its group's place."""
        if isinstance(resource, flashinfer.Workspace):
            resource._workspace.checkpoint_restore(resource._module.TorchDistBackend(group=None))
        return super().rebuild(resource, context)


class DeviceOfFirstThread(ReferenceHooks):
    """Makes the worker's device current in the thread of its constructor only."""

    DIRTY: ClassVar[bool] = True

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        super().__init__(worker, options)
        self.device.make_current()

    def _take_device(self) -> None:
        """Rely on the constructor."""


class DeviceOfTheFirstRank(ReferenceHooks):
    """Makes a device current in every thread that calls, the same one on every rank."""

    DIRTY: ClassVar[bool] = True

    def _take_device(self) -> None:
        """Take the first GPU for the worker's device."""
        import torch
        from vllm.platforms import current_platform

        current_platform.set_device(torch.device("cuda", 0))


class SuspendSkipped(ReferenceHooks):
    """Asked to suspend NCCL's communicators, skips that where the library cannot, behind a success."""

    DIRTY: ClassVar[bool] = False

    def _require_suspend(self) -> None:
        """Ask nothing."""


class UnsupportedHalfWay(ReferenceHooks):
    """Takes a workspace that cannot be torn down for a failure, after it has begun with all the others."""

    DIRTY: ClassVar[bool] = True

    def release(self, resource: Any) -> str:
        """Release, and fail where a workspace says that it cannot."""
        try:
            return super().release(resource)
        except Unsupported as error:
            if not isinstance(resource, flashinfer.Workspace):
                raise
            raise RuntimeError(str(error)) from error


class UnsupportedPassedOver(ReferenceHooks):
    """Calls a workspace absent that cannot be torn down, as if nothing had to be told of it."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and tell of no workspace that is unsupported."""
        report = super().prepare()
        for entry in report["resources"]:
            if (entry["kind"], entry["outcome"]) == (flashinfer.Workspace.kind, "unsupported"):
                entry["outcome"] = "absent"
        return report


class RecaptureForgotten(ReferenceHooks):
    """Drops graphs, calls them deferred, and never has them captured again; the engine does not by itself."""

    DIRTY: ClassVar[bool] = True

    def recapture(self, number: int = 1) -> Report:
        """Say that it is done."""
        return {"state": self.state.name, "problem": None, "graphs": {"state": "captured", "of": number}}


class UsesGraphsEarly(ReferenceHooks):
    """Lets the engine dispatch to graphs as soon as the first of them is captured again."""

    DIRTY: ClassVar[bool] = True

    def recapture(self, number: int = 1) -> Report:
        """Capture, and have the engine dispatch at once."""
        report = super().recapture(number)
        for dispatcher in getattr(self.state.recapture, "_dispatchers", ()):
            dispatcher.keys_initialized = True
        return report


def _leave(manager: Any, found: list[Any]) -> None:
    """Let an all-to-all manager stay: its group is taken from it and given back as with any other holder."""
    for group in found:
        if isinstance(group, Group) and group.group is manager.cpu_group:
            put = functools.partial(setattr, manager, "cpu_group")
            group.holders = [*group.holders, Holder(f"{type(manager).__name__}.cpu_group", put)]
