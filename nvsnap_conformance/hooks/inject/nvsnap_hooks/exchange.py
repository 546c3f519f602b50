"""The managers of all-to-all exchanges between experts, one for each device communicator that needs one.

They have no common interface for a checkpoint: up to vLLM 0.33 one class has methods for it, those of the
base class log that they skip. Those that hold nothing but groups are released as objects, by identity, and
made again by their own constructor. What keeps buffers of its own is ``unsupported``, by name.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from nvsnap_hooks.holders import Tombstone, find_holders
from nvsnap_hooks.resources import Absent, Context, Kept, StillHeld, Unsupported

if TYPE_CHECKING:
    from nvsnap_hooks.holders import Holder

KIND = "all2all-manager"

OVER_GROUPS = frozenset({"AgRsAll2AllManager", "PassThroughAll2AllManager"})
"""Managers that exchange by collectives of the groups alone, or not at all (vLLM 0.26 to 0.33)."""


def of_communicator(name: str, owner: Any, worker: Any) -> Any:
    """Return the resource for the manager of the device communicator ``owner``, which may be ``None``."""
    manager = getattr(owner, "all2all_manager", None)
    if manager is None:
        return Absent(name, KIND, "the communicator has none")
    family = type(manager).__name__
    if family == "FlashInferNVLinkOneSidedManager":
        one_sided = OneSided(name, manager)
        return one_sided if one_sided.held() else Absent(name, KIND, "it has made no workspace")
    if family not in OVER_GROUPS:
        return Kept(name, KIND, f"{family} is not known")
    if getattr(manager, "tcp_store_group", None) is not None:
        return Kept(name, KIND, f"{family} over a group that torch.distributed does not know")
    return OverGroups(name, owner, worker)


class OverGroups:
    """A manager that holds nothing but groups: it goes with its last reference.

    It is followed by identity: there may be others of its class, and the name of its coordinator's group says
    nothing about which of them a layer holds.
    """

    kind = KIND

    def __init__(self, name: str, owner: Any, worker: Any) -> None:
        self.name = name
        self.manager = owner.all2all_manager
        self._owner = owner
        self._worker = worker
        self._class = type(self.manager)
        self.places: list[Holder] = []

    @property
    def backend(self) -> str:
        """What all ranks must have alike: the constructor is collective."""
        return self._class.__name__

    def held(self) -> bool:
        """Return whether it is there."""
        return self.manager is not None

    def release(self) -> str:
        """Destroy it, put tombstones where it was held, and see that it is really gone."""
        manager, self.manager = self.manager, None
        watch = weakref.ref(manager)
        ((self.places, stuck),) = find_holders([manager])
        manager.destroy()
        del manager
        for place in self.places:
            place.put(Tombstone(self.name))
        if watch() is not None:
            gc.collect()
        if watch() is not None:
            raise StillHeld(f"{self.name} is still held by {stuck or 'something unknown'}")
        return f"{self.backend}, held by {self._where()}"

    def rebuild(self, _context: Context) -> str:
        """Make it by its own constructor over the group in force, and hand it to every holder."""
        self.manager = self.make()
        for place in self.places:
            place.put(self.manager)
        return f"{self.backend}, handed to {self._where()}"

    def make(self) -> Any:
        """Return a new one; all ranks of the group take part, and the group's timeout bounds it."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._worker.vllm_config):
            return self._class(self._owner.cpu_group)

    def _where(self) -> str:
        return ", ".join(place.where for place in self.places) or "nothing else"


class OneSided:
    """The manager over FlashInfer's one-sided all-to-all, the only one with checkpoint methods up to 0.33."""

    kind = KIND

    def __init__(self, name: str, manager: Any) -> None:
        self.name = name
        self._manager = manager

    def held(self) -> bool:
        """Return whether it has made its workspace."""
        return bool(self._manager.initialized)

    def release(self) -> str:
        """Give the workspace's memory back, keeping its addresses."""
        if not hasattr(self._manager, "checkpoint_prepare"):
            raise Unsupported(f"{type(self._manager).__name__} has no checkpoint_prepare")
        self._manager.checkpoint_prepare()
        return "workspace unmapped"

    def rebuild(self, _context: Context) -> str:
        """Map fresh memory at the same addresses, over the group that is in force."""
        self._manager.checkpoint_restore()
        return "workspace mapped"
