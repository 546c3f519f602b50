"""Checkpointing to disk: CRIU takes the engine's whole process tree away and brings it back.

It runs inside the engine's namespaces, so pids, ports and paths are the engine's own. An image can be
loaded any number of times, into the same namespaces or new ones. A dump is a transaction: until CRIU's own
files, /dev/shm and the engine's home are all on disk, the engine is only stopped, and a failure lets it run.
"""

from __future__ import annotations

import os
import select
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.criu_failure import CriuFailure, Kind, read_log
from nvsnap_conformance.checkpoint.criu_files import check_visible, put_files, save_files, tree_bytes
from nvsnap_conformance.checkpoint.criu_image import anonymous_bytes, stored_bytes
from nvsnap_conformance.checkpoint.criu_manifest import (
    FILES,
    IMAGES,
    MANIFEST,
    WORK,
    Manifest,
    check_sizes,
    describe,
    limits_of,
)
from nvsnap_conformance.checkpoint.criu_preflight import check_before_dump, check_before_restore
from nvsnap_conformance.checkpoint.criu_program import Criu, find_criu
from nvsnap_conformance.checkpoint.freeze import read_states
from nvsnap_conformance.checkpoint.protocol import CheckpointResult, ProcessState
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure, NvsnapError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from nvsnap_conformance.engines.process import EngineProcess

IN_FLIGHT_ATTEMPTS = 5
"""How often a dump is tried that meets a connection which has not been accepted yet."""

_OPTIONS = (
    "--tcp-established",
    "--ext-unix-sk",
    "--file-locks",
    "--link-remap",
    "--ghost-limit",
    "256M",
    "-v2",
)
# Through libnftables, which is part of CRIU's closure: the iptables programs need not be there.
_DUMP_OPTIONS = ("--network-lock", "nftables")

# At the hook post-dump all images are written and every process is still stopped. Failing there undoes the
# dump, so the suite looks at the processes and saves their files before it answers.
_HOOK = """\
#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
cd "$(dirname "$0")" || exit 1
echo frozen > said
read -r word < answer
[ "$word" = go ]
"""

_FIFOS = ("said", "answer")

_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C"}
"""Of CRIU and its hook. A caller's LD_LIBRARY_PATH or LD_PRELOAD has made CRIU leave state out."""


