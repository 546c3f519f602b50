"""Which CRIU there is: on PATH, or the one that ``doctor --install-criu`` laid beside the system's.

4.2 is the least that dumps an engine on a current kernel: 3.17 fails to read its vDSO, 4.1 cannot restore a
TCP socket on Linux 6.18 (SO_PASSCRED; both measured).
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.errors import EnvironmentFailure

MINIMUM = "4.2"
INSTALL = "nvsnap-conformance doctor --install-criu"

_SECONDS = 20.0

_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3


@dataclass(frozen=True)
class Criu:
    """A CRIU that runs here. ``command`` is what to execute, ``program`` its file, ``build_id`` in hex.

    The build id is recorded because one version is not one program: builds of the same number have
    crashed on an engine where others have not (CRIU issue 3018).
    """

    command: tuple[str, ...]
    program: Path
    version: str
    build_id: str

    def as_json(self) -> dict[str, str]:
        """Return what a record says of it."""
        return {"program": str(self.program), "version": self.version, "build_id": self.build_id}


def side_by_side() -> Path:
    """Return the folder of the CRIU that the suite has installed, made or not."""
    return cache_dir("criu") / "current"


def find_criu() -> Criu:
    """Return the CRIU to use: the one on PATH if it is new enough, else the suite's own.

    Raises :class:`EnvironmentFailure` that names every one that was found and what is wrong with it.
    """
    found: list[tuple[tuple[str, ...], Path]] = []
    on_path = shutil.which("criu")
    if on_path is not None:
        found.append(((on_path,), Path(on_path)))
    own = own_command(side_by_side())
    if own is not None:
        found.append(own)
    reasons = []
    for command, program in found:
        criu = describe(command, program)
        if isinstance(criu, Criu):
            return criu
        reasons.append(f"{program}: {criu}")
    raise EnvironmentFailure(
        f"there is no CRIU {MINIMUM} or later",
        cause="; ".join(reasons) or "no program 'criu' on PATH, and none installed by the suite",
        next_step=f"run `{INSTALL}`, or install CRIU {MINIMUM} or later",
    )


def check_kernel(criu: Criu) -> None:
    """Let CRIU look at kernel and rights; raise :class:`EnvironmentFailure` with what it misses."""
    answer = _run((*criu.command, "check"))
    if answer.returncode != 0:
        lines = [line for line in (answer.stdout + answer.stderr).splitlines() if "RLIMIT" not in line]
        raise EnvironmentFailure(
            f"CRIU {criu.version} cannot work here",
            cause="; ".join(lines[-3:]) or "it gave no reason",
            next_step="run as root with CAP_SYS_ADMIN, CAP_NET_ADMIN and CAP_SYS_PTRACE; a kernel needs "
            "CONFIG_CHECKPOINT_RESTORE",
        )


def describe(command: tuple[str, ...], program: Path) -> Criu | str:
    """Return the CRIU behind a command, or why it is none that can be used."""
    answer = _run((*command, "--version"))
    match = re.search(r"Version:\s*v?(\S+)", answer.stdout)
    if match is None:
        return f"--version answers {(answer.stdout + answer.stderr).strip()[:200]!r}"
    version = match[1]
    try:
        if Version(version) < Version(MINIMUM):
            return f"version {version} is too old"
    except InvalidVersion:
        return f"version {version} is no release"
    return Criu(command, program, version, elf_build_id(program))


def own_command(folder: Path) -> tuple[tuple[str, ...], Path] | None:
    """Return how to run a CRIU that lies in ``folder`` with all its libraries; ``None`` without one.

    Its own loader and C library are used, since a newer release's may be newer than the system's.
    """
    program = folder / "usr/sbin/criu"
    libraries = sorted({path.parent for path in folder.glob("**/libc.so.6")})
    loaders = sorted(folder.glob("**/ld-linux*.so.*"))
    if not program.is_file() or not libraries or not loaders:
        return None
    paths = ":".join(map(str, libraries))
    command = (str(loaders[0]), "--argv0", str(program), "--library-path", paths, str(program))
    return command, program


def elf_build_id(program: Path) -> str:
    """Return the GNU build id of a 64-bit ELF file in hex; empty where it has none or is a script."""
    data = program.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return ""
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for index in range(count):
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", data, offset + index * size)
        end = start + length
        while kind == _PT_NOTE and start + 12 <= end:
            name, described, note = struct.unpack_from("<III", data, start)
            begin = start + 12 + (name + 3) // 4 * 4
            if note == _NT_GNU_BUILD_ID and data[start + 12 : start + 15] == b"GNU":
                return data[begin : begin + described].hex()
            start = begin + (described + 3) // 4 * 4
    return ""


def _run(argv: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(argv), capture_output=True, text=True, timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(argv), 127, "", str(error))
