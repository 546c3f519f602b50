"""What a run leaves behind, on the host and inside an engine's namespaces.

Two users: :class:`HostSnapshot`, with which the suite audits itself, and
:meth:`nvsnap_conformance.engines.process.EngineProcess.audit`, with which it audits an engine.
:func:`check_residue` turns either result into findings.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import struct
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nvsnap_conformance.engines.linux import parents
from nvsnap_conformance.outcomes import Finding, finding
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RUN_ID = "NVSNAP_RUN_ID"
"""The environment variable by which every process of a run is known, whoever its parent is by now."""

_SHM = Path("/dev/shm")  # noqa: S108 - it is what is audited

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def run_id() -> str:
    """Return this run's id, made once and handed down to every child in the environment."""
    return os.environ.setdefault(RUN_ID, uuid.uuid4().hex)


def temporary_prefix(run: str) -> Path:
    """Return how the path begins of each folder that a run makes beside its engines' own.

    It is short, since sockets lie below it (unix(7)), and names the run, since several may share a host.
    """
    return Path(f"/tmp/nvsnap-{hashlib.sha256(run.encode()).hexdigest()[:12]}-")  # noqa: S108 - mkdir, 0700


_TEMPORARY = re.compile(r"/tmp/nvsnap-[0-9a-f]{12}-.")  # noqa: S108 - temporary_prefix of any run


def of_some_run(path: Path) -> bool:
    """Whether ``path`` is a folder with the :func:`temporary_prefix` of any run, or lies in one."""
    return _TEMPORARY.match(str(path)) is not None


@dataclass(frozen=True, order=True)
class ResidualProcess:
    """A process that is still there. ``name`` is the kernel's (15 bytes), since arguments hold secrets."""

    process: ProcessId
    name: str

    @classmethod
    def of(cls, process: ProcessId) -> ResidualProcess:
        """Describe ``process``; the name is empty once it is gone."""
        with suppress(*_GONE):
            return cls(process, Path(f"/proc/{process.pid}/comm").read_text(errors="replace").strip())
        return cls(process, "")


@dataclass(frozen=True)
class Residue:
    """What was left. Names only: sorted, as the kernel shows them.

    ``shm`` and ``semaphores`` are entries of /dev/shm (POSIX) and System V objects (``sysv-shm:ID``);
    ``ports`` are listening TCP sockets as ``ADDRESS:PORT``; ``namespaces`` as ``pid:[4026532000]``.
    """

    processes: tuple[ResidualProcess, ...] = ()
    shm: tuple[str, ...] = ()
    semaphores: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    tmp_files: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing was left."""
        return not any(getattr(self, item.name) for item in fields(self))


_SIGNATURES = {
    "processes": ("RESIDUE:PROCESS", "processes still there"),
    "shm": ("RESIDUE:SHM", "shared memory left"),
    "semaphores": ("RESIDUE:SEMAPHORE", "semaphores left"),
    "ports": ("RESIDUE:PORT", "ports still listened on"),
    "mounts": ("RESIDUE:MOUNT", "mounts left"),
    "tmp_files": ("RESIDUE:TMP", "temporary files left"),
    "namespaces": ("RESIDUE:NAMESPACE", "namespaces left"),
}
_NAMED = frozenset({"shm", "semaphores", "tmp_files"})
"""Kinds whose entries have names of their makers' choice: one finding for each family of names."""

_RANDOM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{8,}|(?<=tmp)\w{8}", re.IGNORECASE)


def family(name: str) -> str:
    """Return what stays the same in a generated name: its words, without UUIDs, hashes and numbers.

    ``vllm_dist_2166…bd6-tp:0-[0-1]-cpushm_1`` is ``vllm_dist_tp_cpushm``, a bare UUID ``unnamed``.
    """
    words = re.split(r"[^A-Za-z0-9]+", _RANDOM.sub("", name))
    return "_".join(word for word in words if word.isalpha()) or "unnamed"


