"""From a request to a reply: finds the implementation, calls it, and turns every failure into a value.

A request is ``{"nonce", "implementation": "module:Class", "path", "options", "method", "arguments"}``, a
reply ``{"nonce", "rank", "pid", "ok", "value" | "error": {"type", "message", "traceback"},
"loader": {"file", "version"}, "clock": [began, ended], "settings"}`` with ``clock`` in seconds of the rank's
``time.monotonic()`` and ``settings`` as :func:`nvsnap_hooks.making.noted` has them. An exception that left
here would put vLLM's per-rank replies out of step for good (``MultiprocExecutor.collective_rpc``, 0.27 to
0.33), so none does, except by a known-bad implementation's intent
(:class:`nvsnap_hooks.errors.PassThrough`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_hooks import VERSION, forwards, loader, making
from nvsnap_hooks.builtin import METHODS, Builtin
from nvsnap_hooks.errors import BadRequest, NotJson, PassThrough

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PRETEND = "pretend_engine_version"
"""Reserved option: the engine version that the implementation is made to see during the call.

A version for all ranks, or a table from rank (as text) to version for those that are to differ.
"""

FRESH_THREAD = "fresh_thread"
"""Reserved option: where it is true, the call is made in a thread of its own, and its end is waited for."""

_instances: dict[str, Any] = {}


def forget() -> None:
    """Drop every implementation's instance, and with it what it had kept in memory."""
    _instances.clear()


def answer(worker: Any, request: Any) -> dict[str, Any]:
    """Run one request on this rank and return the reply."""
    began = time.monotonic()
    fields = request if isinstance(request, dict) else {}
    reply: dict[str, Any] = {
        "nonce": fields.get("nonce"),
        "rank": getattr(worker, "rank", None),
        "pid": os.getpid(),
        "loader": {"file": loader.__file__, "version": VERSION},
    }
    try:
        forwards.install(worker)
        with making.noted() as reply["settings"]:
            value = _call(worker, fields)
        reply.update(ok=True, value=value)
    except PassThrough:
        raise
    except Exception as error:
        reply.update(
            ok=False,
            error={
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            },
        )
    reply["clock"] = [began, time.monotonic()]
    # Only a known-bad implementation meddles with the reply as a whole.
    meddle = getattr(_instances.get(_key(fields)), "nvsnap_finish_reply", None)
    return reply if meddle is None else meddle(reply)


def _call(worker: Any, request: dict[str, Any]) -> Any:
    method = request.get("method")
    if not isinstance(method, str) or method.startswith("_"):
        raise BadRequest(f"the request names no public method: {method!r}")
    options = dict(request.get("options") or {})
    pretended = options.pop(PRETEND, None)
    if isinstance(pretended, dict):
        pretended = pretended.get(str(worker.rank))
    in_thread = _in_fresh_thread if options.pop(FRESH_THREAD, False) else _in_this_thread
    with _pretending(pretended):
        value = in_thread(functools.partial(_run, worker, request, options, method))
    try:
        value = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise NotJson(f"{method} returned {type(value).__name__}, which is not JSON: {error}") from error
    forwards.note(method)
    return value


def _run(worker: Any, request: dict[str, Any], options: dict[str, Any], method: str) -> Any:
    target = Builtin(worker) if method in METHODS else _instance(worker, request, options)
    function = getattr(target, method, None)
    if not callable(function):
        raise BadRequest(f"{request.get('implementation')} has no method {method!r}")
    return function(**(request.get("arguments") or {}))


def _in_this_thread(run: Callable[[], Any]) -> Any:
    return run()


def _in_fresh_thread(run: Callable[[], Any]) -> Any:
    """Run in a new thread; what it raises is raised here."""
    values: list[Any] = []
    raised: list[BaseException] = []

    def note() -> None:
        try:
            values.append(run())
        except BaseException as error:
            raised.append(error)

    # Of those that do not keep the process: the engine's own way to end a worker is not to wait for a hook.
    thread = threading.Thread(target=note, name="nvsnap fresh thread", daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return values[0]


def _key(request: dict[str, Any]) -> str:
    return json.dumps([request.get(name) for name in ("implementation", "path", "options")], sort_keys=True)


def _instance(worker: Any, request: dict[str, Any], options: dict[str, Any]) -> Any:
    key = _key(request)
    if key not in _instances:
        implementation = request.get("implementation")
        module_name, separator, class_name = str(implementation).partition(":")
        if not (separator and module_name and class_name):
            raise BadRequest(f"not an implementation: {implementation!r}; the form is module:Class")
        try:
            found = getattr(_module(module_name, request.get("path")), class_name)
        # A module may raise anything while it is imported, and one that ends the interpreter ends a rank.
        except (Exception, SystemExit) as error:
            raise BadRequest(
                f"{implementation} cannot be imported in the engine's interpreter: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not callable(found):
            raise BadRequest(
                f"{implementation} cannot be imported in the engine's interpreter: {found!r} is not a class"
            )
        _instances[key] = found(worker, options)
    return _instances[key]


def _module(name: str, path: str | None) -> Any:
    """Import ``name``, from below ``path`` where one is given, whatever has been imported under it before."""
    if path is None:
        return importlib.import_module(name)
    folder = Path(path).resolve()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    top = name.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if loaded is not None and folder not in Path(loaded).resolve().parents:
        for stale in [m for m in sys.modules if m == top or m.startswith(f"{top}.")]:
            del sys.modules[stale]
        importlib.invalidate_caches()
    return importlib.import_module(name)


@contextlib.contextmanager
def _pretending(version: str | None) -> Iterator[None]:
    """Make the engine's version read as ``version`` for whoever asks, ``None`` for as it is."""
    if version is None:
        yield
        return
    import vllm

    real_attribute, real_lookup = vllm.__version__, importlib.metadata.version

    def lookup(distribution_name: str) -> str:
        return version if distribution_name.startswith("vllm") else real_lookup(distribution_name)

    vllm.__version__ = version
    importlib.metadata.version = lookup
    try:
        yield
    finally:
        vllm.__version__ = real_attribute
        importlib.metadata.version = real_lookup
