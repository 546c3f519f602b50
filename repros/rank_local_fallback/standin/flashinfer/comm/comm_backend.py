"""The adapter over torch.distributed through which workspaces are exchanged."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class TorchDistBackend:
    """Object collectives over one process group."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def Get_rank(self) -> int:  # noqa: N802 - FlashInfer's name
        """Return the own rank in the group."""
        return int(dist.get_rank(self._group))

    def Get_size(self) -> int:  # noqa: N802 - as above
        """Return the size of the group."""
        return int(dist.get_world_size(self._group))

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """Gather one object of every rank."""
        gathered: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(gathered, data, group=self._group)
        return tuple(gathered)

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self._group)