class CriuCheckpointer:
    """CRIU, inside the engine's namespaces. Needs root and an isolated engine."""

    name = "criu"
    replaces_processes = True

    def __init__(self, criu: Criu | None = None, *, clients: bool = True) -> None:
        """``clients`` lets requests span dump and load, with their connections, in the same namespaces."""
        self._criu = criu
        self._clients = clients

    @property
    def criu(self) -> Criu:
        """The CRIU in use. Raises :class:`EnvironmentFailure` where there is none that will do."""
        if self._criu is None:
            self._criu = find_criu()
        return self._criu

    # Dump -----------------------------------------------------------------------------------------

    def dump(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Take the whole tree down into ``folder``; its states are those between stop and end.

        What an earlier dump left in ``folder`` is removed first. ``details`` has CRIU's version and build
        id, bytes, and the clients whose connections are in the image. Raises :class:`CriuFailure`, whose
        ``engine_runs`` was read back, and :class:`DeadlineExceeded`.
        """
        start = time.monotonic()
        _check_isolated(process)
        criu = self.criu
        clients = check_before_dump(process, clients=self._clients)
        attempts = 0
        while True:
            attempts += 1
            try:
                states, manifest = self._dump_once(process, folder, deadline)
            except CriuFailure as failure:
                again = failure.kind is Kind.IN_FLIGHT and failure.engine_runs
                if not again or attempts >= IN_FLIGHT_ATTEMPTS or deadline.expired:
                    raise
            else:
                break
        wait_for("the end of the dumped processes", lambda: _all_gone(process), deadline, interval=0.01)
        manifest.write(folder)
        details = {
            "criu": criu.as_json(),
            "attempts": attempts,
            "clients": [connection.remote for connection in clients],
            "memory_bytes": stored_bytes(folder / IMAGES),
            "image_bytes": tree_bytes(folder / IMAGES),
            "files_bytes": tree_bytes(folder / FILES),
            "anonymous_bytes": manifest.anonymous_bytes,
            "log_bytes": manifest.log_bytes,
            "processes": sorted(manifest.processes),
        }
        return CheckpointResult("dump", time.monotonic() - start, states, details)

    def _dump_once(
        self, process: EngineProcess, folder: Path, deadline: Deadline
    ) -> tuple[tuple[ProcessState, ...], Manifest]:
        _prepare(folder)
        members = process.tree()
        work = folder / WORK
        hook = work / "hook.sh"
        hook.write_text(_HOOK)
        hook.chmod(0o700)
        for name in _FIFOS:
            os.mkfifo(work / name, 0o600)
        argv = [
            *(*self.criu.command, "dump", "--tree", str(process.namespace_pid(process.root))),
            *("--images-dir", str(folder / IMAGES), "--work-dir", str(work), "--log-file", "dump.log"),
            *("--action-script", str(hook)),
            *(*_OPTIONS, *_DUMP_OPTIONS),
        ]
        seen: list[tuple[tuple[ProcessState, ...], Manifest]] = []

        def stopped() -> None:
            states = read_states(process.tree())
            save_files(process, folder / FILES)
            seen.append((states, describe(process, folder, self.criu)))

        try:
            done = _run_with_hook(process, argv, work, stopped, deadline)
        except NvsnapError as error:
            runs = _engine_runs(members, deadline)
            if isinstance(error, CriuFailure):
                raise CriuFailure(
                    error.kind,
                    error.what,
                    cause=error.cause,
                    next_step=error.next_step,
                    engine_runs=runs,
                ) from error
            if isinstance(error, DeadlineExceeded) and not runs:
                error.cause += "\nthe engine did not survive it"
            raise
        if done.returncode != 0 or not seen:
            raise read_log(
                _text(work / "dump.log") + done.stderr,
                "the dump of the engine failed",
                engine_runs=_engine_runs(members, deadline),
            )
        return seen[0]

    # Load -----------------------------------------------------------------------------------------

    def load(self, process: EngineProcess, folder: Path, deadline: Deadline) -> CheckpointResult:
        """Bring the tree back into the engine's namespaces, and verify that it is all there.

        What still runs in them (an engine that was loaded before) is killed first. ``process`` then has
        the new root and tree. Raises :class:`CriuFailure`, and leaves no process, where it cannot be.
        """
        start = time.monotonic()
        _check_isolated(process)
        manifest = Manifest.read(folder)
        self._check_same_criu(manifest)
        check_sizes(folder, manifest)
        process.vacate(deadline)
        check_before_restore(process, manifest.ids, manifest.ports)
        put_files(process, folder / FILES)
        marks = {"files": time.monotonic() - start}
        self._restore(process, folder, deadline)
        marks["restore"] = time.monotonic() - start - marks["files"]
        try:
            process.adopt(max(manifest.ids) + 1)
            _shift_nice(process, os.getpriority(os.PRIO_PROCESS, 0) - manifest.nice)
            states = self._verified(process, manifest)
        except NvsnapError:
            process.vacate(deadline)
            raise
        details = {
            "criu": self.criu.as_json(),
            "log_bytes": manifest.log_bytes,
            "anonymous_bytes": anonymous_bytes(process.tree()),
            "dumped_anonymous_bytes": manifest.anonymous_bytes,
            "processes": sorted(manifest.processes),
            "seconds": {name: round(value, 4) for name, value in marks.items()},
        }
        return CheckpointResult("load", time.monotonic() - start, states, details)

    def _restore(self, process: EngineProcess, folder: Path, deadline: Deadline, *more: str) -> None:
        # Not into the folder of the image: several engines may be restored from it at once.
        work = process.workdir / "criu"
        check_visible(work)
        work.mkdir(exist_ok=True)
        log = f"restore-{1 + len(list(work.glob('restore-*.log')))}.log"
        argv = [
            *(*self.criu.command, "restore", "--restore-detached"),
            *("--images-dir", str(folder / IMAGES), "--work-dir", str(work), "--log-file", log),
            *_OPTIONS,
            *more,
        ]
        try:
            done = process.run_inside(argv, timeout=deadline.remaining(), env=_ENVIRONMENT)
        except NvsnapError:
            process.vacate(Deadline.after(_CLEAN_UP_SECONDS))
            raise
        if done.returncode != 0:
            process.vacate(Deadline.after(_CLEAN_UP_SECONDS))
            raise read_log(_text(work / log) + done.stderr, "the restore of the engine failed")

    def _verified(self, process: EngineProcess, manifest: Manifest) -> tuple[ProcessState, ...]:
        """Compare the restored tree with the dumped one, process by process."""
        members = process.tree()
        restored = sorted(process.namespace_pid(member) for member in members)
        if restored != sorted(manifest.processes):
            raise CriuFailure(
                Kind.TREE_DIFFERS,
                f"the restored engine has processes {restored}, the image {sorted(manifest.processes)}",
                cause="a process ended right after the restore",
                next_step=f"see {process.log_path}",
            )
        limits = limits_of(process.root.pid)
        lower = {name: limits[name] for name, was in manifest.limits.items() if limits[name] != was}
        if lower:  # CRIU goes on without a word
            raise CriuFailure(
                Kind.RLIMIT,
                f"the restored engine has other limits, {lower}, than the dumped one, "
                f"{ {name: manifest.limits[name] for name in lower} }",
                cause="this run's hard limits are lower, and it may not raise them (CAP_SYS_RESOURCE)",
                next_step="raise them with ulimit before the run, or take a new image",
            )
        return read_states(members)

    def _check_same_criu(self, manifest: Manifest) -> None:
        if manifest.criu["version"] != self.criu.version:
            raise CriuFailure(
                Kind.OTHER_CRIU,
                f"the image was made by CRIU {manifest.criu['version']}, and this is {self.criu.version}",
                next_step="take a new image",
            )


_CLEAN_UP_SECONDS = 20.0


def _check_isolated(process: EngineProcess) -> None:
    if not process.isolation:
        raise EnvironmentFailure(
            "CRIU needs an engine in namespaces of its own",
            cause="this engine was started without them: not as root, or with isolate=False",
            next_step='run as root, or set host = "freeze" in the target',
        )


def _prepare(folder: Path) -> None:
    check_visible(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in (IMAGES, FILES, WORK):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(mode=0o700)


def _run_with_hook(
    process: EngineProcess,
    argv: Sequence[str],
    work: Path,
    stopped: Callable[[], None],
    deadline: Deadline,
) -> subprocess.CompletedProcess[str]:
    """Run CRIU; call ``stopped`` at its hook, and tell the hook whether that went well."""
    # Both ways, so that neither end of the FIFOs ever waits for somebody to open the other.
    listen, speak = (os.open(work / name, os.O_RDWR | os.O_NONBLOCK) for name in _FIFOS)
    done_read, done_write = os.pipe()
    try:
        with ThreadPoolExecutor(1, "nvsnap-criu") as executor:
            future = executor.submit(process.run_inside, argv, timeout=deadline.remaining(), env=_ENVIRONMENT)
            future.add_done_callback(lambda _: os.close(done_write))
            if _hook_comes(listen, done_read, future):
                try:
                    stopped()
                except BaseException:
                    os.write(speak, b"stop\n")
                    future.result()
                    raise
                os.write(speak, b"go\n")
            return future.result()
    finally:
        for fd in (listen, speak, done_read):
            os.close(fd)


def _hook_comes(listen: int, done: int, future: Future[Any]) -> bool:
    """Wait for CRIU to reach its hook, or to end (it has a deadline); return whether it did."""
    poller = select.poll()
    poller.register(listen, select.POLLIN)
    poller.register(done, select.POLLIN)
    ready = {fd for fd, _ in poller.poll()}
    return listen in ready and not future.done()


def _engine_runs(members: Sequence[Any], deadline: Deadline) -> bool:
    """Read back whether each process of the engine is there and none is held."""

    def running() -> bool | None:
        states = read_states(members)
        if any(not state.threads for state in states):
            return False
        return None if any(letter in "Tt" for state in states for letter in state.threads.values()) else True

    with suppress(DeadlineExceeded):
        # CRIU has ended: what it lets go runs at once, if at all.
        return wait_for("the engine to run on", lambda: [running()] if running() is not None else None,
                        deadline.sooner(5.0), interval=0.01)[0] or False  # fmt: skip
    return False


def _shift_nice(process: EngineProcess, shift: int) -> None:
    """Give the restored threads the priority of this run: CRIU restores that of the run that dumped them."""
    for member in process.tree() if shift else ():
        for thread in Path(f"/proc/{member.pid}/task").iterdir():
            with suppress(ProcessLookupError, PermissionError):  # it has ended; or CAP_SYS_NICE is missing
                tid = int(thread.name)
                os.setpriority(os.PRIO_PROCESS, tid, os.getpriority(os.PRIO_PROCESS, tid) + shift)


def _all_gone(process: EngineProcess) -> bool:
    return not process.tree() and process.poll() is not None


def _text(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""
