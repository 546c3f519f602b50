"""What CRIU's log means, in plain words.

The messages are those of CRIU 4.2; what none of them matches is kept as it is, under ``other``.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from nvsnap_conformance.errors import EnvironmentFailure


class Kind(StrEnum):
    """Why a dump or a restore failed."""

    IN_FLIGHT = "in-flight-connection"
    IO_URING = "io-uring-ring"
    EXTERNAL_TCP = "external-tcp-connection"
    EXTERNAL_UNIX = "external-unix-socket"
    CLIENTS = "client-connections"
    PID_TAKEN = "pid-taken"
    PORT_TAKEN = "port-taken"
    RLIMIT = "rlimit"
    KERNEL = "missing-kernel-feature"
    RIGHTS = "missing-rights"
    FILE_CHANGED = "file-changed"
    FILE_MISSING = "file-missing"
    NO_SPACE = "no-space"
    IMAGE_DAMAGED = "image-damaged"
    NO_IMAGE = "no-image"
    OTHER_CRIU = "other-criu"
    TREE_DIFFERS = "tree-differs"
    UNSUPPORTED = "unsupported-object"
    TIMEOUT = "timeout"
    OTHER = "other"


class CriuFailure(EnvironmentFailure):
    """A dump or a restore failed: ``kind`` says why, ``engine_runs`` whether the engine goes on serving.

    ``engine_runs`` is read back from the kernel after the failure; ``None`` for a restore.
    """

    def __init__(
        self, kind: Kind, what: str, *, cause: str = "", next_step: str = "", engine_runs: bool | None = None
    ) -> None:
        if engine_runs is not None:
            what += ": the engine runs on" if engine_runs else ": THE ENGINE IS DAMAGED OR GONE"
        super().__init__(what, cause=cause, next_step=next_step)
        self.kind = kind
        self.engine_runs = engine_runs


class _Rule(NamedTuple):
    kind: Kind
    pattern: str
    meaning: str
    next_step: str


_RULES = (
    _Rule(
        Kind.NO_SPACE,
        r"No space left on device|Disk quota exceeded|ENOSPC",
        "the disk is full",
        "free some space: an image takes about as much as the engine's memory",
    ),
    _Rule(
        Kind.IN_FLIGHT,
        r"In-flight connection",
        "a client's connection waits in a listening socket and has not been accepted yet",
        "quiesce the engine first, or dump again: the connection is in transit for a moment only",
    ),
    _Rule(
        Kind.IO_URING,
        r"anon_inode:\[io_uring\]",
        "a process holds an io_uring ring, which CRIU cannot dump",
        "start the engine isolated (then the suite refuses io_uring_setup), or set the sysctl "
        "kernel.io_uring_disabled=2 before it starts",
    ),
    _Rule(
        Kind.EXTERNAL_UNIX,
        r"External socket is used|Dangling connection|Can't dump half of (?:stream|dgram)? ?unix connection",
        "a process is connected to a UNIX socket of a program outside of the engine",
        "close that connection before the dump; see the inode in the log",
    ),
    _Rule(
        Kind.PID_TAKEN,
        r"Can't fork for (?P<thing>\d+): File exists|Pid (?P<pid>\d+) (?:already exists|do not match)",
        "pid {thing} is taken in the engine's pid namespace",
        "end the process that has it, or restore into new namespaces",
    ),
    _Rule(
        Kind.PORT_TAKEN,
        r"(?:Can't bind inet socket|Can't listen on a socket|inet: Can't).*Address already in use",
        "a TCP port of the engine is taken in the network namespace",
        "end the program that listens there, or restore into new namespaces",
    ),
    _Rule(
        Kind.FILE_CHANGED,
        r"File (?P<thing>\S+) has bad (?:size|build-?id|mode|checksum)|Build-?id.*(?P<id>/\S+)",
        "{thing} is another file than at the dump",
        "put the file back that was there, or take a new image",
    ),
    _Rule(
        Kind.FILE_MISSING,
        r"Can't (?:open file|stat|access) (?P<thing>\S+?)(?: on restore| for validation)?:"
        r" No such file or directory|Can't find (?P<path>\S+) in",
        "{thing} is missing, which the engine had open",
        "put the file back, or take a new image",
    ),
    _Rule(
        Kind.NO_IMAGE,
        r"Can't open \S*(?P<thing>inventory|pstree)\.img: No such file|Can't open dir",
        "there is no image: {thing} is missing",
        "dump first; an empty folder is no checkpoint",
    ),
    _Rule(
        Kind.IMAGE_DAMAGED,
        r"Unexpected EOF|Corrupted|Can't read.*(?:image|pages)|Image.*truncated|Unable to read|"
        r"protobuf unpack|[Mm]agic doesn't match|Can't lookup|Failed to read|read .* from img|Premature",
        "the image is damaged or cut short",
        "take a new image",
    ),
    _Rule(
        Kind.RLIMIT,
        r"[Rr]limit",
        "a resource limit of the engine cannot be set again",
        "give the restoring process CAP_SYS_RESOURCE, or start the engine with limits that are not above it",
    ),
    _Rule(
        Kind.RIGHTS,
        r"Operation not permitted|Permission denied",
        "the kernel refused CRIU a right",
        "run as root with CAP_SYS_ADMIN, CAP_NET_ADMIN and CAP_SYS_PTRACE and without a container's seccomp "
        "profile",
    ),
    _Rule(
        Kind.KERNEL,
        r"(?:not|isn't) supported|Operation not supported|Function not implemented|kerndat.*(?:fail|error)",
        "the kernel lacks something that CRIU needs",
        "run `criu check --extra`; a kernel needs CONFIG_CHECKPOINT_RESTORE",
    ),
    _Rule(
        Kind.UNSUPPORTED,
        r"Unknown shit (?P<thing>.*)|Can't dump (?P<object>.*)|unsupported",
        "the engine holds something that CRIU cannot dump: {thing}",
        "see the log for the process and descriptor",
    ),
)

# Said at every run by a root without CAP_SYS_RESOURCE, and without consequence.
_NOISE = re.compile(r"Can't setup RLIMIT_NOFILE for self")


def read_log(text: str, doing: str, *, engine_runs: bool | None = None) -> CriuFailure:
    """Return the failure that a log of CRIU's and its standard error tell of.

    ``doing`` says what was tried, as in "the dump of the engine failed".
    """
    errors = [
        line.partition("): ")[2].strip() or line.strip()
        for line in text.splitlines()
        if "Error" in line and not _NOISE.search(line)
    ]
    for rule in _RULES:  # in the rules' order, since a cause is followed by the errors that it leads to
        for error in errors:
            match = re.search(rule.pattern, error)
            if match:
                thing = next((value for value in match.groupdict().values() if value), error)
                return CriuFailure(
                    rule.kind,
                    f"{doing}: {rule.meaning.format(thing=thing)}",
                    cause="; ".join(errors[:4]),
                    next_step=rule.next_step,
                    engine_runs=engine_runs,
                )
    return CriuFailure(
        Kind.OTHER,
        doing,
        cause="; ".join(errors[:6]) or text.strip()[-500:] or "CRIU gave no reason",
        next_step="see CRIU's log",
        engine_runs=engine_runs,
    )