def check_residue(residue: Residue, *, of: str = "engine") -> list[Finding]:
    """Return one finding for each kind of thing that ``of`` left behind.

    What has a generated name makes one finding for each :func:`family` of names, which is the signature's
    place, so that a known leak never covers another one.
    """
    findings = []
    for kind, (signature, words) in _SIGNATURES.items():
        groups: dict[str, list[str]] = {}
        for entry in getattr(residue, kind):
            name = f"{entry.process.pid} {entry.name}" if isinstance(entry, ResidualProcess) else entry
            groups.setdefault(f"@{family(name)}" if kind in _NAMED else "", []).append(name)
        for place, names in groups.items():
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            shown = f"{of}: {words}: {', '.join(names[:10])}{more}"
            findings.append(finding(shown, f"{signature}{place}", left=names))
    return findings


def shm_entries(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the entries of a /dev/shm as (shared memory, semaphores); glibc names the latter sem.*."""
    with suppress(*_GONE):
        names = sorted(entry.name for entry in folder.iterdir())
        return (
            tuple(name for name in names if not name.startswith("sem.")),
            tuple(name for name in names if name.startswith("sem.")),
        )
    return (), ()


def files_below(folder: Path) -> tuple[str, ...]:
    """Return every file, socket and empty folder below ``folder``, relative to it."""
    found = []
    for place, folders, files in os.walk(folder):
        found += [os.path.relpath(Path(place, name), folder) for name in files]
        if not folders and not files and Path(place) != folder:
            found.append(os.path.relpath(place, folder) + "/")
    return tuple(sorted(found))


def listening(net: Path) -> dict[str, int]:
    """Return ``ADDRESS:PORT`` -> socket inode of the TCP sockets that listen, from a /proc/PID/net."""
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(*_GONE):
            for line in (net / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":  # TCP_LISTEN
                    found[_address(words[1], family)] = int(words[9])
    return found


def _address(text: str, family: socket.AddressFamily) -> str:
    """Read the kernel's ``HEX:PORT``: 32-bit words in host order (proc_pid_net(5))."""
    address, port = text.split(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    host = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return f"[{host}]:{int(port, 16)}" if ":" in host else f"{host}:{int(port, 16)}"


def mount_points(process: str = "self") -> tuple[str, ...]:
    """Return ``MOUNT_POINT TYPE`` of every mount of a process's mount namespace, in mount order.

    One that has ended has none; of a zombie the kernel says so by EINVAL.
    """
    try:
        text = Path(f"/proc/{process}/mountinfo").read_text()
    except _GONE:
        return ()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return ()
    found = []
    for line in text.splitlines():
        words = line.split()
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), words[4])
        found.append(f"{point} {words[words.index('-') + 1]}")
    return tuple(found)


_ESCAPED = re.compile(r"\\([0-7]{3})")
"""What stands for white space and backslashes in /proc/PID/mountinfo (proc(5))."""


_SHORT = re.compile(r"/tmp/nvsnap-\d+/engine(/|$)")  # noqa: S108 - engines.home.mount_point of any user


def in_engines_place(point: Path) -> bool:
    """Whether a mount point is a folder over which engines' homes are mounted, or lies below it.

    One in /tmp counts for every user and every setting of the cache folder: which one was used is not known.
    """
    from nvsnap_conformance.engines import home  # noqa: PLC0415 - it names its folders by the run's id, from here

    engines = home.mount_point()
    return point == engines or engines in point.parents or _SHORT.match(str(point)) is not None


def _where_engines_mount(mount: str) -> bool:
    """Whether a mount is where the suite mounts something in an engine's namespace."""
    point = Path(mount.rpartition(" ")[0])
    return str(point) in {"/", "/proc", str(_SHM)} or in_engines_place(point)


