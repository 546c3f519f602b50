"""The cache of golden images: found by key, verified, shared between runs, bounded.

One entry is a folder that a file ``KEY.json`` points to; it is written last, so that an entry which was not
finished is never found. An entry in use is locked by whoever uses it, and the kernel drops the lock of a
user that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.errors import EnvironmentFailure, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_VARIABLE = "NVS_GOLDEN_MIB"
LIMIT_MIB = 8192
"""What all images together may take, in MiB: four or five of an engine with two ranks (1.7 GiB each)."""

RECENT_SECONDS = 1800.0
"""How long an image stays after its last use, in seconds, whatever the bound: a run that alternates between
targets comes back to it, and making it again costs a cold start."""

MAKER_SECONDS = 900.0
"""How long to wait for another run that makes an image, in seconds: a cold start, a dump and a restore."""

_IN_USE = "in-use.lock"
_VERIFIED = "verified.json"

Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64}|link:[0-9a-f]{64})$")]
FileFacts = tuple[Annotated[int, Field(ge=0)], Digest]
"""Bytes and SHA-256 of a file; of a symbolic link those of its target's text, after ``link:``."""


class Index(BaseModel):
    """What ``KEY.json`` holds. ``bytes`` is what the image takes on disk, ``cold_seconds`` what it saves."""

    model_config = ConfigDict(strict=True, extra="allow")

    folder: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=255)
    files: dict[str, FileFacts] = Field(min_length=1)
    bytes: int = Field(ge=0)
    cold_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    criu: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A golden image in use: it stays until :meth:`close`. ``facts`` is what its maker wrote down."""

    folder: Path
    facts: dict[str, Any]
    lock: int

    def close(self) -> None:
        """Let others remove it."""
        os.close(self.lock)


class DamagedImageError(Exception):
    """A file of an image is not what its maker wrote."""


class GoldenStore:
    """The images below ``root`` (default: the suite's cache), at most ``limit_bytes`` of them."""

    def __init__(self, root: Path | None = None, limit_bytes: int | None = None) -> None:
        self.root = root or cache_dir("golden")
        self._limit = limit_bytes
        _ = self.limit_bytes  # a wrong one is said before an engine is started
        (self.root / "entries").mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def limit_bytes(self) -> int:
        """The bound: as given, or from ``NVS_GOLDEN_MIB``, or the default.

        Raises :class:`UsageError` where the variable is no whole number of MiB.
        """
        return limit_from_environment() if self._limit is None else self._limit

    def open(self, key: str) -> Entry | None:
        """Return the image of ``key``, verified and locked against removal; ``None`` where there is none.

        One that is damaged is forgotten, and :class:`DamagedImageError` says what was found.
        """
        pointer = self._pointer(key)
        try:
            index = read_index(pointer)
        except DamagedImageError:
            self.forget(key)
            raise
        if index is None:
            return None
        folder = self.root / "entries" / index.folder
        try:
            lock = _lock(folder, fcntl.LOCK_SH)
        except BlockingIOError:
            return None  # it is being removed
        except OSError as error:
            self.forget(key)
            raise DamagedImageError(f"its folder {index.folder} is no image: {error.strerror}") from error
        entry = Entry(folder, index.model_dump(), lock)
        try:
            verify(folder, index.files)
        except DamagedImageError:
            entry.close()
            self.forget(key)
            raise
        with contextlib.suppress(FileNotFoundError):
            os.utime(pointer)  # used last
        return entry

    def forget(self, key: str) -> None:
        """Drop the image of ``key``: it is found no more, and removed once nobody uses it.

        Whatever is in the index's place goes, also a folder.
        """
        pointer = self._pointer(key)
        if pointer.is_dir() and not pointer.is_symlink():
            shutil.rmtree(pointer, ignore_errors=True)
        else:
            pointer.unlink(missing_ok=True)

    @contextlib.contextmanager
    def maker(self, key: str) -> Iterator[None]:
        """Hold the right to make the image of ``key``; other runs wait here and then find it.

        Raises :class:`EnvironmentFailure` where another run holds it for longer than any start takes.
        """
        try:
            with FileLock(self.root / f"{key}.lock", timeout=MAKER_SECONDS):
                yield
        except Timeout:
            raise EnvironmentFailure(
                f"another run has been making the image {key} for {MAKER_SECONDS:.0f} s",
                cause="it hangs, or the machine is far too busy",
                next_step="end that run, or start with --cold",
            ) from None

    def new_folder(self, key: str) -> Entry:
        """Return a new, empty folder for the image of ``key``; :meth:`publish` or :meth:`drop` follow.

        What a maker left behind that was killed is removed first.
        """
        self.evict()
        folder = self.root / "entries" / f"{key}-{uuid.uuid4().hex[:8]}"
        with self._bookkeeping():  # between the two lines nobody may take it for abandoned
            folder.mkdir(mode=0o700)
            return Entry(folder, {}, _lock(folder, fcntl.LOCK_SH))

    def publish(self, key: str, entry: Entry, facts: dict[str, Any]) -> Entry:
        """Make the image in ``entry`` findable, then remove what is beyond the bound.

        Raises :class:`DamagedImageError` where a link in it leads out of it.
        """
        files = inventory(entry.folder)
        facts = {**facts, "folder": entry.folder.name, "files": files, "bytes": _disk_bytes(entry.folder)}
        _note_verified(entry.folder, files)
        partial = self.root / f"{key}.partial"
        partial.write_text(json.dumps(facts, indent=1) + "\n")
        pointer = self._pointer(key)
        if pointer.is_dir() and not pointer.is_symlink():
            self.forget(key)
        partial.rename(pointer)
        self.evict(keep=key)
        return Entry(entry.folder, facts, entry.lock)

    def drop(self, entry: Entry) -> None:
        """Remove a folder that will not be published."""
        shutil.rmtree(entry.folder, ignore_errors=True)
        entry.close()

    def evict(self, *, keep: str = "") -> list[str]:
        """Remove abandoned folders, then the images used least recently, until the bound holds.

        ``keep`` is not removed, nor is one that is in use or was within
        :data:`RECENT_SECONDS`. Returns the names of the removed folders.
        """
        removed: list[str] = []
        with self._bookkeeping():
            images = []
            pointed = set()
            for pointer in self.root.glob("*.json"):
                # What is no index is nobody's image: its folder is abandoned. The file stays until its
                # key is asked for, for the run that asks then says why it makes the image anew.
                with contextlib.suppress(OSError, DamagedImageError):
                    index = read_index(pointer)
                    if index is not None:
                        pointed.add(index.folder)
                        images.append((pointer.stat().st_mtime, index.bytes, pointer, index.folder))
            abandoned = [f for f in (self.root / "entries").iterdir() if f.name not in pointed and f.is_dir()]
            removed += [folder.name for folder in abandoned if self._remove(folder)]
            total = sum(size for _, size, _, _ in images)
            now = time.time()
            for used, size, pointer, name in sorted(images):
                if total <= self.limit_bytes:
                    break
                if 0 <= now - used < RECENT_SECONDS:
                    continue
                if pointer.stem != keep and self._remove(self.root / "entries" / name):
                    pointer.unlink(missing_ok=True)
                    removed.append(name)
                    total -= size
        return removed

    def _remove(self, folder: Path) -> bool:
        """Remove a folder unless somebody uses it."""
        try:
            lock = _lock(folder, fcntl.LOCK_EX)
        except OSError:
            return False
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
        return True

    def _bookkeeping(self) -> FileLock:
        return FileLock(self.root / "store.lock")

    def _pointer(self, key: str) -> Path:
        return self.root / f"{key}.json"


def limit_from_environment() -> int:
    """Return the bound that ``NVS_GOLDEN_MIB`` gives, in bytes; the default where it is unset or empty.

    Raises :class:`UsageError` for what is no whole number of MiB.
    """
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not given:
        return LIMIT_MIB << 20
    if not (given.isascii() and given.isdigit() and len(given) <= 12):
        raise UsageError(
            f"{LIMIT_VARIABLE}={given!r} is no whole number of MiB",
            next_step=f"give a number such as {LIMIT_MIB}, or unset it",
        )
    return int(given) << 20


def read_index(path: Path) -> Index | None:
    """Read an index; ``None`` where there is none, :class:`DamagedImageError` where it cannot be one."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DamagedImageError("its index is no file")
        return Index.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedImageError(f"its index cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DamagedImageError(
            f"its index is damaged: {place + ': ' if place else ''}{first['msg']}"
        ) from None


def inventory(folder: Path) -> dict[str, FileFacts]:
    """Return size and SHA-256 of each file and symbolic link below ``folder`` that belongs to the image.

    Raises :class:`DamagedImageError` for a link that leads out of ``folder``.
    """
    paths = [path for path in sorted(folder.rglob("*")) if _belongs(path)]
    for path in paths:
        _check_link(folder, path)
    with ThreadPoolExecutor(2, "nvsnap-hash") as executor:
        sums = executor.map(_digest, paths)
        return {
            str(path.relative_to(folder)): (path.lstat().st_size, digest)
            for path, digest in zip(paths, sums, strict=True)
        }


def verify(folder: Path, files: dict[str, FileFacts]) -> None:
    """Raise :class:`DamagedImageError` unless every file is what its maker wrote.

    Sizes and where links lead are compared always. Contents are hashed unless they were verified since the
    machine was booted and no file was touched after: the kernel sets a file's change time (ctime) at every
    write, and nobody can set it back. That takes about 1 ms instead of 0.7 s for an engine with one rank
    (1.3 GiB).
    """
    for name, (size, _) in files.items():
        path = folder / name
        try:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise DamagedImageError(f"{name} is not in the image")
            _check_link(folder, path)
            now = path.lstat().st_size
        except OSError as error:
            raise DamagedImageError(f"{name} cannot be read: {error.strerror}") from error
        except ValueError as error:  # a NUL in the name
            raise DamagedImageError(f"{name!r} is no name of a file") from error
        if now != size:
            raise DamagedImageError(f"{name} has {now} bytes, and {size} were written")
    stamp = _stamp(folder, files)
    try:
        if json.loads((folder / _VERIFIED).read_text()) == stamp:
            return
    except (OSError, ValueError, RecursionError):
        pass  # never verified, or the note itself is damaged: then the contents decide
    found = inventory(folder)
    for name, (_, digest) in files.items():
        if name not in found or digest != found[name][1]:
            raise DamagedImageError(f"the content of {name} has changed")
    _note_verified(folder, files)


def _check_link(folder: Path, path: Path) -> None:
    """Refuse a link that leads out of the image: its content would not be what was verified."""
    inside = Path(os.path.realpath(folder))
    if not Path(os.path.realpath(path.parent)).is_relative_to(inside):
        raise DamagedImageError(f"{path.relative_to(folder)} leads out of the image")
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
        raise DamagedImageError(f"the link {path.relative_to(folder)} leads out of the image")


def _note_verified(folder: Path, files: dict[str, FileFacts]) -> None:
    partial = folder / f"{_VERIFIED}.{uuid.uuid4().hex[:8]}"
    partial.write_text(json.dumps(_stamp(folder, files)))
    partial.rename(folder / _VERIFIED)


def _stamp(folder: Path, files: dict[str, FileFacts]) -> dict[str, Any]:
    """Return what changes when a file is written or replaced, or the machine is booted."""
    stats = {name: (folder / name).lstat() for name in files}
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "files": {
            name: [now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns] for name, now in stats.items()
        },
    }


def _belongs(path: Path) -> bool:
    """Whether a file is part of the image: not the store's own notes, nor FIFOs and sockets."""
    return (path.is_symlink() or path.is_file()) and not path.name.startswith((_IN_USE, _VERIFIED))


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"link:{hashlib.sha256(os.fsencode(path.readlink())).hexdigest()}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _lock(folder: Path, kind: int) -> int:
    """Return a descriptor that holds the folder's lock; :class:`OSError` where somebody has another."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fd = os.open(_IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
    finally:
        os.close(place)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        os.stat(folder / _IN_USE)  # noqa: PTH116 - it may have been removed between open and lock
    except BaseException:
        os.close(fd)
        raise
    return fd
