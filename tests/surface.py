"""What the hooks rely on in engines and libraries, checked against sources by their syntax trees.

``python -m tests.surface --fetch`` checks every version in ``nvsnap_conformance/hooks/surface.toml`` against
its wheel on the package index. Of a wheel only the directory and the modules that are named are read, by
range requests, and kept in the user's cache. Nothing is imported, installed or run.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import Version

import nvsnap_conformance.hooks
from nvsnap_conformance.cache import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable

SURFACE = Path(nvsnap_conformance.hooks.__file__).with_name("surface.toml")
INDEX = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json"
BLOCK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One name and what it must have; the fields are those of ``surface.toml``."""

    distribution: str
    module: str
    name: str
    versions: str = ""
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def holds_for(self, version: str) -> bool:
        """Return whether it is about a version."""
        return SpecifierSet(self.versions).contains(version, prereleases=True)


@dataclass
class Members:
    """What a module or a class has: names, parameters of functions, and the classes in it."""

    names: set[str] = field(default_factory=set)
    functions: dict[str, set[str]] = field(default_factory=dict)
    classes: dict[str, Members] = field(default_factory=dict)


def load(path: Path = SURFACE) -> tuple[dict[str, list[str]], list[Entry]]:
    """Return the versions by distribution, and the entries."""
    raw: dict[str, Any] = tomllib.loads(path.read_text())
    return raw["versions"], [_entry(each) for each in raw["entry"]]


def _entry(raw: dict[str, Any]) -> Entry:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()
    }
    return Entry(**fields)


def members(source: str) -> Members:
    """Return what a module's source defines, wherever in it but inside of functions."""
    return _members(ast.parse(source).body)


def _members(body: list[ast.stmt]) -> Members:
    found = Members()
    for node in body:
        if isinstance(node, ast.ClassDef):
            found.classes[node.name] = _members(node.body)
            found.names.add(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found.functions[node.name] = {argument.arg for argument in arguments}
            found.names.add(node.name)
            found.names |= _set_on_self(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.names |= {target.id for target in targets if isinstance(target, ast.Name)}
        else:
            # if, try, with: whichever branch is taken.
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            handlers = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.ExceptHandler)]
            within = _members([*inner, *(statement for handler in handlers for statement in handler.body)])
            found.names |= within.names
            found.functions |= within.functions
            found.classes |= within.classes
    return found


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }


def problems(entry: Entry, source: str | None) -> list[str]:
    """Return what of an entry does not hold in its module's source; that is ``None`` where there is none."""
    where = f"{entry.module}:{entry.name}"
    if source is None:
        return [f"{entry.module}: no such module"]
    here = members(source)
    *owners, last = entry.name.split(".")
    for owner in owners:
        if owner not in here.classes:
            return [f"{where}: no class {owner}"]
        here = here.classes[owner]
    if last not in here.names:
        return [f"{where}: no such name"]
    found: list[str] = []
    if entry.parameters:
        taken = here.functions.get(last, set())
        found += [f"{where}: takes no {name}" for name in entry.parameters if name not in taken]
    if entry.attributes or entry.absent:
        own = here.classes.get(last, Members()).names
        found += [f"{where}: has no {name}" for name in entry.attributes if name not in own]
        found += [f"{where}: has {name}" for name in entry.absent if name in own]
    return found


def verify(
    distribution: str, version: str, entries: list[Entry], read: Callable[[str], str | None]
) -> list[str]:
    """Return what does not hold for one version; ``read`` gives a file of the distribution, or ``None``."""
    found: list[str] = []
    for entry in entries:
        if entry.distribution == distribution and entry.holds_for(version):
            path = entry.module.replace(".", "/")
            source = read(f"{path}.py")
            found += problems(entry, read(f"{path}/__init__.py") if source is None else source)
    return found


class RemoteFile(io.RawIOBase):
    """A file on a server that answers range requests, as far as :mod:`zipfile` reads one."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url, self._at = client, url, 0
        answer = client.head(url)
        answer.raise_for_status()
        self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        answer = self._client.get(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"})
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            raise OSError(f"{self._url}: no answer to a range request, but {answer.status_code}")
        buffer[: len(answer.content)] = answer.content
        self._at += len(answer.content)
        return len(answer.content)


class Wheel:
    """The sources of one version, from its wheel on an index, each file read once and kept in the cache."""

    def __init__(self, client: httpx.Client, index: str, distribution: str, version: str) -> None:
        self._client, self._index = client, index
        self._distribution, self._version = distribution, version
        self._folder = cache_dir("surface", f"{distribution}-{version}")
        self._archive: zipfile.ZipFile | None = None

    def read(self, name: str) -> str | None:
        """Return a file's text, ``None`` where the wheel has no such file."""
        kept = self._folder / name
        if kept.is_file():
            return kept.read_text()
        if name not in self._names():
            return None
        text = self._open().read(name).decode()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
        return text

    def _names(self) -> set[str]:
        listing = self._folder / "FILES"
        if not listing.is_file():
            listing.write_text("\n".join(self._open().namelist()))
        return set(listing.read_text().splitlines())

    def _open(self) -> zipfile.ZipFile:
        if self._archive is None:
            raw = io.BufferedReader(RemoteFile(self._client, self._url()), BLOCK)
            self._archive = zipfile.ZipFile(raw)
        return self._archive

    def _url(self) -> str:
        answer = self._client.get(f"{self._index}/{self._distribution}/", headers={"Accept": ACCEPT})
        answer.raise_for_status()
        wheels = sorted(
            (file["filename"], file["url"])
            for file in answer.json()["files"]
            if file["filename"].endswith(".whl")
            and parse_wheel_filename(file["filename"])[1] == Version(self._version)
        )
        if not wheels:
            raise LookupError(f"{self._distribution} {self._version} has no wheel on {self._index}")
        # The Python modules are the same on every platform.
        return str(httpx.URL(f"{self._index}/{self._distribution}/").join(wheels[-1][1]))


def main(argv: list[str] | None = None) -> int:
    """Check every version; print one line for each, and return 1 where anything does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fetch", action="store_true", required=True, help="read wheels on the index")
    parser.add_argument("--index", default=os.environ.get("PIP_INDEX_URL", INDEX), help="a simple index")
    options = parser.parse_args(argv)
    versions, entries = load()
    broken = 0
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        for distribution, numbers in versions.items():
            for version in numbers:
                wheel = Wheel(client, options.index.rstrip("/"), distribution, version)
                found = verify(distribution, version, entries, wheel.read)
                own = [e for e in entries if e.distribution == distribution and e.holds_for(version)]
                lines = [f"{distribution} {version}: {len(own)} names, {len(found)} problems"]
                sys.stdout.write("\n  ".join(lines + found) + "\n")
                sys.stdout.flush()
                broken += len(found)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
