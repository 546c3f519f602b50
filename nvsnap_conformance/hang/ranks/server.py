"""Forks ranks for whoever started it. Runs in an engine's interpreter: standard library and torch only.

Started as ``python server.py SETTINGS`` with ``{"paths": [..], "preload": [MODULE or MODULE:CALL..]}``;
reads one JSON command per line on standard input and writes one JSON event per line on standard output.

When standard input closes, every rank is killed and the server ends; when the server dies, the kernel kills
the ranks. A server that is stopped is continued by the kernel when its parent dies, so that it ends too.
With the right to, the server has a mount namespace and a /dev/shm of its own, so that shared memory of a
killed rank goes with it.

Commands: ``{"run": {"script", "function", "world", "options", "paths", "environment", "counters"}}``,
``{"release": GATE, "ranks": [..]}``, ``{"end": true}``.
Events: ``ready``, ``started`` (pids), ``told`` (rank, name, value, at), ``exit`` (rank, status), ``ended``,
``error``. ``at`` is the monotonic clock in seconds.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import select
import shutil
import signal
import sys
import time
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | (1 << 18)


class Context:
    """What a rank's function is given."""

    def __init__(self, rank: int, request: dict[str, Any], up: int, down: int) -> None:
        self.rank = rank
        self.world = int(request["world"])
        self.options: dict[str, Any] = request["options"]
        self.folder: str = request["folder"]
        self._up = up
        self._down = down
        self._buffer = b""
        self._open: set[str] = set()
        with open(request["counters"], "r+b") as file:  # noqa: PTH123
            self._counters = mmap.mmap(file.fileno(), 0)

    def tell(self, name: str, value: Any = None) -> None:
        """Tell the one who started the ranks; what is told carries the time."""
        line = json.dumps({"name": name, "value": value, "at": time.monotonic()})
        os.write(self._up, line.encode() + b"\n")

    def gate(self, name: str) -> None:
        """Wait until gate ``name`` is released for this rank."""
        while name not in self._open:
            block = os.read(self._down, 4096)
            if not block:
                os._exit(0)
            *lines, self._buffer = (self._buffer + block).split(b"\n")
            self._open.update(line.decode() for line in lines)

    def is_open(self, name: str) -> bool:
        """Tell whether gate ``name`` has been released, without waiting."""
        if name not in self._open and select.select([self._down], [], [], 0)[0]:
            *lines, self._buffer = (self._buffer + os.read(self._down, 4096)).split(b"\n")
            self._open.update(line.decode() for line in lines)
        return name in self._open

    def step(self) -> None:
        """Count one step of progress: readable from outside without asking this process."""
        offset = 8 * self.rank
        count = int.from_bytes(self._counters[offset : offset + 8], "little") + 1
        self._counters[offset : offset + 8] = count.to_bytes(8, "little")

    def join(self, name: str = "world") -> None:
        """Set up torch.distributed over gloo on the loopback, for all ranks."""
        import torch.distributed as dist  # noqa: PLC0415 - what the clients of this file lack

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/store-{name}", rank=self.rank, world_size=self.world
        )


class Child:
    """One rank as the server sees it."""

    def __init__(self, rank: int, pid: int, up: int, down: int) -> None:
        self.rank = rank
        self.pid = pid
        self.up = up
        self.down = down
        self.buffer = b""


def say(event: str, **values: Any) -> None:
    """Write one event."""
    os.write(1, json.dumps({"event": event, **values}).encode() + b"\n")


def start(request: dict[str, Any]) -> list[Child]:
    """Fork the ranks of one run."""
    children: list[Child] = []
    parent = os.getpid()
    for rank in range(int(request["world"])):
        up_read, up_write = os.pipe()
        down_read, down_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(125)
                for other in children:
                    os.close(other.up)
                    os.close(other.down)
                os.close(up_read)
                os.close(down_write)
                be_rank(Context(rank, request, up_write, down_read), request)
                os._exit(0)
            except BaseException:  # noqa: BLE001 - a rank ends here, whatever it met
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(up_write)
        os.close(down_read)
        children.append(Child(rank, pid, up_read, down_write))
    return children


