"""A creator holds its state lock while it waits for a team; the team's members ask it for the handle first.

The endpoint of the creator needs the same lock to answer, so the members wait for the endpoint, the
endpoint for the lock, and the lock's holder for the members. Names follow the interposed CUDA memory where
this was seen: an export request against a multicast team operation.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

state_lock = threading.Lock()


def main(context: Any) -> None:
    """Form the team of all ranks; with ``hold`` the creator keeps its lock across the team operation."""
    context.join()
    path = Path(context.folder) / "endpoint"
    if context.rank == 0:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(context.world)
        endpoint = threading.Thread(target=serve, args=(listener,), name="endpoint", daemon=True)
        endpoint.start()
        dist.barrier()
        held = state_lock if context.options.get("hold") else nullcontext()
        with held:
            # From here on, with the lock held, no request can be answered: only now may they come.
            store().set("creator is in", "yes")
            context.tell("entered")
            multicast_add_device()
    else:
        dist.barrier()
        store().wait(["creator is in"])
        context.tell("entered")
        request_export(path)
        multicast_add_device()
    context.tell("done")


def store() -> Any:
    """Return the key-value store that the ranks met in."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way


def multicast_add_device() -> None:
    """Add the own device to the team: waits for every member, as the driver's operation does."""
    dist.barrier()


def request_export(path: Path) -> bytes:
    """Ask the creator's endpoint for the handle."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        return client.recv(16)


def serve(listener: socket.socket) -> None:
    """Answer export requests, one after the other."""
    while True:
        connection, _ = listener.accept()
        with connection:
            serve_export(connection)


def serve_export(connection: socket.socket) -> None:
    """Answer one request under the state lock."""
    with state_lock:
        connection.sendall(os.urandom(16))
