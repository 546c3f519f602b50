"""Reads an image of CRIU's: how much memory is in it, and whether it is whole. Needs no CRIU.

The format (CRIU 4.2, images/pagemap.proto): two magic numbers, then entries of a 32-bit length and a
protobuf message; a ``pagemap`` file lists runs of pages, whose content lies in order in a ``pages`` file.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nvsnap_conformance.processes import ProcessId

PAGE = os.sysconf("SC_PAGE_SIZE")

_COMMON_MAGIC = 0x54564319
_PAGEMAP_MAGIC = 0x56084025
_PRESENT = 1 << 2  # PE_PRESENT; a page of a parent image or a lazy one has no content here

FLOOR_SHARE = 0.9
"""The part of the processes' anonymous memory that an image must hold at least.

CRIU stores each anonymous page that is present; measured on vLLM, an image holds 1.00 of them. The rest is
for pages that come and go between the two looks."""


class ImageError(ValueError):
    """A file of an image is cut short or is no such file."""


def anonymous_bytes(processes: Iterable[ProcessId]) -> int:
    """Return the anonymous memory of the processes in bytes, each counted by itself, from smaps_rollup.

    That is what no file holds, so an image has to. A process that is gone counts as nothing.
    """
    total = 0
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as file:  # noqa: PTH123
                fields = dict(line.split(":", 1) for line in file if ": " in line)
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += int(fields.get("Anonymous", "0 kB").split()[0]) * 1024
    return total


def stored_bytes(images: Path) -> int:
    """Return the size of the memory content in an image, in bytes."""
    return sum(path.stat().st_size for path in images.glob("pages-*.img"))


def check_image(images: Path, floor: int) -> list[Finding]:
    """Check that an image is there, whole, and large enough to hold the engine.

    ``floor`` is the anonymous memory that the suite itself saw in the processes (:func:`anonymous_bytes`),
    in bytes. Findings: ``IMAGE:EMPTY``, ``IMAGE:TRUNCATED``, ``IMAGE:TOO_SMALL``.
    """
    pagemaps = sorted(images.glob("pagemap-*.img")) if images.is_dir() else []
    if not pagemaps or not (images / "inventory.img").is_file():
        return [finding(f"{images} holds no image of a process", "IMAGE:EMPTY", folder=str(images))]
    found = []
    for pagemap in pagemaps:
        try:
            pages, listed = _pages(pagemap)
            held = (images / pages).stat().st_size if listed else 0
        except (OSError, ImageError) as error:
            found.append(finding(f"{pagemap.name} cannot be read: {error}", "IMAGE:TRUNCATED"))
            continue
        if listed and held < listed:
            found.append(
                finding(
                    f"{pages} holds {held} of the {listed} bytes that {pagemap.name} lists",
                    "IMAGE:TRUNCATED",
                    file=pages,
                )
            )
    stored = stored_bytes(images)
    if stored < floor * FLOOR_SHARE:
        found.append(
            finding(
                f"the image holds {stored} bytes of memory, where the processes had {floor} bytes that no "
                "file holds: something has been left out",
                "IMAGE:TOO_SMALL",
                stored=stored,
                floor=floor,
            )
        )
    return found


def check_restored_memory(before: int, after: int) -> list[Finding]:
    """Check that the restored processes have the anonymous memory (bytes) that the dumped ones had.

    Finding: ``IMAGE:NOT_RESTORED``.
    """
    if before <= 0 or after < before * FLOOR_SHARE:
        return [
            finding(
                f"the restored processes have {after} bytes of anonymous memory, the dumped had {before}",
                "IMAGE:NOT_RESTORED",
                before=before,
                after=after,
            )
        ]
    return []


def _pages(pagemap: Path) -> tuple[str, int]:
    """Return the name of the file with a pagemap's pages and the bytes that it has to hold."""
    entries = list(_messages(pagemap))
    if not entries:
        raise ImageError("it has no head")
    listed = 0
    for entry in entries[1:]:
        count = entry.get(5) or entry.get(2, 0)
        # Images of older versions have no flags; there ``in_parent`` (3) says where the content is.
        present = entry[4] & _PRESENT if 4 in entry else not entry.get(3)
        listed += count * PAGE if present else 0
    return f"pages-{entries[0].get(1, 0)}.img", listed


def _messages(path: Path) -> Iterator[dict[int, int]]:
    """Yield the integer fields of each message, by field number."""
    data = path.read_bytes()
    if len(data) < 8 or struct.unpack_from("<II", data) != (_COMMON_MAGIC, _PAGEMAP_MAGIC):
        raise ImageError("its magic numbers are not those of a pagemap")
    position = 8
    while position < len(data):
        if position + 4 > len(data):
            raise ImageError("it ends within an entry's length")
        (size,) = struct.unpack_from("<I", data, position)
        position += 4
        if position + size > len(data):
            raise ImageError("it ends within an entry")
        yield _fields(data[position : position + size])
        position += size


def _fields(message: bytes) -> dict[int, int]:
    fields: dict[int, int] = {}
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        if key & 7:
            raise ImageError(f"field {key >> 3} is no integer")
        fields[key >> 3], position = _varint(message, position)
    return fields


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
    raise ImageError("it ends within a number")
