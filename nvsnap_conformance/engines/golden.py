"""Golden engines: started cold once, dumped, and from then on restored, a fresh one in about a second.

Each restored engine has namespaces, home, log and TMPDIR of its own. It has the same pids, ports and random
state as every other one from its image; so may two of them name a socket or a shared-memory file alike,
which does no harm, since none sees the other's.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure
from nvsnap_conformance.checkpoint.criu_manifest import Manifest
from nvsnap_conformance.checkpoint.criu_preflight import outside_connections
from nvsnap_conformance.checkpoint.criu_program import check_kernel, find_criu
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.golden_key import GoldenKey, NotGoldenError, golden_key
from nvsnap_conformance.engines.golden_store import DamagedImageError, Entry, GoldenStore
from nvsnap_conformance.engines.namespaces import isolation_gap
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.errors import EnvironmentFailure, NvsnapError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from nvsnap_conformance.engines.protocol import EngineHandle, LaunchConfig

    Say = Callable[[str], None]

RESTORE_SECONDS = 60.0
"""Allowance for a restore until the engine serves, in seconds; it takes 1 to 3 s."""

DUMP_SECONDS = 120.0

_FAILED = "failed-restore"


class RestorableEngine(Protocol):
    """An adapter whose engines can be brought up from an image."""

    name: str

    def launch(self, config: LaunchConfig) -> EngineHandle:
        """Start an engine and return at once."""

    def launch_plan(self, config: LaunchConfig) -> tuple[list[str], Mapping[str, str]]:
        """Return the command line and the environment that :meth:`launch` would use."""

    def attach(self, config: LaunchConfig, process: EngineProcess) -> EngineHandle:
        """Return the handle of an engine that runs already, in ``process``."""


@dataclass(frozen=True)
class Start:
    """An engine that serves, and how it came up.

    ``seconds`` is from the call to ready; ``reason`` says why it was a cold start, or where the image came
    from. ``image`` has facts of the image (key, bytes, CRIU, seconds of the cold start that it stands for).
    """

    handle: EngineHandle
    start: Literal["cold", "golden"]
    seconds: float
    reason: str
    image: dict[str, Any]


def bring_up(
    engine: RestorableEngine,
    config: LaunchConfig,
    *,
    cold: bool,
    seconds: float,
    store: GoldenStore | None = None,
    say: Say = lambda _text: None,
) -> Start:
    """Bring an engine up: from its image, or cold, and then its image is made for the next time.

    ``cold`` forbids images. Whatever keeps an engine from one is in the reason, and it starts cold.
    ``seconds`` is the allowance of a cold start; the wait for another run that makes the image has its own.
    Raises ``EngineStartError`` and the like where the engine itself does not come up.
    """
    began = time.monotonic()

    def started(handle: EngineHandle, reason: str, image: dict[str, Any] | None = None) -> Start:
        how: Literal["cold", "golden"] = "golden" if image else "cold"
        return Start(handle, how, time.monotonic() - began, reason, image or {})

    if cold:
        return started(_cold(engine, config, Deadline.after(seconds)), "a cold start was asked for")
    try:
        maker = _Golden(engine, config, store or GoldenStore(), say)
    except NotGoldenError as refusal:
        return started(_cold(engine, config, Deadline.after(seconds)), str(refusal))
    restored = maker.from_store()
    if restored is None:
        say(f"no image of this engine yet ({maker.key.name}): a cold start, which makes it")
        with maker.store.maker(maker.key.name):
            # Another run may have made it while this one waited.
            restored = maker.from_store()
            if restored is None:
                return started(*maker.make(Deadline.after(seconds)))
    handle, entry = restored
    return started(handle, f"restored from {maker.key.name}", maker.facts(entry))


def _cold(engine: RestorableEngine, config: LaunchConfig, deadline: Deadline) -> EngineHandle:
    handle = engine.launch(config)
    try:
        handle.ready(deadline)
    except BaseException:
        handle.process.close()
        raise
    return handle


class _Golden:
    """One engine's image: looked for, restored, made. Raises :class:`NotGoldenError` if there can be none."""

    def __init__(self, engine: RestorableEngine, config: LaunchConfig, store: GoldenStore, say: Say) -> None:
        if config.processor != "cpu":
            raise NotGoldenError("it holds GPU memory, which is in no image of its processes")
        gap = isolation_gap()
        if gap is not None or not config.isolate:
            raise NotGoldenError(f"it has no namespaces of its own ({gap or 'not asked for'})")
        try:
            criu = find_criu()
        except EnvironmentFailure as failure:
            raise NotGoldenError(f"{failure.what} ({failure.cause}); {failure.next_step}") from failure
        argv, env = engine.launch_plan(config)
        self.store = store
        self.key: GoldenKey = golden_key(adapter=engine.name, config=config, argv=argv, env=env, criu=criu)
        self._engine = engine
        self._config = config
        self._say = say
        self._criu = criu
        self._checkpointer = CriuCheckpointer(criu, clients=False)
        self._notes: list[str] = []

    def from_store(self) -> tuple[EngineHandle, Entry] | None:
        """Restore the engine if there is an image that will do; one that will not is forgotten."""
        try:
            entry = self.store.open(self.key.name)
        except DamagedImageError as damage:
            self._note(f"the image {self.key.name} is damaged and is made anew: {damage}")
            return None
        if entry is None:
            return None
        try:
            handle = self._restore(entry, Deadline.after(RESTORE_SECONDS))
        except NvsnapError as failure:
            self.store.forget(self.key.name)
            self._clear_workdir()
            self._note(f"the image {self.key.name} cannot be restored and is made anew: {failure.what}")
            return None
        return handle, entry

    def _restore(self, entry: Entry, deadline: Deadline) -> EngineHandle:
        """Restore the engine from ``entry``, which is closed with it, or where this fails."""
        try:
            manifest = Manifest.read(entry.folder)
            process = EngineProcess.vacant(workdir=self._config.workdir, root_pid=manifest.root_pid)
        except BaseException:
            entry.close()
            raise
        process.keep_until_closed(entry.close)
        try:
            self._checkpointer.load(process, entry.folder, deadline)
            handle = self._engine.attach(self._config, process)
            handle.ready(deadline)
        except BaseException:
            process.close()
            raise
        return handle

    def facts(self, entry: Entry) -> dict[str, Any]:
        """Return what a record says of the image."""
        return {
            "key": self.key.name,
            "bytes": entry.facts["bytes"],
            "cold_seconds": entry.facts["cold_seconds"],
            "criu": entry.facts["criu"],
        }

    def make(self, deadline: Deadline) -> tuple[EngineHandle, str, dict[str, Any] | None]:
        """Start the engine cold, dump it, and bring it back from its image, in the same namespaces.

        ``deadline`` is the cold start's. An engine that cannot be dumped serves on as a cold one; for one
        that cannot be brought back another is started cold. The reason says so.
        """
        began = time.monotonic()
        handle = _cold(self._engine, self._config, deadline)
        cold_seconds = time.monotonic() - began
        self._say(f"ready after {cold_seconds:.1f} s, taking its image")
        entry = self.store.new_folder(self.key.name)
        try:
            check_kernel(self._criu)
            # Connections of the calls that were just made go within a moment.
            wait_for(
                "the suite's own connections to end",
                lambda: not outside_connections(handle.process),
                Deadline.after(5.0),
            )
            self._checkpointer.dump(handle.process, entry.folder, Deadline.after(DUMP_SECONDS))
        except NvsnapError as failure:
            self.store.drop(entry)
            if isinstance(failure, CriuFailure) and not failure.engine_runs:
                handle.process.close()
                raise
            self._note(f"no image could be taken of it: {failure.what} ({failure.cause[:300]})")
            return handle, "; ".join(self._notes), None
        except BaseException:
            self.store.drop(entry)
            handle.process.close()
            raise
        try:
            self._checkpointer.load(handle.process, entry.folder, Deadline.after(RESTORE_SECONDS))
            handle.ready(Deadline.after(RESTORE_SECONDS))
            facts = {
                "cold_seconds": round(cold_seconds, 3),
                "criu": self._criu.as_json(),
                "parts": self.key.parts,
            }
            try:
                entry = self.store.publish(self.key.name, entry, facts)
            except DamagedImageError as damage:
                self.store.drop(entry)
                self._note(f"its image cannot be kept: {damage}")
                return handle, "; ".join(self._notes), None
            handle.process.keep_until_closed(entry.close)
        except NvsnapError as failure:
            self.store.drop(entry)
            handle.process.close()
            self._clear_workdir()
            self._note(f"its image could not be restored: {failure.what} ({failure.cause[:300]})")
            handle = _cold(self._engine, self._config, Deadline.after(deadline.budget))
            return handle, "; ".join(self._notes), None
        except BaseException:
            self.store.drop(entry)
            handle.process.close()
            raise
        self._notes.append(f"its image was made now, after a cold start of {cold_seconds:.1f} s")
        return handle, "; ".join(self._notes), self.facts(entry)

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._say(text)

    def _clear_workdir(self) -> None:
        """Put away what a failed restore left in the launch's folder, which serves one launch."""
        workdir: Path = self._config.workdir
        away = workdir / _FAILED
        away.mkdir(exist_ok=True)
        for entry in list(workdir.iterdir()):
            if entry != away:
                target = away / entry.name
                if target.is_dir() and not target.is_symlink():
                    shutil.rmtree(target)
                entry.rename(target)