def be_rank(context: Context, request: dict[str, Any]) -> None:
    """Load the script and call its function, in a forked rank."""
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(2, 1)  # what a rank prints must not mix with the events
    os.environ.update(request["environment"])
    sys.path[:0] = request["paths"]
    specification = importlib.util.spec_from_file_location("nvsnap_rank_script", request["script"])
    if specification is None or specification.loader is None:
        raise ImportError(f"cannot load {request['script']}")
    module = importlib.util.module_from_spec(specification)
    sys.modules["nvsnap_rank_script"] = module
    specification.loader.exec_module(module)
    getattr(module, request["function"])(context)


def isolate() -> bool:
    """Take a mount namespace with an own /dev/shm; return whether the rights sufficed."""
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return False
    private = int(libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))
    return private == 0 and int(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)) == 0


def load(name: str) -> None:
    """Import ``module``, or import it and call what ``module:attribute.attribute`` names."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in path.split(".") if path else ():
        found = getattr(found, attribute)
    if path:
        found()


def forward(child: Child) -> bool:
    """Pass on what a rank told; return whether its pipe is still open."""
    block = os.read(child.up, 1 << 16)
    *lines, child.buffer = (child.buffer + block).split(b"\n")
    for line in lines:
        told = json.loads(line)
        say("told", rank=child.rank, **told)
    return bool(block)


def end(children: list[Child]) -> None:
    """Kill and reap all ranks."""
    for child in children:
        if child.pid:
            os.kill(child.pid, signal.SIGKILL)
    for child in children:
        if child.pid:
            os.waitpid(child.pid, 0)
        os.close(child.up)
        os.close(child.down)


def reap(children: list[Child]) -> None:
    """Report the ranks that have ended by themselves."""
    for child in children:
        if child.pid:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.pid = 0
                say("exit", rank=child.rank, status=os.waitstatus_to_exitcode(status))


def main() -> None:
    """Serve until standard input closes; the folder of this server goes with it, however far it came."""
    settings = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    # Held open: the path may be covered by the mounts of this process.
    above = os.open(os.path.dirname(settings["folder"]), os.O_PATH | os.O_DIRECTORY)  # noqa: PTH120
    try:
        serve(settings)
    finally:
        shutil.rmtree(os.path.basename(settings["folder"]), ignore_errors=True, dir_fd=above)  # noqa: PTH119


def serve(settings: dict[str, Any]) -> None:
    """Load what the ranks share, then take commands until standard input closes."""
    isolated = isolate()
    import torch  # noqa: PLC0415 - this process alone has it, loaded once for every rank
    import torch.distributed  # noqa: PLC0415

    torch.set_num_threads(1)
    sys.path[:0] = settings["paths"]
    for name in settings["preload"]:
        load(name)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: list[Child] = []
    open_pipes: dict[int, Child] = {}
    commands = b""
    say("ready", torch=torch.__version__, pid=os.getpid(), isolated=isolated)
    try:
        while True:
            readable, _, _ = select.select([0, wake_read, *open_pipes], [], [])
            for descriptor in readable:
                if descriptor in open_pipes and not forward(open_pipes[descriptor]):
                    del open_pipes[descriptor]
            if wake_read in readable:
                os.read(wake_read, 4096)
                reap(children)
            if 0 not in readable:
                continue
            block = os.read(0, 1 << 16)
            if not block:
                return
            *lines, commands = (commands + block).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if "run" in command:
                    children = start(command["run"])
                    open_pipes = {child.up: child for child in children}
                    say("started", pids=[child.pid for child in children])
                elif "release" in command:
                    for child in children:
                        if child.pid and child.rank in command["ranks"]:
                            os.write(child.down, command["release"].encode() + b"\n")
                elif "end" in command:
                    end(children)
                    children, open_pipes = [], {}
                    say("ended")
    finally:
        end(children)


if __name__ == "__main__":
    main()
