"""The store of golden images: whatever lies in it, an index is taken or refused, and never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvsnap_conformance.engines.golden_store import DamagedImageError, Entry, GoldenStore, inventory, verify

if TYPE_CHECKING:
    from collections.abc import Callable

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_LIKE_AN_INDEX = st.fixed_dictionaries(
    {},
    optional={
        "folder": st.sampled_from(["../..", "/", ".", "", "a\0b", "entries", "gone"]) | _JSON,
        "files": st.dictionaries(st.sampled_from(["image", "../x", "/etc/passwd", "a\0b"]), _JSON) | _JSON,
        "bytes": _JSON,
    },
)


def add(store: GoldenStore, key: str, content: bytes = b"content") -> Path:
    made = store.new_folder(key)
    (made.folder / "image").write_bytes(content)
    store.publish(key, made, {}).close()
    return made.folder


def usable(store: GoldenStore, key: str) -> bool:
    entry = store.open(key)
    if entry is not None:
        entry.close()
    return entry is not None


def refuses_and_makes_anew(store: GoldenStore, key: str) -> None:
    """Assert that what lies at ``key`` is damaged once, gone then, and replaced by the next maker."""
    store.evict()
    with pytest.raises(DamagedImageError):
        store.open(key)
    assert store.open(key) is None
    assert not os.path.lexists(store.root / f"{key}.json")
    add(store, key)
    assert usable(store, key)


@settings(max_examples=30, deadline=None)
@given(content=(_JSON | _LIKE_AN_INDEX).map(lambda value: json.dumps(value).encode()) | st.binary())
def test_no_content_of_an_index_is_more_than_a_damaged_image(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = GoldenStore(Path(folder), limit_bytes=1 << 30)
        kept = add(store, "other")
        (store.root / "key.json").write_bytes(content)
        refuses_and_makes_anew(store, "key")
        assert usable(store, "other")
        assert kept.is_dir()


@pytest.mark.parametrize(
    "change",
    [
        {"files": None},
        {"files": {}},
        {"files": {"image": [True, "0" * 64]}},
        {"files": {"image": ["7", "0" * 64]}},
        {"files": {"image": [7, "sum"]}},
        {"bytes": "many"},
        {"bytes": True},
        {"bytes": -1},
        {"folder": "../entries"},
        {"folder": "nowhere"},
        {"cold_seconds": "1"},
        {"criu": []},
    ],
)
def test_one_wrong_value_is_a_damaged_index(tmp_path: Path, change: dict[str, Any]) -> None:
    store = GoldenStore(tmp_path)
    add(store, "key")
    pointer = tmp_path / "key.json"
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), **change}))
    refuses_and_makes_anew(store, "key")


@pytest.mark.parametrize("lacking", ["files", "folder", "bytes"])
def test_an_index_that_lacks_a_key_is_damaged(tmp_path: Path, lacking: str) -> None:
    store = GoldenStore(tmp_path)
    add(store, "key")
    pointer = tmp_path / "key.json"
    facts = json.loads(pointer.read_text())
    del facts[lacking]
    pointer.write_text(json.dumps(facts))
    with pytest.raises(DamagedImageError, match=lacking):
        store.open("key")
    assert not pointer.exists()


def _folder(pointer: Path) -> None:
    (pointer / "inner").mkdir(parents=True)


def _dangling(pointer: Path) -> None:
    pointer.symlink_to("nowhere")


def _loop(pointer: Path) -> None:
    pointer.symlink_to(pointer.name)


def _to_another(pointer: Path) -> None:
    pointer.symlink_to("other.json")


def _fifo(pointer: Path) -> None:
    os.mkfifo(pointer)


@pytest.mark.parametrize("put", [_folder, _dangling, _loop, _to_another, _fifo])
def test_what_is_no_file_is_no_index(tmp_path: Path, put: Callable[[Path], None]) -> None:
    store = GoldenStore(tmp_path)
    add(store, "other")
    put(tmp_path / "key.json")
    refuses_and_makes_anew(store, "key")
    assert usable(store, "other")


def test_a_stray_file_never_stops_eviction(tmp_path: Path) -> None:
    store = GoldenStore(tmp_path, limit_bytes=1)
    folder = add(store, "old", b"x" * 8192)
    os.utime(tmp_path / "old.json", (1, 1))  # used last long ago
    (tmp_path / "x.json").write_text("[]")
    (tmp_path / "entries/stray").write_text("")
    (tmp_path / "entries/link").symlink_to("/")
    assert store.evict() == [folder.name]
    assert not folder.exists()


# Links in an image -------------------------------------------------------------------------------


def linked(store: GoldenStore, target: str) -> Entry:
    made = store.new_folder("key")
    (made.folder / "image").write_bytes(b"content")
    (made.folder / "other").write_bytes(b"content")
    (made.folder / "link").symlink_to(target)
    return made


def test_a_link_that_leads_elsewhere_is_a_changed_image(tmp_path: Path) -> None:
    made = linked(GoldenStore(tmp_path), "image")
    files = inventory(made.folder)
    verify(made.folder, files)
    (made.folder / "link").unlink()
    (made.folder / "link").symlink_to("other")  # as long as before, and with the same content behind it
    with pytest.raises(DamagedImageError, match="the content of link has changed"):
        verify(made.folder, files)
    made.close()


@pytest.mark.parametrize("target", ["/etc/passwd", "../../..", "nowhere/../../../x"])
def test_a_link_that_leads_out_is_refused_when_made_and_when_found(tmp_path: Path, target: str) -> None:
    store = GoldenStore(tmp_path)
    made = linked(store, target)
    with pytest.raises(DamagedImageError, match="link leads out of the image"):
        store.publish("key", made, {})
    assert store.open("key") is None
    (made.folder / "link").unlink()
    store.publish("key", made, {}).close()
    (made.folder / "image").unlink()
    (made.folder / "image").symlink_to(target)
    with pytest.raises(DamagedImageError, match="image leads out"):
        store.open("key")


def test_a_folder_of_an_image_that_became_a_link_is_refused(tmp_path: Path) -> None:
    store = GoldenStore(tmp_path / "store")
    made = store.new_folder("key")
    (made.folder / "inner").mkdir()
    (made.folder / "inner/image").write_bytes(b"content")
    store.publish("key", made, {}).close()
    shutil.move(made.folder / "inner", tmp_path / "away")
    (made.folder / "inner").symlink_to(tmp_path / "away")
    with pytest.raises(DamagedImageError, match="leads out"):
        store.open("key")


def test_a_folder_in_a_file_s_place_is_a_damaged_image(tmp_path: Path) -> None:
    store = GoldenStore(tmp_path)
    folder = add(store, "key")
    with contextlib.suppress(FileNotFoundError):
        (folder / "image").unlink()
    (folder / "image").mkdir()
    with pytest.raises(DamagedImageError, match="image"):
        store.open("key")
