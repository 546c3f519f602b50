"""The few Linux calls that the standard library of Python 3.11 does not offer.

Standard library only: the supervisor and the helper inside an engine's namespaces run with nothing else.
Every function raises :class:`OSError` with the kernel's errno.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import time
from pathlib import Path

# linux/sched.h; ``os`` has these names from Python 3.12 on only.
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

NAMESPACES = {"pid": CLONE_NEWPID, "mount": CLONE_NEWNS, "network": CLONE_NEWNET, "ipc": CLONE_NEWIPC}
"""The namespaces of an isolated engine, by the name used in ``EngineProcess.isolation``."""

# linux/mount.h
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36

# linux/seccomp.h, linux/filter.h, asm-generic/unistd.h: io_uring_setup has this number on x86-64 and arm64.
_SECCOMP_MODE_FILTER = 2
_SECCOMP_RET_ERRNO = 0x00050000
_SECCOMP_RET_ALLOW = 0x7FFF0000
_BPF_LOAD_WORD = 0x20
_BPF_JUMP_EQUAL = 0x15
_BPF_RETURN = 0x06
_IO_URING_SETUP = 425

# linux/sockios.h, linux/if.h
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces (for ``CLONE_NEWPID``: its next children)."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flags: int) -> None:
    """Move the calling thread into the namespaces ``flags`` of ``fd``: a namespace's file, or a pidfd.

    A pidfd needs Linux 5.8 (setns(2)).
    """
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Attach a file system or, with ``MS_BIND``, a folder."""
    result = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {target}")


def set_parent_death_signal(signum: int) -> None:
    """Ask the kernel to send ``signum`` to this process when the *thread* that forked it ends.

    A parent that is dead already sends nothing: look at it (a pidfd) after this call.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def become_subreaper() -> None:
    """Make orphaned descendants children of this process."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def io_uring_offered() -> bool:
    """Whether this process may make io_uring rings: no sysctl and no seccomp filter forbids it."""
    result = _libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(0), None)
    return result >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM, errno.EACCES)


def refuse_io_uring() -> None:
    """Let io_uring_setup fail with ENOSYS in this process and its descendants, whoever calls it.

    For a program that has to be dumped: CRIU 4.2 knows no io_uring ring. A seccomp filter also meets what
    makes the system call by itself (uvloop and torch carry libuv of their own). Needs CAP_SYS_ADMIN.
    """
    filters = (
        struct.pack("=HBBI", _BPF_LOAD_WORD, 0, 0, 0),  # the system call's number
        struct.pack("=HBBI", _BPF_JUMP_EQUAL, 0, 1, _IO_URING_SETUP),
        struct.pack("=HBBI", _BPF_RETURN, 0, 0, _SECCOMP_RET_ERRNO | errno.ENOSYS),
        struct.pack("=HBBI", _BPF_RETURN, 0, 0, _SECCOMP_RET_ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(filters))
    program = struct.pack("@HP", len(filters), ctypes.addressof(code))  # struct sock_fprog
    _check(
        _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), program, 0, 0),
        "prctl(PR_SET_SECCOMP)",
    )


def bring_loopback_up() -> None:
    """Set the interface ``lo`` of the calling thread's network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)  # struct ifreq: name, flags
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def pidfd_ended(fd: int) -> bool:
    """Whether the process behind a pidfd has ended."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def kill_pidfd(fd: int) -> None:
    """SIGKILL the process behind a pidfd; one that is gone already is no error."""
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_descendants() -> None:
    """SIGKILL and reap everything that descends from this process, a subreaper, until nothing does."""
    while True:
        table = parents()
        family = {os.getpid()}
        grown = True
        while grown:
            found = {pid for pid, (parent, _) in table.items() if parent in family} - family
            family |= found
            grown = bool(found)
        for pid in family - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                fields = stat_fields(pid)
                if fields is not None and int(fields[19]) == table[pid][1]:
                    kill_pidfd(fd)
                os.close(fd)
        # What was missed (an orphan on its way here while the table was read) is found the next time.
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def parents() -> dict[int, tuple[int, int]]:
    """Return pid -> (parent's pid, start time in clock ticks) of every process in /proc."""
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names only, and this runs in a loop while killing
        if entry.isdigit():
            fields = stat_fields(int(entry))
            if fields is not None:
                found[int(entry)] = (int(fields[1]), int(fields[19]))
    return found


def stat_fields(pid: int, thread: int | None = None) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on (proc_pid_stat(5): field 3 is index 0).

    ``None`` for a process or thread that is gone.
    """
    place = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        text = Path(place).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name is in brackets and may hold anything, so the last bracket counts.
    return text[text.rindex(")") + 2 :].split()
