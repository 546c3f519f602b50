"""A group of ranks without an engine: one process each, reached as an engine's workers are."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import HooksSpec, RankReply, RequestFailed
from nvsnap_conformance.engines.vllm import parse_reply
from nvsnap_conformance.errors import DeadlineExceeded, UsageError
from nvsnap_conformance.hooks.injection import INJECT
from nvsnap_conformance.hooks.naming import is_implementation
from nvsnap_conformance.lifecycle.driver import OBSERVER
from nvsnap_conformance.lifecycle.residue import RUN_ID, run_id

if TYPE_CHECKING:
    from types import TracebackType

WORKER = "nvsnap_hooks.rehearsal:RehearsalWorker"
REHEARSAL_OBSERVER = HooksSpec("nvsnap_hooks.rehearsal:RehearsalObserver")


class RankGroup:
    """``size`` processes, each with a worker behind the real loader; a context manager.

    ``worker`` is the ``module:Class`` of the workers, called with rank and size, ``observer`` what sees the
    resources that they hold; by default :class:`nvsnap_hooks.rehearsal.RehearsalWorker` and its own observer.
    ``path`` is a folder for ``sys.path``, ``python`` the interpreter to run in: an engine's own, where the
    hooks import the engine. Raises :class:`UsageError` for what cannot be taken (a size below one, a name
    that is not ``module:Class``, a ``path`` that is no folder, an interpreter that does not start), and where
    a rank does not come up.
    """

    def __init__(
        self,
        size: int = 2,
        *,
        worker: str = WORKER,
        observer: HooksSpec = REHEARSAL_OBSERVER,
        path: Path | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        _require_arguments(size, worker, observer, path)
        folders = [str(INJECT), *([str(path)] if path else [])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(folders), RUN_ID: run_id()}
        # What the lifecycle's driver asks of an engine: its size, and its clock against ours.
        self.config: Any = SimpleNamespace(tensor_parallel=size)
        self.process: Any = SimpleNamespace(clock_offset=0.0)
        self._observer = observer
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(size):
                argv = [str(python), "-m", "nvsnap_hooks.rehearsal", str(rank), str(size), worker]
                self._processes.append(
                    subprocess.Popen(
                        argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                    )
                )
            self._await_ranks(worker)
        except OSError as error:
            self.close()
            raise UsageError(
                f"the interpreter {python} cannot be started: {error.strerror or error}",
                next_step="name an interpreter that has the engine which the hooks import (python=)",
            ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self._processes]

    def rpc(self, method: str, *, hooks: HooksSpec, deadline: Deadline, **arguments: Any) -> list[RankReply]:
        """Call ``method`` on all ranks at once, with a fresh nonce; one reply for each rank.

        The engine's observer is answered by the group's own. Raises :class:`DeadlineExceeded`, naming the
        ranks, where some do not answer in time, and :class:`RequestFailed` where one has ended, or an
        exception has left the loader and ended it; the group is of no use after either. Raises
        :class:`UsageError` for options or arguments that are not JSON.
        """
        chosen = self._observer if hooks == OBSERVER else hooks
        nonce = secrets.token_hex(16)
        try:
            request = json.dumps(chosen.request(method, arguments, nonce=nonce), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"options of {chosen.implementation}, or arguments of {method}, are not JSON: {error}",
                next_step="pass texts, numbers, true, false, null, and lists and tables of these",
            ) from error
        return [parse_reply(json.loads(line), nonce) for line in self._exchange(method, request, deadline)]

    def quiesce(self, deadline: Deadline) -> None:
        """Do nothing: no requests come."""

    def resume(self, deadline: Deadline) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End every rank, whatever it is doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def _exchange(self, method: str, request: str, deadline: Deadline) -> list[str]:
        lines: dict[int, str] = {}

        def ask(rank: int, process: subprocess.Popen[str]) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                lines[rank] = process.stdout.readline()
            except (OSError, ValueError):
                lines[rank] = ""

        threads = [
            threading.Thread(target=ask, args=(rank, process), daemon=True)
            for rank, process in enumerate(self._processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline.remaining())
        silent = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if silent:
            raise DeadlineExceeded(
                f"{method}: no answer from ranks {silent} within {deadline.budget:.1f} s",
                cause="the hooks wait for something without a bound, or for a rank that failed",
            )
        ended = [rank for rank in range(len(threads)) if not lines[rank]]
        if ended:
            raise RequestFailed(f"{method}: ranks {ended} have ended", status=None)
        return [lines[rank] for rank in range(len(threads))]

    def _await_ranks(self, worker: str) -> None:
        try:
            self.rpc("forwards", hooks=self._observer, deadline=Deadline.after(60.0))
        except RequestFailed as error:
            raise UsageError(
                f"a rank with the worker {worker} does not come up: {error}",
                cause="its module cannot be imported in that interpreter, or its class takes no (rank, size)",
                next_step="the traceback is on stderr",
            ) from error


def _require_arguments(size: int, worker: str, observer: HooksSpec, path: Path | None) -> None:
    """Raise :class:`UsageError` for the first argument that cannot be taken."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"a group of {size!r} ranks cannot be made", next_step="ask for one rank or more")
    for what, name in (("worker", worker), ("observer", observer.implementation)):
        require_name(what, name)
    for what, folder in (("path", path), ("the observer's path", observer.path)):
        require_folder(what, folder)


def require_name(what: str, name: str) -> None:
    """Raise :class:`UsageError` where ``name`` is not of the form ``package.module:Class``."""
    if not (isinstance(name, str) and is_implementation(name)):
        raise UsageError(
            f"the {what} {name!r} is not of the form package.module:Class",
            next_step="name the class as it is imported, with a colon before the class",
        )


def require_folder(what: str, folder: Path | None) -> None:
    """Raise :class:`UsageError` where ``folder`` is given and is none."""
    if folder is not None and not Path(folder).is_dir():
        raise UsageError(
            f"{what}: {folder} is no folder",
            next_step="name the folder that holds the package, as it would stand on sys.path",
        )
