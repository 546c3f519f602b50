"""The side that starts ranks, waits for what they tell, and makes sure that none outlives it."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.protocol import Rank
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.held_folder import LOCKED, RANK_SERVER, new_folder
from nvsnap_conformance.lifecycle.residue import RUN_ID, run_id
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

_SERVER = Path(__file__).with_name("server.py")


class RankServer:
    """One server process in an engine's interpreter; ``run`` forks a set of ranks from it.

    ``environment`` is added to what the interpreter needs; ``paths`` go in front of the ranks' sys.path.
    Torch and what ``preload`` names is loaded once, in the server: ``module``, or ``module:function`` to be
    called too.
    The server and all its ranks end with :meth:`close`, and also when this process dies in any way.
    """

    def __init__(
        self,
        python: Path,
        *,
        environment: Mapping[str, str] | None = None,
        paths: Sequence[Path] = (),
        preload: Sequence[str] = (),
    ) -> None:
        base = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": os.environ.get("HOME", "/"),
            # One thread per rank: eight ranks share few cores, and a thread pool does not survive a fork.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # libuv's io_uring rings would be shared by forked ranks.
            "USE_LIBUV": "0",
            RUN_ID: run_id(),
        }
        self._folder, self._errors = new_folder(RANK_SERVER)
        settings = {
            "paths": [*map(str, paths)],
            "preload": [*preload],
            "folder": str(self._folder),
        }
        self._process = subprocess.Popen(
            [str(python), str(_SERVER), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**base, **(environment or {})},
            start_new_session=True,
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._pump, daemon=True).start()
        self._runs = 0
        try:
            self.identity = self._expect("ready", Deadline.after(120.0))
        except DeadlineExceeded:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        script: Path,
        *,
        world: int,
        function: str = "main",
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        paths: Sequence[Path] = (),
    ) -> RankSet:
        """Fork ``world`` ranks that each call ``function(context)`` of ``script``.

        One set at a time: the set before must have been ended.
        """
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        counters = folder / "counters"
        counters.write_bytes(bytes(8 * world))
        self.send(
            {
                "run": {
                    "script": str(script),
                    "function": function,
                    "world": world,
                    "options": dict(options or {}),
                    "environment": dict(environment or {}),
                    "paths": [str(path) for path in paths],
                    "folder": str(folder),
                    "counters": str(counters),
                }
            }
        )
        started = self._expect("started", Deadline.after(30.0))
        return RankSet(self, started["pids"], folder)

    def send(self, command: Mapping[str, Any]) -> None:
        """Write one command to the server."""
        stdin = cast("IO[bytes]", self._process.stdin)
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise EnvironmentFailure("the rank server has died", cause=self.errors()) from error

    def next_event(self, deadline: Deadline) -> dict[str, Any]:
        """Return the next event; raises :class:`DeadlineExceeded`, or EnvironmentFailure on its death."""
        try:
            event = self._events.get(timeout=deadline.remaining())
        except queue.Empty:
            raise DeadlineExceeded(
                f"the ranks told nothing within {deadline.budget:.0f} s", cause=self.errors()
            ) from None
        if event["event"] == "closed":
            raise EnvironmentFailure("the rank server has died", cause=self.errors())
        return event

    def event_now(self) -> dict[str, Any] | None:
        """Return the next event that is there already, ``None`` where there is none."""
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None

    def errors(self) -> str:
        """Return the end of what server and ranks wrote to standard error."""
        return (self._folder / LOCKED).read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the server and every rank; idempotent."""
        stdin = cast("IO[bytes]", self._process.stdin)
        if not stdin.closed:
            stdin.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _expect(self, name: str, deadline: Deadline) -> dict[str, Any]:
        while True:
            event = self.next_event(deadline)
            if event["event"] == name:
                return event

    def _pump(self) -> None:
        for line in cast("IO[bytes]", self._process.stdout):
            self._events.put(json.loads(line))
        self._events.put({"event": "closed"})


class RankSet:
    """The ranks of one run."""

    def __init__(self, server: RankServer, pids: list[int], folder: Path) -> None:
        self._server = server
        self.folder = folder
        self.ranks = [
            Rank(rank, ProcessId.of(pid) or ProcessId(pid, 0.0), None, "rank server")
            for rank, pid in enumerate(pids)
        ]
        self.told: list[dict[str, Any]] = []
        self.exits: dict[int, int] = {}
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def root(self) -> ProcessId:
        """The server: the parent of all ranks."""
        pid = int(self._server.identity["pid"])
        return ProcessId.of(pid) or ProcessId(pid, 0.0)

    def wait_told(
        self, name: str, deadline: Deadline, *, ranks: Iterable[int] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Wait until every one of ``ranks`` (default: all) has told ``name``; return what they told.

        Raises :class:`DeadlineExceeded`; a rank that exits instead raises :class:`EnvironmentFailure`.
        """
        wanted = set(range(len(self.ranks)) if ranks is None else ranks)
        while True:
            found = {t["rank"]: t for t in self.told if t["name"] == name}
            if wanted <= set(found):
                return {rank: found[rank] for rank in sorted(wanted)}
            lost = {r: s for r, s in self.exits.items() if r in wanted - set(found)}
            if lost:
                raise EnvironmentFailure(
                    f"ranks exited before they told {name!r}: {lost}", cause=self._server.errors()
                )
            self._take(deadline)

    def told_by(self, name: str) -> dict[int, dict[str, Any]]:
        """Return, by rank, who has told ``name`` by now, without waiting."""
        while (event := self._server.event_now()) is not None:
            self._note(event)
        return {t["rank"]: t for t in self.told if t["name"] == name}

    def wait_exit(self, deadline: Deadline, *, ranks: Iterable[int] | None = None) -> dict[int, int]:
        """Wait until every one of ``ranks`` (default: all) has exited; return their exit statuses."""
        wanted = set(range(len(self.ranks)) if ranks is None else ranks)
        while not wanted <= set(self.exits):
            self._take(deadline)
        return {rank: self.exits[rank] for rank in sorted(wanted)}

    def wait_state(self, rank: int, letters: str, deadline: Deadline) -> None:
        """Wait until the kernel shows ``rank`` in one of the states ``letters`` (of /proc/PID/stat)."""
        from nvsnap_conformance.hang import procfs  # noqa: PLC0415 - keeps the client free of the sampler

        pid = self.ranks[rank].process.pid
        wait_for(f"rank {rank} in state {letters}", lambda: procfs.state_of(pid) in letters, deadline)

    def release(self, gate: str, *, ranks: Iterable[int] | None = None) -> None:
        """Open ``gate`` for ``ranks`` (default: all)."""
        wanted = list(range(len(self.ranks)) if ranks is None else ranks)
        self._server.send({"release": gate, "ranks": wanted})

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        self.ranks[rank].process.send(number)

    def steps(self) -> int:
        """Return the steps that all ranks have counted together."""
        data = (self.folder / "counters").read_bytes()
        return sum(int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))

    def end(self) -> None:
        """Kill all ranks and wait until they are gone; idempotent."""
        if not self._ended:
            self._ended = True
            self._server.send({"end": True})
            deadline = Deadline.after(30.0)
            while self._server.next_event(deadline)["event"] != "ended":
                pass
            shutil.rmtree(self.folder, ignore_errors=True)

    def _take(self, deadline: Deadline) -> None:
        self._note(self._server.next_event(deadline))

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "told":
            self.told.append(event)
        elif event["event"] == "exit":
            self.exits[event["rank"]] = event["status"]
