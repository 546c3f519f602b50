"""The communicators of a coordinator on CUDA that map memory of peers, next to torch's process groups.

Found as attributes of vLLM's ``CudaCommunicator`` (0.26 to 0.33). Each is released on its own, and made again
with vLLM's own constructor over the rebuilt group; whatever had held the old one is given the new one.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from nvsnap_hooks import device
from nvsnap_hooks.holders import Tombstone, find_holders
from nvsnap_hooks.resources import Absent, Context, Kept, LeftAlive, StillHeld

if TYPE_CHECKING:
    from nvsnap_hooks.device import Device
    from nvsnap_hooks.holders import Holder
    from nvsnap_hooks.rendezvous import Rendezvous

STATELESS = frozenset({"fi_ar_comm"})
"""Holds nothing of its own: its workspace is in FlashInfer's slots (:mod:`nvsnap_hooks.flashinfer`)."""

_NCCL_SUSPEND_MEMORY = 1
"""``NCCL_SUSPEND_MEM`` of ``ncclCommSuspend`` (NCCL 2.29.7 and later)."""


class Communicator:
    """One communicator; ``mode`` is what the option ``teardown`` makes of its kind."""

    kind = ""
    attribute = ""

    def __init__(self, name: str, owner: Any, on: Device, mode: str) -> None:
        self.name = name
        self.mode = mode
        self.votes: Rendezvous | None = None
        self.seconds = 20.0
        self._owner = owner
        self._device = on
        self._made: Any = getattr(owner, self.attribute)
        self._class = type(self._made)
        self._places: list[Holder] = []
        self._released = False

    @property
    def backend(self) -> str:
        """What all ranks must have alike."""
        return self._class.__name__

    def held(self) -> bool:
        """Return whether it is there."""
        return not self._released and self.alive(self._made)

    @staticmethod
    def alive(communicator: Any) -> bool:
        """Return whether a communicator of this kind holds anything."""
        raise NotImplementedError

    def addresses(self) -> list[int]:
        """Return the addresses of shared memory that it has now, empty where they cannot be known."""
        return []

    def release(self) -> str:
        """Take it down, on this rank together with all others, and put tombstones in its place."""
        self._device.synchronize()
        detail = self._take_down()
        ((self._places, _stuck),) = find_holders([self._made])
        self._made = None
        for place in self._places:
            place.put(Tombstone(self.name))
        self._released = True
        return f"{detail}, held by {', '.join(place.where for place in self._places) or 'nothing else'}"

    def rebuild(self, _context: Context) -> str:
        """Make it again over the group that is in force, and hand it to every holder."""
        made = self._make()
        if not self.alive(made):
            raise RuntimeError(f"{self.name} came back disabled")
        for place in self._places:
            place.put(made)
        self._made, self._released = made, False
        return f"handed to {', '.join(place.where for place in self._places) or 'nothing else'}"

    def _take_down(self) -> str:
        raise NotImplementedError

    def _make(self) -> Any:
        return self._class(group=self._owner.cpu_group, device=self._owner.device)

    def _meet(self, step: str, problem: str | None) -> None:
        """Wait for all ranks; raise where one has a problem, or where there is no way to meet."""
        if self.votes is None:
            raise RuntimeError(f"{self.name}: no way to meet the other ranks")
        self.votes.agree(f"{self.name} {step}", problem)


class PyNccl(Communicator):
    """vLLM's own NCCL communicator (``PyNcclCommunicator``), beside that of torch's group."""

    kind = "nccl-communicator"
    attribute = "pynccl_comm"

    @staticmethod
    def alive(communicator: Any) -> bool:
        """Return whether there is an ``ncclComm_t``."""
        return bool(getattr(communicator, "available", False) and not communicator.disabled)

    @property
    def backend(self) -> str:
        """The version of NCCL."""
        return f"nccl-{self._made.nccl_version}"

    def release(self) -> str:
        """Destroy it, or suspend it where that was asked for."""
        if self.mode != "suspended":
            return super().release()
        self._device.synchronize()
        self._made.nccl.ncclCommSuspend(self._made.comm, _NCCL_SUSPEND_MEMORY)
        self._made._suspended = True
        raise LeftAlive("suspended by ncclCommSuspend; its connections stay")

    def rebuild(self, context: Context) -> str:
        """Make it again, or resume it."""
        if self.mode != "suspended":
            return super().rebuild(context)
        self._made.nccl.ncclCommResume(self._made.comm)
        self._made._suspended = False
        raise LeftAlive("resumed by ncclCommResume")

    def _take_down(self) -> str:
        made, destroy = self._made, self._made.nccl.ncclCommDestroy
        device.bounded(lambda: destroy(made.comm), self.seconds, f"destroying {self.name}")
        made.available, made.disabled = False, True
        return f"NCCL {made.nccl_version}, {made.world_size} ranks"

    def _make(self) -> Any:
        # ncclCommInitRank waits for the other ranks without a bound.
        made: list[Any] = []
        make = super()._make
        device.bounded(lambda: made.append(make()), self.seconds, f"making {self.name}")
        return made[0]


