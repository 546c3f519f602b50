"""The process that runs a helper program (a sampler, a checkpointer) inside an engine's namespaces.

Standard library only: it runs as ``python -I -S`` in a session of its own, enters the namespaces, forks
the program and ends with it. It holds a pidfd of the suite's process and a stream that ends with it, and
kills the program at either's end.

It is a subreaper, and kills what the program leaves. In a pid namespace of the engine's, though, orphans go
to the engine's init: there the suite finds them by their environment, and init's end takes them in any case.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from nvsnap_conformance.engines import linux
from nvsnap_conformance.engines.channel import Channel


def _exec(spec: dict[str, Any], parent: int, failure: int) -> NoReturn:
    try:
        os.setsid()
        linux.set_parent_death_signal(signal.SIGKILL)
        if linux.pidfd_ended(parent):
            os._exit(1)
        os.chdir(spec["cwd"])
        for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606 - no shell is wanted
    except (OSError, ValueError) as error:  # ValueError: a NUL in the environment
        os.write(failure, str(error).encode())
    os._exit(127)


def _run(spec: dict[str, Any], channel: Channel, suite: int, target: int) -> None:
    if spec["namespaces"]:
        try:
            linux.setns(target, spec["namespaces"])
        except OSError as error:
            channel.send(event="error", stage="enter", message=str(error))
            return
    linux.become_subreaper()
    own = os.pidfd_open(os.getpid())
    failure_read, failure_write = os.pipe()
    program = os.fork()
    if program == 0:
        _exec(spec, own, failure_write)
    os.close(failure_write)
    ended = os.pidfd_open(program)
    poller = select.poll()
    for fd in (suite, channel.fileno(), ended):
        poller.register(fd, select.POLLIN)
    poller.poll()
    linux.kill_pidfd(ended)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    linux.kill_descendants()
    message = os.read(failure_read, 4096).decode(errors="replace")
    if message:
        channel.send(event="error", stage="exec", message=message)
    else:
        channel.send(event="exit", status=status)


def main() -> None:
    """Run with the descriptors of channel, the suite's pidfd and the target's pidfd as arguments."""
    control, suite, target = (int(word) for word in sys.argv[-3:])
    for fd in (control, suite, target):
        os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=control))
    poller = select.poll()
    for fd in (control, suite):
        poller.register(fd, select.POLLIN)
    poller.poll()
    spec = None if linux.pidfd_ended(suite) else channel.receive(None)
    if spec is not None:
        _run(spec, channel, suite, target)
