"""Fixture models: made on the spot, kept in the cache, the same bytes everywhere."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from nvsnap_conformance import large_llama_gpu, tiny_llama, tiny_llama_gpu, tiny_moe
from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.errors import EnvironmentFailure, TargetError
from nvsnap_conformance.suggest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

_RECIPES: dict[str, Callable[[Path], None]] = {
    "tiny-llama": tiny_llama.write,
    "tiny-moe": tiny_moe.write,
    "tiny-llama-gpu": tiny_llama_gpu.write,
    "large-llama-gpu": large_llama_gpu.write,
}
_SOURCES = {
    "tiny-llama": (tiny_llama.__file__,),
    "tiny-moe": (tiny_moe.__file__, tiny_llama.__file__),
    "tiny-llama-gpu": (tiny_llama_gpu.__file__, tiny_llama.__file__),
    "large-llama-gpu": (large_llama_gpu.__file__, tiny_llama_gpu.__file__, tiny_llama.__file__),
}

FIXTURE_MODELS: tuple[str, ...] = tuple(_RECIPES)
"""The names that a target may give as its model instead of a folder."""

_SUMS = "SHA256SUMS.json"


def check_model(name_or_path: str, *, where: str = "the model") -> None:
    """Raise :class:`TargetError` unless ``name_or_path`` is a fixture model or a model's folder."""
    if name_or_path in _RECIPES:
        return
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise TargetError(
            f"{where}: {folder} is neither a folder nor a fixture model",
            cause="the path is wrong, or relative to another folder than the target file's",
            next_step=did_you_mean(folder.name, FIXTURE_MODELS),
        )
    if not (folder / "config.json").is_file():
        raise TargetError(
            f"{where}: {folder} holds no config.json",
            cause="it is not the folder of a model in the Hugging Face layout",
            next_step="name the folder that holds config.json, the weights and the tokenizer",
        )


def ensure_model(name_or_path: str, *, on_progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder of a model: a fixture model is made in the cache, a path is taken as it is.

    A fixture model is keyed by its recipe's source and verified by checksum at every use. Raises
    :class:`TargetError` for a path that is no model, :class:`EnvironmentFailure` where the cache cannot
    be written.
    """
    check_model(name_or_path)
    if name_or_path not in _RECIPES:
        return Path(name_or_path).expanduser().absolute()
    source = b"".join(Path(file).read_bytes() for file in _SOURCES[name_or_path])
    folder = cache_dir("models") / f"{name_or_path}-{hashlib.sha256(source).hexdigest()[:12]}"
    try:
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not _intact(folder):
                if on_progress:
                    on_progress(f"making the fixture model {name_or_path}")
                _make(name_or_path, folder)
    except OSError as error:
        raise EnvironmentFailure(
            f"the fixture model {name_or_path} cannot be written to {folder}: {error.strerror}",
            cause="the disk is full or the cache cannot be written",
            next_step="free some space, or set NVS_CACHE_DIR to another folder",
        ) from error
    return folder


def _make(name: str, folder: Path) -> None:
    """Write the model beside ``folder`` and move it there whole."""
    partial = folder.with_name(f"{folder.name}.partial")
    for old in (partial, folder):
        if old.exists():
            shutil.rmtree(old)
    partial.mkdir()
    _RECIPES[name](partial)
    sums = json.dumps(_checksums(partial), indent=1, sort_keys=True)
    (partial / _SUMS).write_text(sums + "\n", encoding="utf-8")
    partial.rename(folder)


def _intact(folder: Path) -> bool:
    try:
        recorded = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(recorded) and recorded == _checksums(folder)


def _checksums(folder: Path) -> dict[str, str]:
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != _SUMS}


def _sha256(path: Path) -> str:
    status = path.stat()
    return _sha256_of(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.cache
def _sha256_of(path: Path, *_: int) -> str:
    """Read a file once for each process: every engine's start verifies its model, which may be large."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
