"""Process identity: a pid alone is never enough, since pids are reused."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, order=True)
class ProcessId:
    """A process by pid (in the suite's own pid namespace) and create time (seconds since the epoch)."""

    pid: int
    create_time: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of the process that has ``pid`` now, ``None`` where there is none."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None

    def process(self) -> psutil.Process | None:
        """Return the live process with this identity, ``None`` once it is gone."""
        try:
            process = psutil.Process(self.pid)
            return process if process.create_time() == self.create_time else None
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        """Whether the process exists and is no zombie."""
        process = self.process()
        try:
            return process is not None and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def send(self, signum: signal.Signals) -> bool:
        """Send ``signum`` if this very process still exists; return whether it was sent.

        The pid is pinned with a pidfd before its create time is checked, so a reused pid is never hit.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if self.process() is None:
                return False
            signal.pidfd_send_signal(fd, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def tree(root: ProcessId) -> list[ProcessId]:
    """Return ``root`` and its living descendants, parents before children."""
    process = root.process()
    if process is None:
        return []
    found = [root]
    try:
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            found.append(ProcessId(child.pid, child.create_time()))
        except psutil.NoSuchProcess:
            continue
    return found
