"""TOML files through pydantic models, with errors that name the file, the key and the nearest valid key."""

from __future__ import annotations

import tomllib
import types
import typing
from typing import Annotated, Any, TypeVar, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from nvsnap_conformance.files import read_text
from nvsnap_conformance.suggest import did_you_mean

if typing.TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.errors import NvsnapError

M = TypeVar("M", bound=BaseModel)

Integer = Annotated[int, Field(strict=True)]
"""A whole number: no boolean, no text and no ``1.0`` is taken for one."""

Flag = Annotated[bool, Field(strict=True)]
"""``true`` or ``false``, and nothing that could stand for them."""

WorldSize = Annotated[int, Field(strict=True, ge=1, le=1024)]
"""How many ranks an engine has. The bound is far above any node's, and keeps out slips of the pen."""


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError(f"{name!r} can be no name of an environment variable: it is empty or has a '='")
    return name


Environment = dict[Annotated[str, AfterValidator(_variable)], str]
"""Environment variables by name, as execve(2) can pass them on."""


class StrictModel(BaseModel):
    """Base of every model that is read from a file: immutable, and no unknown key passes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_toml(path: Path, *, error: type[NvsnapError], what: str) -> dict[str, Any]:
    """Parse the TOML file ``path``; raise ``error`` where it is missing, unreadable or no TOML."""
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise error(
            f"{what} {path} does not exist", next_step="check the path, or name a shipped one"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(
            f"{what} {path} cannot be read: {problem}",
            next_step="name a regular file in UTF-8 that you have the right to read",
        ) from problem
    except (ValueError, RecursionError) as problem:  # no TOML, or a number or a nesting beyond all bounds
        raise error(
            f"{what} {path} is no valid TOML: {problem}", next_step="correct the file at that line"
        ) from problem


CORRECT_IT = "correct that key in the file"


def read_model(
    path: Path, model: type[M], *, error: type[NvsnapError], what: str, next_step: str = CORRECT_IT
) -> M:
    """Read ``path`` into ``model``; raise ``error`` with file and key for everything that does not fit."""
    data = read_toml(path, error=error, what=what)
    return validate(data, model, path=path, error=error, what=what, next_step=next_step)


def validate(
    data: Any,
    model: type[M],
    *,
    path: Path,
    error: type[NvsnapError],
    what: str,
    next_step: str = CORRECT_IT,
) -> M:
    """Validate ``data`` (read from ``path``) as ``model``; raise ``error`` with all the problems found.

    ``next_step`` is said unless the nearest valid key is known.
    """
    if with_nul := _with_nul(data):
        raise error(
            f"{what} {path}: key {_dotted(with_nul)!r}: it holds a NUL byte, which no argument, variable or "
            "path can have",
            next_step=next_step,
        )
    try:
        return model.model_validate(data)
    except ValidationError as problem:
        told = problem.errors()
        lines = [
            _explain(entry["loc"], entry["type"], entry["msg"])
            for entry in told
            # A list with a wrong item counts as too short as well, for the item is left out of it.
            if entry["type"] != "too_short" or not _has_below(told, entry["loc"])
        ]
        unknown = next((e["loc"] for e in problem.errors() if e["type"] == "extra_forbidden"), None)
        raise error(
            f"{what} {path}: " + "; ".join(lines),
            next_step=did_you_mean(str(unknown[-1]), _keys(model, unknown[:-1])) if unknown else next_step,
        ) from None


def _has_below(told: list[Any], loc: tuple[int | str, ...]) -> bool:
    return any(len(e["loc"]) > len(loc) and e["loc"][: len(loc)] == loc for e in told)


def _with_nul(data: Any, loc: tuple[int | str, ...] = ()) -> tuple[int | str, ...] | None:
    """Return where in ``data`` a text or a key has a NUL byte, ``None`` where none has."""
    entries: typing.Iterable[tuple[int | str, Any]] = ()
    if isinstance(data, str):
        return loc if "\0" in data else None
    if isinstance(data, dict):
        entries = data.items()
    elif isinstance(data, list):
        entries = enumerate(data)
    for key, value in entries:
        inner = (*loc, key)
        if isinstance(key, str) and "\0" in key:
            return inner
        if found := _with_nul(value, inner):
            return found
    return None


def _explain(loc: tuple[int | str, ...], kind: str, message: str) -> str:
    place = _dotted(loc) or "the file"
    if kind == "extra_forbidden":
        return f"unknown key {place!r}"
    if kind == "missing":
        return f"key {place!r} is missing"
    return (
        f"key {place!r}: {message.removeprefix('Value error, ')}"
        if loc
        else message.removeprefix("Value error, ")
    )


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are valid at ``loc``."""
    current: Any = model
    for part in loc:
        if isinstance(part, str) and _is_model(current):
            field = next((f for name, f in current.model_fields.items() if part in (name, f.alias)), None)
            current = _innermost(field.annotation) if field else None
    return [f.alias or name for name, f in current.model_fields.items()] if _is_model(current) else []


def _innermost(annotation: Any) -> Any:
    """Return the model inside of ``tuple[Model, ...]``, ``Model | None`` and the like."""
    if _is_model(annotation):
        return annotation
    if typing.get_origin(annotation) in (Union, types.UnionType, tuple, list, dict):
        for argument in typing.get_args(annotation):
            found = _innermost(argument)
            if _is_model(found):
                return found
    return None


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)
