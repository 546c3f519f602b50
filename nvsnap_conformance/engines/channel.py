"""JSON messages, one a line, over a stream socket between the suite and its supervisors.

Standard library only: both ends use it.
"""

from __future__ import annotations

import json
import select
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket


class Channel:
    """One end of the connection. ``closed`` turns true once the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""
        self.closed = False

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send one message; a peer that is gone is noted in ``closed``."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def receive(self, timeout: float | None) -> dict[str, Any] | None:
        """Return the next message; ``None`` after ``timeout`` seconds or at the end of the stream."""
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if self.closed:
                return None
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            left = None if end is None else max(0.0, end - time.monotonic()) * 1000
            if not poller.poll(left):
                return None
            try:
                data = self._socket.recv(65536)
            except ConnectionResetError:
                data = b""
            self.closed = not data
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._socket.close()
