"""The vLLM adapter: the OpenAI server with its development routes, and the loader in every worker."""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING, Any, cast

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import vllm_launch
from nvsnap_conformance.engines.http import Front, json_of
from nvsnap_conformance.engines.namespaces import isolation_gap
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.engines.protocol import (
    Completion,
    Health,
    HooksSpec,
    LaunchConfig,
    Rank,
    RankReply,
    RequestFailed,
)
from nvsnap_conformance.engines.vllm_log import StartLog, start_error
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    import httpx

LOADER = HooksSpec("nvsnap_hooks.builtin:Builtin")
"""Addresses the loader's own methods (``identify``, ``forwards``, ``environment``)."""

PORT = 8000
"""Fixed for an engine with a network namespace of its own, so that its images name one port."""

_ENVIRONMENT_SECONDS = 30.0
_PROBE_SECONDS = 2.0


class VllmEngine:
    """Launches vLLM servers. ``on_progress`` gets short texts while an engine starts."""

    name = "vllm"

    def __init__(self, on_progress: Callable[[str], None] | None = None) -> None:
        self._on_progress = on_progress or (lambda _text: None)

    def launch(self, config: LaunchConfig) -> VllmHandle:
        """Start a server and return at once.

        Raises :class:`TargetError` for a model that is not there or an interpreter that the loader does not
        reach, :class:`UsageError` for a setting that cannot be, :class:`EnvironmentFailure` where the process
        cannot be started.
        """
        port, argv, env = self._plan(config)
        vllm_launch.injection(config).require_reached([str(config.python)], env)
        process = EngineProcess.launch(argv, env=env, workdir=config.workdir, isolate=config.isolate)
        return VllmHandle(config, process, port, on_progress=self._on_progress)

    def launch_plan(self, config: LaunchConfig) -> tuple[list[str], Mapping[str, str]]:
        """Return the command line and the environment of :meth:`launch`; raises as it does."""
        _, argv, env = self._plan(config)
        return argv, env

    def attach(self, config: LaunchConfig, process: EngineProcess) -> VllmHandle:
        """Return the handle of an isolated server that was restored into ``process``."""
        return VllmHandle(config, process, PORT)

    def _plan(self, config: LaunchConfig) -> tuple[int, list[str], dict[str, str]]:
        vllm_launch.check(config)
        own_network = config.isolate and isolation_gap() is None
        port = PORT if own_network else free_port()
        argv = vllm_launch.command(config, port)
        if config.mutation == vllm_launch.HALF_ALIVE:
            engine_port = PORT + 1 if own_network else free_port()
            argv = vllm_launch.front_command(
                config, port, engine_port, vllm_launch.command(config, engine_port)
            )
        return port, argv, vllm_launch.environment(config)


