"""All ranks wait for an answer from outside of the engine: an agent, a store, a licence server."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

_PR_SET_PDEATHSIG = 1


def main(context: Any) -> None:
    """Ask an agent, then meet; with ``silent`` in the options the agent takes requests and never answers."""
    path = Path(context.folder) / "agent"
    if context.rank == 0:
        start_agent(path, silent=bool(context.options.get("silent")))
    context.join()
    dist.barrier()
    context.tell("entered")
    ask(path)
    dist.barrier()
    context.tell("done")


def ask(path: Path) -> bytes:
    """Send a request to the agent and wait for its answer."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"may I?\n")
        return client.recv(16)


def start_agent(path: Path, *, silent: bool) -> None:
    """Start the agent: a process that is no rank, and that ends with the one that started it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    if os.fork():
        listener.close()
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connections = []
    while True:
        connection, _ = listener.accept()
        connections.append(connection)
        if not silent:
            connection.sendall(b"yes\n")