class CustomAllreduce(Communicator):
    """vLLM's own all-reduce over CUDA IPC: buffers of this rank that peers map, and theirs mapped here."""

    kind = "custom-allreduce"
    attribute = "ca_comm"

    @staticmethod
    def alive(communicator: Any) -> bool:
        """Return whether it holds its native object, and with it buffers."""
        return bool(getattr(communicator, "_ptr", 0))

    def addresses(self) -> list[int]:
        """Return the addresses of the buffers, by rank: signals first, then data."""
        return [*self._made.meta_ptrs, *self._made.buffer_ptrs] if self.held() else []

    def release(self) -> str:
        """Close it; say that peers' memory stays mapped where only the engine's own call was asked for."""
        detail = super().release()
        if self.mode == "closed-by-engine":
            raise LeftAlive(f"closed by the engine's own close(): {detail}")
        return detail

    def _take_down(self) -> str:
        made = self._made
        self._symmetric = bool(getattr(self._owner.symm_mem_comm, "disabled", True)) is False
        peers = [
            address
            for pointers in (made.meta_ptrs, made.buffer_ptrs)
            for rank, address in enumerate(pointers)
            if rank != made.rank
        ]
        if self.mode == "closed-by-engine":
            made.close()
            return f"{len(peers)} mappings of peers' memory stay open"
        problem: str | None = None
        try:
            device.close_ipc_handles(peers)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        # The owner may free a buffer only when nobody maps it any more.
        self._meet("peers closed", problem)
        made.close()
        if self.alive(made):
            raise StillHeld(f"{self.name} was not closed: disabled is {made.disabled}")
        made.rank_data = None
        return f"{len(peers)} mappings of peers' memory closed, own 2 buffers freed"

    def _make(self) -> Any:
        extra: dict[str, Any] = {}
        # vLLM 0.32 and later have it; False where graphs lie in memory that cannot be shared by IPC.
        if "register_graph_buffers" in inspect.signature(self._class).parameters:
            extra["register_graph_buffers"] = self._registers
        return self._class(
            group=self._owner.cpu_group,
            device=self._owner.device,
            symm_mem_enabled=self._symmetric,
            **extra,
        )

    def __init__(self, name: str, owner: Any, on: Device, mode: str) -> None:
        super().__init__(name, owner, on, mode)
        self._symmetric = False
        self._registers = bool(getattr(self._made, "_capture_registered", True))


class QuickAllReduce(Communicator):
    """vLLM's quantised all-reduce over IPC, which its native object maps and unmaps itself; ROCm only."""

    kind = "quick-allreduce"
    attribute = "qr_comm"

    @staticmethod
    def alive(communicator: Any) -> bool:
        """Return whether it holds its native object."""
        return bool(getattr(communicator, "_ptr", 0))

    def _take_down(self) -> str:
        self._made.close()
        if self.alive(self._made):
            raise StillHeld(f"{self.name} was not closed: disabled is {self._made.disabled}")
        return "closed"


class SymmetricMemory(Communicator):
    """vLLM's all-reduce over torch's symmetric memory: one buffer that every rank maps.

    It keeps its buffer, mapped by all, also where it has disabled itself for want of multicast.
    """

    kind = "symmetric-memory"
    attribute = "symm_mem_comm"

    @staticmethod
    def alive(communicator: Any) -> bool:
        """Return whether it has its buffer."""
        return getattr(communicator, "buffer", None) is not None

    def addresses(self) -> list[int]:
        """Return the address of this rank's buffer."""
        return [int(self._made.buffer.data_ptr())] if self.held() else []

    def _take_down(self) -> str:
        made = self._made
        size = made.buffer.numel() * made.buffer.element_size()
        made.buffer, made.disabled = None, True
        # Torch unmaps it at every rank's own time, and nobody may do so while another rank writes.
        self._meet("dropped", None)
        self._device.give_back()
        return f"buffer of {size} bytes dropped"


KINDS: tuple[type[Communicator], ...] = (CustomAllreduce, QuickAllReduce, SymmetricMemory, PyNccl)
"""In the order of their release: NCCL's last, as torch's groups with it come next."""


def of_coordinator(name: str, coordinator: Any, on: Device, modes: dict[str, str]) -> list[Any]:
    """Return the communicators of a coordinator, in the order of their release.

    What is there and not known is reported as such: it is never passed over.
    """
    owner = coordinator.device_communicator
    found: list[Any] = []
    for family in KINDS:
        resource = f"{name}/{family.kind}"
        made = getattr(owner, family.attribute, None)
        if made is None:
            found.append(Absent(resource, family.kind, "the communicator has none"))
        elif not family.alive(made):
            found.append(Absent(resource, family.kind, "it is disabled and holds nothing"))
        else:
            found.append(family(resource, owner, on, modes.get(family.kind, "")))
    known = {family.attribute for family in KINDS} | STATELESS
    for attribute, value in sorted(vars(owner).items() if owner is not None else ()):
        if attribute.endswith("_comm") and attribute not in known and value is not None:
            resource = f"{name}/{attribute}"
            found.append(Kept(resource, "communicator", f"{type(value).__name__} is not known"))
    return found
