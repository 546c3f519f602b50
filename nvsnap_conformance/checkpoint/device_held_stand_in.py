"""What a process holds on the stand-in driver's device: files, which the driver moves away and back.

``PID.memory`` is plain memory, ``PID.extra`` whatever else a process can hold on its own, and ``PID.mapped``
is there while it has memory of a peer mapped, which the stand-in refuses to checkpoint.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_BYTES = 4096

UNSHARED = "unshared"
"""While ``PID.unshared`` is there, the process can share no memory."""


class StandIn:
    """Memory and something else beside it; a peer's memory while it is mapped."""

    def __init__(self, channel: socket.socket | None) -> None:
        self._folder = Path(os.environ["NVSNAP_STAND_IN_DRIVER"])
        self._channel = channel
        self._content = {name: os.urandom(_BYTES) for name in ("memory", "extra")}
        for name, content in self._content.items():
            self._file(name).write_bytes(content)
        self._peer: tuple[int, bytes] | None = None
        self._file("state").write_text("CU_PROCESS_STATE_RUNNING")

    def _file(self, name: str, pid: int | None = None) -> Path:
        return self._folder / f"{pid or os.getpid()}.{name}"

    def look(self) -> str:
        """Return ``right``, or what is gone or wrong."""
        wanted = [(self._file(name), content) for name, content in self._content.items()]
        if self._peer is not None:
            wanted.append((self._file("memory", self._peer[0]), self._peer[1]))
        for file, content in wanted:
            try:
                if file.read_bytes() != content:
                    return f"wrong: {file.name}"
            except FileNotFoundError:
                return f"gone: {file.name}"
        return "right"

    def share(self) -> None:
        """Send the peer what names this process's memory."""
        assert self._channel is not None  # the kinds that share are started with one
        if self._file(UNSHARED).exists():
            raise OSError("the stand-in shares no memory of this process any more")
        self._channel.send(os.getpid().to_bytes(4, "little") + self._content["memory"])

    def renew(self) -> None:
        """Write the memory anew."""
        self._file("memory").write_bytes(self._content["memory"])

    def take(self) -> None:
        """Map the peer's memory."""
        assert self._channel is not None  # as above
        message = self._channel.recv(2 * _BYTES)
        self._peer = int.from_bytes(message[:4], "little"), message[4:]
        self._file("mapped").write_text(str(self._peer[0]))

    def drop(self) -> None:
        """Close it."""
        self._peer = None
        self._file("mapped").unlink()

    def where(self) -> str:
        """Return the UUID and the bus id of the device that the process is on."""
        uuids: list[str] = json.loads(self._file("devices").read_text())
        return f"{uuids[0]} {self._file('bus').read_text()}"
