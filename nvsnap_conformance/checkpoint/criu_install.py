"""Installs CRIU from a newer Debian release beside the system, which stays as it is.

apt does the work, with lists, cache and status of its own in a scratch folder: it takes the mirror and the
keys that this machine is configured with, and verifies release, index and package as always.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.checkpoint.criu_program import (
    MINIMUM,
    Criu,
    check_kernel,
    describe,
    own_command,
    side_by_side,
)
from nvsnap_conformance.errors import EnvironmentFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SUITES = ("stable", "testing", "unstable")
"""Tried in this order, by the names that every Debian mirror keeps, until one has a CRIU that will do."""

RECORD = "criu.json"
_SECONDS = 300.0
_TARGET_FORMAT = "$(REPO_URI) $(RELEASE) $(COMPONENT)"

KEYRINGS = (
    "/usr/share/keyrings/debian-archive-keyring.pgp",
    "/usr/share/keyrings/debian-archive-keyring.gpg",
)
"""Debian's own keys (package debian-archive-keyring); without either, the keys that apt trusts for all."""


def install_criu(on_progress: Callable[[str], None] | None = None) -> Criu:
    """Install CRIU into the suite's cache, or return the one that is there already.

    Other callers wait; a broken download leaves nothing. Raises :class:`EnvironmentFailure` on another
    distribution than Debian, without apt, without a mirror, and where the CRIU found does not work here.
    """
    say = on_progress or (lambda _text: None)
    target = side_by_side()
    with FileLock(cache_dir("criu") / "install.lock"):
        present = _present(target)
        if present is not None:
            say(f"CRIU {present.version} is installed in {target}")
            return present
        for old in cache_dir("criu").glob("partial-*"):
            shutil.rmtree(old)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=cache_dir("criu")))
        try:
            record = _Apt(partial / "apt", say).fetch(partial / "tree")
            criu = _usable(partial / "tree")
            check_kernel(criu)
            (partial / "tree" / RECORD).write_text(json.dumps({**record, **criu.as_json()}, indent=1) + "\n")
            if target.exists():
                shutil.rmtree(target)
            (partial / "tree").rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        criu = _usable(target)
        say(f"CRIU {criu.version} (build id {criu.build_id}) from Debian {record['suite']} in {target}")
        return criu


def _present(folder: Path) -> Criu | None:
    own = own_command(folder)
    criu = None if own is None or not (folder / RECORD).is_file() else describe(*own)
    return criu if isinstance(criu, Criu) else None


def _usable(folder: Path) -> Criu:
    own = own_command(folder)
    criu = "it is not among the files of the packages" if own is None else describe(*own)
    if isinstance(criu, str):
        raise EnvironmentFailure(
            "the CRIU that was downloaded cannot be used",
            cause=criu,
            next_step=f"install CRIU {MINIMUM} or later by other means and put it on PATH",
        )
    return criu


class _Apt:
    """apt-get with state of its own in ``scratch``."""

    def __init__(self, scratch: Path, say: Callable[[str], None]) -> None:
        self._scratch = scratch
        self._say = say
        for name in ("lists/partial", "cache/archives/partial", "packages"):
            (scratch / name).mkdir(parents=True)
        # An empty status: apt then takes the whole closure, the C library included.
        (scratch / "status").touch()

    def fetch(self, tree: Path) -> dict[str, object]:
        """Unpack CRIU and its libraries into ``tree``; return suite and package versions."""
        archive = self._archive()
        tried = []
        for suite in SUITES:
            self._say(f"looking for CRIU {MINIMUM} or later in Debian {suite}")
            source = self._scratch / "debian.sources"
            lines = ["Types: deb", f"URIs: {archive}", f"Suites: {suite}", "Components: main"]
            lines += [f"Signed-By: {path}" for path in KEYRINGS if Path(path).is_file()][:1]
            source.write_text("\n".join(lines) + "\n")
            self._apt("update")
            wanted = self._closure()
            version = wanted.get("criu", "none")
            tried.append(f"{suite} has {version}")
            if version == "none" or self._older(version):
                continue
            self._say(f"downloading criu {version} and {len(wanted) - 1} libraries")
            self._apt("download", *(f"{name}={number}" for name, number in wanted.items()))
            tree.mkdir()
            for package in sorted((self._scratch / "packages").glob("*.deb")):
                self._run(["dpkg-deb", "--extract", str(package), str(tree)])
            return {"suite": suite, "packages": wanted}
        raise EnvironmentFailure(
            f"no Debian release on this machine's mirror has CRIU {MINIMUM} or later",
            cause=", ".join(tried),
            next_step=f"build CRIU {MINIMUM} or later and put it on PATH",
        )

    def _archive(self) -> str:
        """Return the address of the distribution's own archive, as this machine's apt is configured."""
        release = platform.freedesktop_os_release()
        if release.get("ID") != "debian" or shutil.which("apt-get") is None:
            raise EnvironmentFailure(
                f"CRIU can be installed side by side on Debian only, and this is {release.get('NAME')}",
                next_step=f"install CRIU {MINIMUM} or later by other means and put it on PATH",
            )
        codename = release.get("VERSION_CODENAME", "")
        output = self._run(["apt-get", "indextargets", "--format", _TARGET_FORMAT, "Created-By: Packages"])
        for line in output.splitlines():
            uri, suite, component = line.split()
            if suite == codename and component == "main":
                return uri
        raise EnvironmentFailure(
            f"apt on this machine has no source for Debian {codename} main",
            next_step="configure one in /etc/apt/sources.list.d, or put a CRIU of your own on PATH",
        )

    def _closure(self) -> dict[str, str]:
        """Return name and version of the packages to unpack: CRIU and all libraries, no Python."""
        lines = self._apt("install", "--simulate", "--no-install-recommends", "criu").splitlines()
        wanted = {}
        for line in lines:
            words = line.split()
            if words[:1] == ["Inst"] and (words[1] == "criu" or words[1].startswith("lib")):
                wanted[words[1]] = words[2].lstrip("(")
        return wanted

    def _older(self, version: str) -> bool:
        argv = ["dpkg", "--compare-versions", version, "lt", MINIMUM]
        return subprocess.run(argv, check=False).returncode == 0

    def _apt(self, *words: str) -> str:
        scratch = self._scratch
        options = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": str(scratch),
            "Dir::State::Lists": str(scratch / "lists"),
            "Dir::State::Status": str(scratch / "status"),
            "Dir::Cache": str(scratch / "cache"),
            "Acquire::Languages": "none",
            "Acquire::AllowInsecureRepositories": "false",
            "APT::Get::AllowUnauthenticated": "false",
            "APT::Update::Error-Mode": "any",
            "APT::Sandbox::User": "root",
            # Everything is in the scratch folder, which has one user: the lock of install_criu is held.
            "Debug::NoLocking": "true",
        }
        argv = ["apt-get", *(f"-o{name}={value}" for name, value in options.items()), "-q", *words]
        return self._run(argv, cwd=scratch / "packages")

    def _run(self, argv: Sequence[str], cwd: Path | None = None) -> str:
        try:
            done = subprocess.run(
                list(argv), cwd=cwd, capture_output=True, text=True, timeout=_SECONDS, check=False,
                stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentFailure(f"cannot run {argv[0]}", cause=str(error)) from error
        if done.returncode != 0:
            raise EnvironmentFailure(
                f"{argv[0]} {argv[-1]} failed with status {done.returncode}",
                cause=(done.stderr.strip() or done.stdout.strip())[-1000:],
                next_step="check that apt works here (apt-get update), and that the mirror can be reached",
            )
        return done.stdout
