"""The kinds of cross-rank resources that every vLLM engine holds: how each is released and rebuilt.

Every class has ``name``, ``kind``, ``held()``, ``release()`` and ``rebuild(context)``; both of the latter
return a detail for the report and raise where they fail. What cannot be released raises
:class:`Unsupported`.
"""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_hooks import device, mappings
from nvsnap_hooks.holders import Holder, Tombstone, find_holders, find_untracked

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_hooks.rendezvous import Rendezvous


class Unsupported(Exception):  # noqa: N818 - an outcome, not an error
    """The resource is held and cannot be released by these hooks."""


class Deferred(Exception):  # noqa: N818 - an outcome, not an error
    """The engine makes the resource again by itself, at its next use."""


class LeftAlive(Exception):  # noqa: N818 - an outcome, not an error
    """The resource stays alive because an option asks for it."""


class StillHeld(Exception):  # noqa: N818 - a failed release
    """Something kept the resource alive after its release."""


@dataclass
class Context:
    """What a rebuild needs: the fresh store, votes, and the bound of each step in seconds."""

    store: Any
    rendezvous: Rendezvous
    rank: int
    size: int
    seconds: float


class Absent:
    """A resource that this rank does not have."""

    def __init__(self, name: str, kind: str, why: str) -> None:
        self.name, self.kind, self.why = name, kind, why

    def held(self) -> bool:
        """Return False."""
        return False

    def release(self) -> str:
        """Say why there is nothing."""
        return self.why

    def rebuild(self, _context: Context) -> str:
        """Say why there is nothing."""
        return self.why


class Kept(Absent):
    """A resource that is held and stays: releasing it is not supported, for the reason given."""

    def held(self) -> bool:
        """Return True."""
        return True

    def release(self) -> str:
        """Refuse."""
        raise Unsupported(self.why)

    def rebuild(self, _context: Context) -> str:
        """Refuse: it was not released."""
        raise Unsupported("was not released")


class Left(Absent):
    """A resource that could be released and stays, because an option asks for it."""

    def held(self) -> bool:
        """Return True."""
        return True

    def release(self) -> str:
        """Leave it."""
        raise LeftAlive(self.why)

    def rebuild(self, _context: Context) -> str:
        """Leave it."""
        raise LeftAlive(self.why)


@dataclass
class Group:
    """A torch.distributed process group, ``None`` once released.

    ``members`` holds the ranks of every group that was made together with it, since making one is a call
    that all ranks of the world take part in.
    """

    name: str
    group: Any
    members: list[list[int]]
    aliases: tuple[str, ...] = ()
    kind: str = "process-group"
    backend: str = ""
    description: str = "undefined"
    timeout: timedelta | None = None
    holders: list[Holder] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    seconds: float = 20.0

    def __post_init__(self) -> None:
        self.read()

    def read(self) -> None:
        """Note what is needed to make the group again."""
        from torch.distributed import distributed_c10d as c10d

        self.backend = c10d._world.pg_map[self.group][0]
        self.description = self.group.group_desc
        # Gloo and NCCL keep it in the options of the backend of their device.
        backend = self.group._get_backend(self.group._device_types[0])
        self.timeout = getattr(getattr(backend, "options", None), "_timeout", None)

    def held(self) -> bool:
        """Return whether the group is there."""
        return self.group is not None

    def release(self) -> str:
        """Destroy the group, put tombstones where it was held, and see that it is really gone."""
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(self.group)
        made = self._communicator()
        watch = weakref.ref(self.group)
        self._destroy(lambda: dist.destroy_process_group(self.group))
        self._bury(watch)
        return f"ranks {ranks}{made}, held by {self._places()}" + self._known_as()

    def _destroy(self, destroy: Callable[[], None]) -> None:
        """Destroy; bounded where NCCL is in it, for it never returns while a graph holds a collective."""
        if "nccl" in self.backend:
            device.bounded(destroy, self.seconds, f"destroying {self.name}")
        else:
            destroy()

    def _communicator(self) -> str:
        """Say whether torch had made the group's NCCL communicator, which it does at its first use."""
        if "nccl" not in self.backend:
            return ""
        backend = self.group._get_backend(self.group._device_types[0])
        initialized = getattr(backend, "_is_initialized", None)
        if initialized is None:
            return ", NCCL communicator unknown"
        return f", NCCL communicator {'made' if initialized() else 'not made yet'}"

    def _bury(self, watch: weakref.ref[Any]) -> None:
        for holder in self.holders:
            holder.put(Tombstone(self.name))
        self.group = None
        if watch() is not None:
            gc.collect()
        if (alive := watch()) is not None:
            hidden = self.hidden_holders(alive)
            del alive
            for holder in hidden:
                holder.put(Tombstone(self.name))
            self.holders = [*self.holders, *hidden]
        if watch() is not None:
            raise StillHeld(f"{self.name} is still held by {self.stuck or 'something unknown'}")

    def hidden_holders(self, group: Any) -> list[Holder]:
        """Return the holders that the collector does not track; slow, so only where the group is alive."""
        return find_untracked(group)

    def rebuild(self, context: Context) -> str:
        """Make the group again, with connections bounded by the context, and hand it to every holder."""
        import torch.distributed as dist

        bound = timedelta(seconds=context.seconds)
        for ranks in self.members:
            made = dist.new_group(ranks, timeout=bound, backend=self.backend, group_desc=self.description)
            if context.rank in ranks:
                self.group = made
        self._hand_out()
        return f"handed to {self._places()}" + self._known_as()

    def _hand_out(self) -> None:
        for holder in self.holders:
            holder.put(self.group)

    def bound(self, seconds: float) -> None:
        """Let no collective over the group take longer than ``seconds``."""
        from torch.distributed import distributed_c10d as c10d

        self.seconds = seconds
        c10d._set_pg_timeout(timedelta(seconds=seconds), self.group)

    def settle(self) -> None:
        """Give the rebuilt group the timeout that the engine had given it, in place of the short bound."""
        from torch.distributed import distributed_c10d as c10d

        if self.timeout is not None:
            c10d._set_pg_timeout(self.timeout, self.group)

    def _places(self) -> str:
        return ", ".join(holder.where for holder in self.holders) or "nothing else"

    def _known_as(self) -> str:
        return f"; also known as {', '.join(self.aliases)}" if self.aliases else ""


