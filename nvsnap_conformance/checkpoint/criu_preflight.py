"""What would make a dump or a restore fail, found and named before CRIU is asked."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.checkpoint.criu_failure import CriuFailure, Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from nvsnap_conformance.engines.process import EngineProcess
    from nvsnap_conformance.processes import ProcessId

# net/tcp_states.h
_ESTABLISHED = 0x01
_LISTEN = 0x0A


@dataclass(frozen=True)
class Connection:
    """An established TCP connection of the engine's whose other end is not the engine's.

    ``incoming`` when it came to a port that the engine listens on: somebody's request.
    """

    local: str
    remote: str
    incoming: bool


@dataclass(frozen=True)
class _Socket:
    local: tuple[str, int]
    remote: tuple[str, int]
    state: int
    inode: int


def outside_connections(process: EngineProcess) -> list[Connection]:
    """Return the engine's established TCP connections to anybody else.

    An isolated engine has only a loopback, so anybody else is a program in its network namespace.
    """
    owned = _owned(process)
    sockets = list(_sockets(process))
    listening = {sock.local[1] for sock in sockets if sock.state == _LISTEN and sock.inode in owned}
    established = [sock for sock in sockets if sock.state == _ESTABLISHED]
    ends = {(sock.local, sock.remote): sock.inode for sock in established}
    return [
        Connection(_text(sock.local), _text(sock.remote), sock.local[1] in listening)
        for sock in established
        if sock.inode in owned and ends.get((sock.remote, sock.local)) not in owned
    ]


def check_before_dump(process: EngineProcess, *, clients: bool) -> list[Connection]:
    """Name what CRIU would refuse; return the client connections that will be part of the image.

    ``clients`` allows these: requests that span dump and restore in the same namespaces. Raises
    :class:`CriuFailure` for io_uring rings, connections to others, and clients that are not allowed.
    """
    for member in process.tree():
        rings = [fd for fd, target in _descriptors(member) if target == "anon_inode:[io_uring]"]
        if rings:
            raise CriuFailure(
                Kind.IO_URING,
                f"process {member.pid} ({_name(member)}) holds an io_uring ring as descriptor {rings[0]}, "
                "which CRIU cannot dump",
                next_step="start the engine isolated (then the suite refuses io_uring_setup), or set the "
                "sysctl kernel.io_uring_disabled=2 before it starts",
                engine_runs=True,
            )
    connections = outside_connections(process)
    own = [connection for connection in connections if not connection.incoming]
    if own:
        raise CriuFailure(
            Kind.EXTERNAL_TCP,
            "the engine has an open TCP connection to a program outside of it: "
            + ", ".join(f"{connection.local} -> {connection.remote}" for connection in own),
            cause="a metrics sink, a model hub's keep-alive, or a peer of another node",
            next_step="close it before the dump (prepare), or take it out of the engine's settings",
            engine_runs=True,
        )
    if connections and not clients:
        raise CriuFailure(
            Kind.CLIENTS,
            "clients are connected: " + ", ".join(connection.remote for connection in connections),
            next_step="let requests finish and close idle connections before the dump",
            engine_runs=True,
        )
    return connections


def listening_ports(process: EngineProcess) -> list[int]:
    """Return the TCP ports that are listened on in the engine's network namespace, by whomever."""
    return sorted({sock.local[1] for sock in _sockets(process) if sock.state == _LISTEN})


def own_ports(process: EngineProcess) -> list[int]:
    """Return the TCP ports that the engine itself listens on."""
    owned = _owned(process)
    return sorted(
        {sock.local[1] for sock in _sockets(process) if sock.state == _LISTEN and sock.inode in owned}
    )


def check_before_restore(process: EngineProcess, pids: Collection[int], ports: Collection[int]) -> None:
    """Name what stands in a restore's way: :class:`CriuFailure` for a pid or a port that is taken.

    ``pids`` are the process, thread and session ids of the image as the engine sees them.
    """
    for pid, inside in _namespace_pids(process):
        if inside in pids:
            raise CriuFailure(
                Kind.PID_TAKEN,
                f"pid {inside} of the image is taken in the engine's pid namespace "
                f"by process {pid} ({_name_of(pid)})",
                next_step="end that process, or restore into new namespaces",
            )
    taken = sorted(set(ports) & set(listening_ports(process)))
    if taken:
        raise CriuFailure(
            Kind.PORT_TAKEN,
            f"TCP port {taken[0]}, which the image listens on, is taken in the engine's network namespace",
            next_step="end the program that listens there, or restore into new namespaces",
        )


def _namespace_pids(process: EngineProcess) -> Iterator[tuple[int, int]]:
    """Yield the pid and each id (pid, thread, session, group) in the engine's pid namespace."""
    wanted = os.stat(process.inside_mounts(Path("/proc/1/ns/pid"))).st_ino  # noqa: PTH116 - follows the link
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(entry / "ns/pid").st_ino != wanted:  # noqa: PTH116 - as above
                continue
            for thread in (entry / "task").iterdir():
                for line in (thread / "status").read_text(errors="replace").splitlines():
                    if line.startswith(("NSpid:", "NSsid:", "NSpgid:")):
                        yield int(entry.name), int(line.split()[-1])


def _descriptors(member: ProcessId) -> Iterator[tuple[int, str]]:
    with suppress(FileNotFoundError, ProcessLookupError):
        for fd in os.listdir(f"/proc/{member.pid}/fd"):  # noqa: PTH208 - names only
            with suppress(FileNotFoundError, ProcessLookupError):
                yield int(fd), os.readlink(f"/proc/{member.pid}/fd/{fd}")  # noqa: PTH115 - no path of a file


def _owned(process: EngineProcess) -> set[int]:
    """Return the inodes of the engine's sockets."""
    return {inode for member in process.tree() for inode in _inodes(member)}


def _inodes(member: ProcessId) -> Iterator[int]:
    for _, target in _descriptors(member):
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _sockets(process: EngineProcess) -> Iterator[_Socket]:
    for name in ("tcp", "tcp6"):
        # Of init's network namespace, whoever reads it.
        table = process.inside_mounts(Path(f"/proc/1/net/{name}"))
        for line in table.read_text().splitlines()[1:]:
            words = line.split()
            yield _Socket(_endpoint(words[1]), _endpoint(words[2]), int(words[3], 16), int(words[9]))


def _endpoint(text: str) -> tuple[str, int]:
    """Read ``0100007F:1F40`` (proc_pid_net(5)): the address in 32-bit words of the host's order."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    if len(raw) == 4:
        return str(IPv4Address(raw)), int(port, 16)
    address = IPv6Address(raw)
    # An IPv4 peer of an IPv6 socket: its own end is in the other table under the plain address.
    return str(address.ipv4_mapped or address), int(port, 16)


def _text(endpoint: tuple[str, int]) -> str:
    address, port = endpoint
    return f"[{address}]:{port}" if socket.has_ipv6 and ":" in address else f"{address}:{port}"


def _name(member: ProcessId) -> str:
    return _name_of(member.pid)


def _name_of(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "gone"