class VllmHandle:
    """A vLLM server, launched here or restored from an image (then ``process`` is the restored one).

    ``version`` is what the server's ``/version`` answered, empty until :meth:`ready`.
    """

    def __init__(
        self,
        config: LaunchConfig,
        process: EngineProcess,
        port: int,
        *,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.process = process
        self.port = port
        self.version = ""
        self._front = Front(process, port)
        self._on_progress = on_progress or (lambda _text: None)
        self._model = ""
        self._routes: Mapping[str, Any] = {}
        self._inside_pids: dict[int, tuple[int, str | None]] = {}
        self._last_seen: dict[int, ProcessId] = {}
        self._cache_asleep = False

    # Coming up and going down ---------------------------------------------------------------------

    def ready(self, deadline: Deadline) -> None:
        """Wait until the server is healthy, then learn its version, routes and model name.

        Raises :class:`EngineStartError` with the log's tail where it exits or the deadline passes.
        """
        log = StartLog(self.process.log_path, self._on_progress)

        def look() -> bool:
            log.follow()
            if self.process.poll() is not None:
                raise start_error(self.process, f"exited with status {self.process.poll()}")
            return self.health(deadline.sooner(_PROBE_SECONDS)) is Health.SERVING

        try:
            wait_for("the engine is ready", look, deadline, interval=0.1)
            log.follow()
            self.version = str(self._get("/version", deadline)["version"])
            self._routes = self._get("/openapi.json", deadline)["paths"]
            self._model = str(self._get("/v1/models", deadline)["data"][0]["id"])
        except (DeadlineExceeded, RequestFailed) as error:
            reason = f"was not ready within {deadline.budget:.0f} s"
            raise start_error(self.process, reason if deadline.expired else str(error)) from error
        except (LookupError, TypeError) as error:
            reason = f"describes itself in another form ({type(error).__name__}: {error})"
            raise start_error(self.process, reason) from error

    def health(self, deadline: Deadline) -> Health:
        """Ask ``/health`` once: 200 is serving, 503 or another status unhealthy."""
        return self._front.health(deadline)

    def stop(self, deadline: Deadline) -> None:
        """End the server and its workers."""
        self.process.terminate(deadline)
        self._front.close()

    # Requests -------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[str], *, max_tokens: int, deadline: Deadline) -> list[Completion]:
        """Complete the prompts one after the other, so that no batch changes a reduction's order."""
        return [
            self._front.result(
                self.submit(prompt, max_tokens=max_tokens, deadline=deadline), "a completion", deadline
            )
            for prompt in prompts
        ]

    def submit(self, prompt: str, *, max_tokens: int, deadline: Deadline) -> Future[Completion]:
        """POST ``/v1/completions`` in the background, greedy and without stopping early."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }

        def read(response: httpx.Response) -> Completion:
            answer = json_of(response, "a completion")
            try:
                choice = answer["choices"][0]
                return Completion(
                    prompt,
                    tuple(int(token) for token in choice["token_ids"]),
                    tuple(float(value) for value in choice["logprobs"]["token_logprobs"]),
                    str(choice["text"]),
                )
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise RequestFailed(
                    f"a completion of another form ({type(error).__name__}: {error})",
                    status=response.status_code,
                    body=response.text,
                ) from error

        return self._front.submit("/v1/completions", body, deadline, read)

    # Calls to the workers -------------------------------------------------------------------------

    def rpc(self, method: str, *, hooks: HooksSpec, deadline: Deadline, **arguments: Any) -> list[RankReply]:
        """Call ``method`` on every rank through the loader, with a fresh nonce.

        A reply of another form is kept in ``raw``. No timeout is given to the engine: one that passes
        there leaves replies in its queues, and every later one would be stale.
        """
        nonce = secrets.token_hex(16)
        request = hooks.request(method, arguments, nonce=nonce)
        results = self.raw_rpc("nvsnap_rpc", deadline=deadline, args=[request])
        return [parse_reply(result, nonce) for result in results]

    def raw_rpc(self, method: str, *, deadline: Deadline, args: Sequence[Any] = ()) -> list[Any]:
        """POST ``/collective_rpc``; a method that returns nothing on every rank gives one ``None`` each."""
        response = self._front.call(
            "POST", "/collective_rpc", deadline=deadline, json={"method": method, "args": list(args)}
        )
        if not response.content:
            return []
        results = json_of(response, "/collective_rpc").get("results")
        if not isinstance(results, list):
            raise RequestFailed(
                "/collective_rpc answered without results", status=response.status_code, body=response.text
            )
        return results

    def ranks(self, deadline: Deadline) -> list[Rank]:
        """Ask every rank who it is, and find its process on the host.

        Where the engine no longer answers, or answers another call, the ranks are those that answered
        earlier, and ``source`` is ``remembered``: their processes are looked up again, and one that is gone
        is named as it was last seen. Raises :class:`RequestFailed` or :class:`DeadlineExceeded` where no
        rank ever answered.
        """
        source = "rpc"
        try:
            self._inside_pids = self._ask_ranks(deadline)
        except (RequestFailed, DeadlineExceeded):
            if not self._inside_pids:
                raise
            source = "remembered"
        for rank, (inside, _gpu) in self._inside_pids.items():
            pid = self.process.host_pid(inside)
            found = None if pid is None else ProcessId.of(pid)
            if found is not None:
                self._last_seen[rank] = found
            elif rank not in self._last_seen:
                raise RequestFailed(
                    f"rank {rank} says that it is process {inside}, which the engine does not have",
                    status=None,
                )
        return [
            Rank(rank, self._last_seen[rank], gpu, source)
            for rank, (_inside, gpu) in sorted(self._inside_pids.items())
        ]

    def communication_environment(self) -> dict[str, str]:
        """Return the settings of collectives as the workers have them.

        A value on which the ranks differ is ``rank=value`` for each, joined by commas.
        """
        replies = self.rpc("environment", hooks=LOADER, deadline=Deadline.after(_ENVIRONMENT_SECONDS))
        tables = {reply.rank: reply.value for reply in replies if isinstance(reply.value, dict)}
        names = sorted({name for table in tables.values() for name in table})
        merged: dict[str, str] = {}
        for name in names:
            values = {rank: str(table.get(name, "")) for rank, table in tables.items()}
            same = len(set(values.values())) == 1
            merged[name] = (
                next(iter(values.values()))
                if same
                else ",".join(f"{rank}={value}" for rank, value in values.items())
            )
        return merged

    # Quiescing ------------------------------------------------------------------------------------

    def quiesce(self, deadline: Deadline) -> None:
        """POST ``/pause``: running requests finish, new ones wait in the front.

        The parameters are told from the server's own description: ``mode=wait``, or the older
        ``wait_for_inflight_requests``; the caches are kept where that can be said.
        """
        known = {parameter["name"] for parameter in self._operation("/pause", "post").get("parameters", ())}
        params = {}
        if "mode" in known:
            params["mode"] = "wait"
        elif "wait_for_inflight_requests" in known:
            params["wait_for_inflight_requests"] = "true"
        if "clear_cache" in known:
            params["clear_cache"] = "false"
        self._front.call("POST", "/pause", deadline=deadline, params=params)

    def sleep(self, level: int, deadline: Deadline) -> None:
        """POST ``/sleep``: the scheduler is paused again, its caches are reset, and then the workers sleep.

        ``mode=wait`` is sent whether the server describes it or not (0.31 reads it undescribed): the
        default, ``abort``, ends the requests that the front holds. ``/is_sleeping`` would prove nothing: it
        is also true of an engine that is only paused.
        """
        self._front.call("POST", "/sleep", deadline=deadline, params={"level": str(level), "mode": "wait"})
        self._cache_asleep = True

    def wake(self, deadline: Deadline, *, reload: bool) -> None:
        """POST ``/wake_up`` for the weights alone, then have every rank read the model again where asked.

        vLLM's ``EngineCore.wake_up`` resumes the scheduler by itself once everything is awake, whoever had
        paused it (0.31 and 0.32; vLLM PR 50036 proposes to keep such a pause). Requests that were held would
        be answered at once, from weights that nobody has loaded yet. While a part is asleep it does not
        resume (vLLM PR 44483; before that any wake did). So the key/value cache, empty as it is, sleeps on,
        and :meth:`resume` wakes it.
        """
        self._front.call("POST", "/wake_up", deadline=deadline, params={"tags": "weights"})
        if reload:
            self.raw_rpc("reload_weights", deadline=deadline)

    def resume(self, deadline: Deadline) -> None:
        """POST ``/resume``; for an engine that slept after ``/wake_up`` for what :meth:`wake` left asleep.

        That wake resumes the scheduler too; ``/resume`` says so to versions in which it need not.
        """
        self._operation("/resume", "post")
        if self._cache_asleep:
            self._front.call("POST", "/wake_up", deadline=deadline, params={"tags": "kv_cache"})
            self._cache_asleep = False
        self._front.call("POST", "/resume", deadline=deadline)

    def paused(self, deadline: Deadline) -> bool:
        """GET ``/is_paused``."""
        return bool(self._get("/is_paused", deadline)["is_paused"])

    def waiting_requests(self, deadline: Deadline) -> int:
        """GET ``/load``: the requests that have reached the front and are not finished."""
        return int(self._get("/load", deadline)["server_load"])

    # Helpers --------------------------------------------------------------------------------------

    def _ask_ranks(self, deadline: Deadline) -> dict[int, tuple[int, str | None]]:
        """Return pid (as the engine sees it) and GPU of every rank."""
        told = {
            reply.rank: (reply.value["pid"], reply.value.get("gpu"))
            for reply in self.rpc("identify", hooks=LOADER, deadline=deadline)
            if reply.in_step
            and reply.rank is not None
            and isinstance(reply.value, dict)
            and "pid" in reply.value
        }
        if len(told) != self.config.tensor_parallel:
            raise RequestFailed(
                f"{len(told)} of {self.config.tensor_parallel} ranks said who they are", status=None
            )
        return told

    def _get(self, path: str, deadline: Deadline) -> Any:
        return json_of(self._front.call("GET", path, deadline=deadline), f"GET {path}")

    def _operation(self, path: str, verb: str) -> Mapping[str, Any]:
        try:
            return cast("Mapping[str, Any]", self._routes[path][verb])
        except KeyError:
            raise RequestFailed(
                f"vLLM {self.version} has no {verb.upper()} {path}",
                status=None,
                body="the development routes need VLLM_SERVER_DEV_MODE=1 and vLLM 0.27 or later",
            ) from None


def parse_reply(result: Any, expected_nonce: str) -> RankReply:
    """Read one rank's reply; whatever is not of the loader's form has only ``raw``."""
    if not isinstance(result, dict):
        return RankReply(None, expected_nonce, None, raw=result)
    rank, nonce, error = result.get("rank"), result.get("nonce"), result.get("error")
    return RankReply(
        rank if isinstance(rank, int) else None,
        expected_nonce,
        nonce if isinstance(nonce, str) else None,
        value=result.get("value"),
        error={str(k): str(v) for k, v in error.items()} if isinstance(error, dict) else None,
        raw=result,
    )


def free_port() -> int:
    """Return a port that is free on the host now; for an engine without a network namespace."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
