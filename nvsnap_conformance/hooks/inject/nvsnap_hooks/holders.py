"""Finds what in this process holds an object, and puts something else in its place.

An engine keeps a process group in more places than its coordinator: samplers, schedulers, communicators.
One that is missed keeps a dead group and fails, or hangs, at its next use.
"""

from __future__ import annotations

import contextlib
import gc
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvsnap_hooks.errors import ReleasedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_BATCH = 10_000
"""Objects whose referents are asked for at once."""


@dataclass(frozen=True)
class Holder:
    """One place that holds the object: ``where`` for people, ``put`` replaces what is there."""

    where: str
    put: Callable[[Any], None]


class Tombstone:
    """Stands where a released resource was; any use of it raises :class:`ReleasedError`."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, attribute: str) -> Any:
        name = self.__dict__["name"]
        raise ReleasedError(
            f"{name} is released for a checkpoint (wanted: its {attribute}); restore comes first"
        )

    def __repr__(self) -> str:
        return f"<released {self.__dict__['name']}>"


@contextlib.contextmanager
def thawed() -> Iterator[None]:
    """Let the collector see frozen objects too: vLLM freezes its start-up heap, which hides the holders."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def instances_of(*kinds: type) -> list[Any]:
    """Return every living instance of ``kinds`` and of what derives from them, by one pass over the heap.

    By exact types: ``isinstance`` asks proxies of torch for their ``__class__``, which takes long and warns.
    """
    wanted: set[type] = set()
    left = list(kinds)
    while left:
        kind = left.pop()
        if kind not in wanted:
            wanted.add(kind)
            left += type.__subclasses__(kind)
    with thawed():
        return [thing for thing in gc.get_objects() if type(thing) in wanted]


def find_holders(targets: list[Any], *, ignore: tuple[Any, ...] = ()) -> list[tuple[list[Holder], list[str]]]:
    """Return for each target its replaceable holders and the names of those that cannot be replaced.

    One pass over the whole heap (50 to 100 ms in a vLLM worker) serves all targets. ``ignore`` are
    containers that are looked after otherwise. Dictionary *keys* are no holders here: only
    torch.distributed's own registries use a group as a key, and destroying the group clears them.
    Objects of this package are passed over.
    """
    skipped = {id(item) for item in ignore} | {id(targets)}
    with thawed():
        referrers = gc.get_referrers(*targets)
    results: list[tuple[list[Holder], list[str]]] = [([], []) for _ in targets]
    for referrer in referrers:
        if id(referrer) in skipped or isinstance(referrer, types.FrameType):
            continue
        if type(referrer).__module__.startswith(__package__):
            continue
        direct = {id(item) for item in gc.get_referents(referrer)}
        for target, (found, stuck) in zip(targets, results, strict=True):
            if id(target) not in direct:
                continue
            places = list(_places(referrer, target))
            found.extend(places)
            if not places and not (isinstance(referrer, dict) and target in referrer):
                stuck.append(f"{type(referrer).__module__}.{type(referrer).__qualname__}")
    return results


def find_untracked(target: Any) -> list[Holder]:
    """Return the places in dictionaries that the collector does not track, which :func:`find_holders` misses.

    CPython tracks no dictionary of nothing but numbers, text and objects like process groups; it may be an
    object's own, once anybody has asked for its ``__dict__``. One such holder keeps a destroyed group alive.
    A slow pass over the whole heap, for when something is alive that nobody seems to hold.
    """
    found: dict[int, dict[Any, Any]] = {}
    with thawed():
        objects = gc.get_objects()
    for start in range(0, len(objects), _BATCH):
        for referent in gc.get_referents(*objects[start : start + _BATCH]):
            if type(referent) is dict and not gc.is_tracked(referent):
                found[id(referent)] = referent
    return [place for referent in found.values() for place in _places(referent, target)]


def _places(referrer: Any, target: Any) -> Iterator[Holder]:
    if isinstance(referrer, dict):
        for key, value in list(referrer.items()):
            if value is target:
                yield Holder(f"dict[{key!r:.40}]", _item(referrer, key))
    elif isinstance(referrer, list):
        for index, value in enumerate(referrer):
            if value is target:
                yield Holder(f"list[{index}]", _item(referrer, index))
    elif isinstance(referrer, types.CellType):
        yield Holder("closure", _attribute(referrer, "cell_contents"))
    else:
        for name in _attribute_names(referrer):
            if getattr(referrer, name, None) is target:
                yield Holder(f"{type(referrer).__qualname__}.{name}", _attribute(referrer, name))


def _attribute_names(thing: Any) -> list[str]:
    names = list(getattr(thing, "__dict__", ()))
    for klass in type(thing).__mro__:
        slots = klass.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return names


def _item(container: Any, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        container[key] = value

    return put


def _attribute(owner: Any, name: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        setattr(owner, name, value)

    return put