class DefaultGroup(Group):
    """The default group of torch.distributed; released last, rebuilt first."""

    def release(self) -> str:
        """Destroy it and with it all of torch.distributed's state."""
        import torch.distributed as dist

        watch = weakref.ref(self.group)
        size, made = self.group.size(), self._communicator()
        self._destroy(dist.destroy_process_group)
        self._bury(watch)
        return f"world of {size}{made}, held by {self._places()}"

    def rebuild(self, context: Context) -> str:
        """Start torch.distributed again over the fresh store."""
        import sys

        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        hook = sys.excepthook
        try:
            dist.init_process_group(
                backend=self.backend,
                store=dist.PrefixStore("default_pg", context.store),
                rank=context.rank,
                world_size=context.size,
                timeout=timedelta(seconds=context.seconds),
            )
        finally:
            # init_process_group wraps the hook each time; cycles must not pile wrappers up.
            sys.excepthook = hook
        self.group = c10d._get_default_group()
        self._hand_out()
        return f"world of {context.size}"


class SharedMemory:
    """vLLM's ``_CPUSHMDistributed``: one segment for each rank of a group, mapped by all of them."""

    kind = "shared-memory-communicator"

    def __init__(self, name: str, communicator: Any) -> None:
        self.name = name
        self._communicator = communicator
        self._class = type(communicator.dist_module)
        self._released = False

    def held(self) -> bool:
        """Return whether the communicator is there."""
        return not self._released

    def release(self) -> str:
        """Unmap every segment and remove this rank's; the engine itself has no call for that."""
        module = self._communicator.dist_module
        prefix = f"/dev/shm/{module.group_name}_"  # noqa: S108 - the name that the engine gave it
        self._communicator.dist_module = Tombstone(self.name)
        self._released = True
        segments = [m for m in mappings.shared_memory() if m.path.startswith(prefix)]
        for segment in segments:
            mappings.release(segment)
        mappings.unlink(f"{prefix}{self._communicator.rank}")
        left = [m.path for m in mappings.shared_memory() if m.path.startswith(prefix)]
        if left or not segments:
            raise StillHeld(f"{self.name}: mapped {len(segments)} segments, still mapped: {left}")
        return f"{len(segments)} segments, {sum(s.size for s in segments)} bytes"

    def rebuild(self, context: Context) -> str:
        """Make a new communicator under a fresh name: segments are created exclusively."""
        os.environ["VLLM_DIST_IDENT"] = Path(context.store.path).name
        self._communicator.dist_module = self._class(self._communicator)
        self._released = False
        return str(self._communicator.dist_module.group_name)


class Broadcaster:
    """The message queue of a coordinator (``mq_broadcaster``): a ring in shared memory and ZeroMQ sockets."""

    kind = "message-queue"

    def __init__(self, name: str, coordinator: Any) -> None:
        self.name = name
        self._coordinator = coordinator
        self._released = False

    def held(self) -> bool:
        """Return whether the queue is there."""
        return not self._released

    def release(self) -> str:
        """Drop the queue: its finalizer closes the sockets, its ring unmaps and unlinks itself."""
        queue = self._coordinator.mq_broadcaster
        ((places, stuck),) = find_holders([queue])
        watch = weakref.ref(queue)
        path = f"/dev/shm/{queue.handle.buffer_handle[3]}"  # noqa: S108 - where the engine put it
        addresses = (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr)
        del queue
        for place in places:
            place.put(Tombstone(self.name))
        self._released = True
        if watch() is not None:
            gc.collect()
        if watch() is not None or any(m.path == path for m in mappings.shared_memory()):
            raise StillHeld(f"{self.name} is still held by {stuck or 'something unknown'}")
        for address in addresses:
            # ZeroMQ leaves the files of its sockets behind; cycles must not pile them up.
            mappings.unlink(address.removeprefix("ipc://"))
        return f"held by {', '.join(place.where for place in places)}"

    def rebuild(self, context: Context) -> str:
        """Make the queue again; the handshake between writer and readers is bounded."""
        queue = self._coordinator.create_mq_broadcaster(blocking=False)
        # The handshake reads without a bound, so all must have come this far, and the sockets get one.
        context.rendezvous.agree(f"{self.name} made", None)
        queue.local_socket.rcvtimeo = int(context.seconds * 1000)
        queue.wait_until_ready()
        queue.local_socket.rcvtimeo = -1
        self._coordinator.mq_broadcaster = queue
        self._released = False
        return "writer" if queue._is_writer else "reader"