def sysv_objects() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return System V (shared memory and queues, semaphores) of the calling thread's IPC namespace."""
    found: dict[str, list[str]] = {"shm": [], "msg": [], "sem": []}
    for kind, names in found.items():
        with suppress(*_GONE):
            lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
            names.extend(f"sysv-{kind}:{line.split()[1]}" for line in lines)
    return tuple(sorted(found["shm"] + found["msg"])), tuple(sorted(found["sem"]))


def added(before: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
    """Return what ``after`` has more of than ``before``; entries may repeat (mounts over mounts do)."""
    known = list(before)
    new = []
    for entry in after:
        if entry in known:
            known.remove(entry)
        else:
            new.append(entry)
    return tuple(sorted(new))


def marked_processes(name: str, value: str) -> list[ProcessId]:
    """Return the living processes whose initial environment has ``name=value``, the caller excepted."""
    return [process for process, found in marks(name).items() if found == value]


def marks(name: str) -> dict[ProcessId, str]:
    """Return the living processes whose initial environment has ``name``, with its value; not the caller."""
    wanted = f"{name}=".encode()
    found = {}
    for pid in psutil.pids():
        if pid == os.getpid():
            continue
        with suppress(*_GONE):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if not entry.startswith(wanted):
                    continue
                process = ProcessId.of(pid)
                if process is not None and process.alive:
                    found[process] = os.fsdecode(entry[len(wanted) :])
                break
    return found


def _namespace(pid: int | str, kind: str) -> str | None:
    with suppress(*_GONE):
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    return None


def run_processes(run: str) -> list[ProcessId]:
    """Return the living processes of a run, the caller excepted.

    They are those with the run's mark, all that descends from these, and all in the pid namespaces of
    any: a process that gave up its environment, or was restored from an image with an older one, belongs
    to the run as well.
    """
    pids = with_kin({process.pid for process in marked_processes(RUN_ID, run)}) - {os.getpid()}
    identities = (ProcessId.of(pid) for pid in sorted(pids))
    return [process for process in identities if process is not None and process.alive]


def with_kin(family: set[int]) -> set[int]:
    """Return pids with those of their descendants, and of all in their pid namespaces but the caller's."""
    own = _namespace("self", "pid")
    table = {pid: parent for pid, (parent, _) in parents().items()}
    spaces = {pid: _namespace(pid, "pid") for pid in table} if family else {}
    while True:
        inhabited = {spaces.get(pid) for pid in family} - {own, None}
        found = {pid for pid, parent in table.items() if parent in family or spaces.get(pid) in inhabited}
        if found <= family:
            return family
        family = family | found


@dataclass(frozen=True)
class HostSnapshot:
    """What a run has on the host at one moment. Take one before, one after, and ask for the difference.

    Other programs use the machine too. A mount counts only where engines have theirs. A listening port that a
    process outside the run owns, and an entry of /dev/shm that one has mapped or open, are theirs
    (``foreign``) and are left out; an entry that nobody uses counts as the run's if it came during the run,
    and was not seen to be another's before.
    """

    residue: Residue
    foreign: frozenset[str] = field(repr=False)

    @classmethod
    def take(cls, run: str | None = None) -> HostSnapshot:
        """Look at the host now, for the run with id ``run`` (this process's own by default)."""
        run = run or run_id()
        processes = run_processes(run)
        pids = {process.pid for process in processes} | {os.getpid()}
        # Named both before and after the look at the others' holdings: what came or went meanwhile could
        # be taken for nobody's.
        shm, semaphores = shm_entries(_SHM)
        ports = listening(Path("/proc/self/net"))
        foreign = _Foreign.look(pids)
        still = {name for names in shm_entries(_SHM) for name in names}
        still_ports = listening(Path("/proc/self/net"))
        sysv_shm, sysv_semaphores = sysv_objects()
        temporary = temporary_prefix(run)
        spaces = {_namespace(pid, kind) for pid in pids for kind in ("pid", "mnt", "net", "ipc")} - {None}
        others = {name for name in (*shm, *semaphores) if name not in still or foreign.uses(name)}
        others |= {p for p, inode in ports.items() if still_ports.get(p) != inode or foreign.owns(inode)}
        residue = Residue(
            processes=tuple(ResidualProcess.of(process) for process in processes),
            shm=tuple(name for name in shm if name not in others) + sysv_shm,
            semaphores=tuple(name for name in semaphores if name not in others) + sysv_semaphores,
            ports=tuple(sorted(set(ports) - others)),
            mounts=tuple(mount for mount in mount_points() if _where_engines_mount(mount)),
            tmp_files=tuple(sorted(map(str, temporary.parent.glob(f"{temporary.name}*")))),
            namespaces=tuple(sorted(str(space) for space in spaces)),
        )
        return cls(residue, frozenset(others))

    def diff(self, after: HostSnapshot) -> Residue:
        """Return what is in ``after`` and was not here."""
        changes: dict[str, Any] = {
            item.name: added(
                (*getattr(self.residue, item.name), *self.foreign), getattr(after.residue, item.name)
            )
            for item in fields(Residue)
            if item.name != "processes"
        }
        known = {left.process for left in self.residue.processes}
        changes["processes"] = tuple(p for p in after.residue.processes if p.process not in known)
        return Residue(**changes)


@dataclass(frozen=True)
class _Foreign:
    """What processes outside the run hold: inodes of sockets, and files of the host's /dev/shm."""

    sockets: frozenset[int]
    shm: frozenset[int]

    @classmethod
    def look(cls, own: set[int]) -> _Foreign:
        device = _SHM.stat().st_dev
        mapped = f"{os.major(device):02x}:{os.minor(device):02x}"
        sockets: set[int] = set()
        files: set[int] = set()
        for pid in set(psutil.pids()) - own:
            for target, number in _open_files(pid, device):
                if target.startswith("socket:["):
                    sockets.add(int(target[8:-1]))
                elif number is not None:
                    files.add(number)
            files.update(_mapped(pid, mapped))
        return cls(frozenset(sockets), frozenset(files))

    def owns(self, inode: int) -> bool:
        return inode in self.sockets

    def uses(self, name: str) -> bool:
        with suppress(*_GONE):
            return (_SHM / name).stat().st_ino in self.shm
        return False


def abandoned_shm() -> tuple[str, ...]:
    """Return the entries of /dev/shm that no process has open or mapped.

    Of what other users' processes hold only root is told: others get their own entries alone.
    """
    there = {name for names in shm_entries(_SHM) for name in names}
    if not there:
        return ()
    holders = _Foreign.look(set())
    # Named before and after the look at the holders: one that came meanwhile could be taken for nobody's.
    there &= {name for names in shm_entries(_SHM) for name in names}
    return tuple(sorted(n for n in there if may_judge(_SHM / n) and not holders.uses(n)))


def may_judge(path: Path) -> bool:
    """Whether the caller can tell whose ``path`` is: it is root, or the path's owner."""
    with suppress(*_GONE):
        return os.geteuid() in (0, path.lstat().st_uid)
    return False


def _open_files(pid: int, device: int) -> Iterator[tuple[str, int | None]]:
    """Yield target and, for a file of the host's /dev/shm, inode of every descriptor of a process."""
    with suppress(*_GONE):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(*_GONE):
                target = str(entry.readlink())
                inode = None
                if target.startswith(f"{_SHM}/"):
                    status = entry.stat()
                    inode = status.st_ino if status.st_dev == device else None
                yield target, inode


def _mapped(pid: int, device: str) -> Iterator[int]:
    """Yield the inodes of the files on ``device`` that a process has mapped (proc_pid_maps(5))."""
    with suppress(*_GONE):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            words = line.split(maxsplit=5)
            if words[3] == device:
                yield int(words[4])
