"""Reading files of others: what is no regular file is told and never waited for."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance import files

if TYPE_CHECKING:
    from pathlib import Path


def test_regular_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("äö", encoding="utf-8")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert files.read_bytes(link, most=4) == "äö".encode()
    assert files.read_text(path) == "äö"


def test_what_is_no_regular_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path, kind in ((tmp_path / "pipe", "pipe"), (tmp_path / "zero", "character"), (tmp_path, "folder")):
        with pytest.raises(OSError, match=kind) as caught:
            files.read_bytes(path)
        assert caught.value.filename == str(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="socket"):
            files.read_bytes(tmp_path / "socket")


def test_more_than_memory_bears_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    with pytest.raises(OSError, match="more than 1000 bytes"):
        files.read_bytes(tmp_path / "huge", most=1000)
    with pytest.raises(OSError, match="more than"):
        files.read_bytes(tmp_path / "huge")
