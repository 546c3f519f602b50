"""The vLLM adapter against small real servers and programs; a whole engine is in test_hooks_engine.py."""

from __future__ import annotations

import json
import stat
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import vllm_launch
from nvsnap_conformance.engines.http import Front
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.engines.protocol import (
    Health,
    HooksSpec,
    LaunchConfig,
    RequestFailed,
    Unavailable,
)
from nvsnap_conformance.engines.vllm import VllmEngine, VllmHandle, free_port, parse_reply
from nvsnap_conformance.errors import DeadlineExceeded, EngineStartError, TargetError, UsageError
from nvsnap_conformance.hooks import injection

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINE = textwrap.dedent(
    '''
    """Speaks as much of vLLM's HTTP as the adapter needs; a request for /silent is never answered."""
    import json, sys, threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    PAUSE = json.loads(sys.argv[2])
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def do_GET(self): self.serve(b"")
        def do_POST(self): self.serve(self.rfile.read(int(self.headers["Content-Length"] or 0)))
        def serve(self, raw):
            path = self.path.partition("?")[0]
            body = json.loads(raw) if raw else None
            seen.append(self.path + (" " + body["method"] if path == "/collective_rpc" else ""))
            answer = {
                "/health": {},
                "/version": {"version": "0.32.0"},
                "/v1/models": {"data": [{"id": "tiny"}]},
                "/is_paused": {"is_paused": True},
                "/seen": seen,
                "/resume": {},
                "/pause": {},
                "/sleep": {"status": "sleeping"},
                "/wake_up": {"status": "awake"},
                "/openapi.json": {"paths": {
                    "/pause": {"post": {"parameters": [{"name": n} for n in PAUSE]}},
                    "/resume": {"post": {}}}},
            }.get(path)
            if path == "/silent":
                threading.Event().wait()
            if path == "/v1/completions":
                answer = {"choices": [{"text": body["prompt"] + "!", "token_ids": [5, 6],
                                       "logprobs": {"token_logprobs": [-0.5, -0.25]}}]}
                if body["prompt"] == "odd":
                    answer = {"choices": []}
            if path == "/collective_rpc":
                request = (body["args"] or [{}])[0]
                if body["method"] == "raises":
                    self.send(500, b'{"error": "worker"}')
                    return
                if request.get("method") == "identify":
                    import os
                    value = {"pid": os.getpid(), "gpu": None}
                elif request.get("method") == "environment":
                    value = None
                else:
                    value = request
                replies = [{"rank": r, "nonce": request.get("nonce"), "value": value} for r in (0, 1)]
                for r, reply in enumerate(replies):
                    if request.get("method") == "environment":
                        reply["value"] = {"backend": "gloo", "NCCL_X": str(r)}
                    if request.get("method") == "stale":
                        reply["nonce"] = "earlier"
                if request.get("method") == "odd":
                    replies = ["text", None, {"rank": "0"}]
                answer = {"results": replies}
            if path == "/unavailable":
                self.send(503, b"later")
            elif answer is None:
                self.send(404, b"what")
            else:
                self.send(200, json.dumps(answer).encode())
        def send(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    ThreadingHTTPServer.request_queue_size = 64
    print("INFO non-default args: {}", flush=True)
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.serve_forever()
    '''
)


def soon() -> Deadline:
    return Deadline.after(20)


def config(tmp_path: Path, **fields: Any) -> LaunchConfig:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    workdir = tmp_path / "work"
    workdir.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "python": Path(sys.executable),
        "model": model,
        "tensor_parallel": 2,
        "workdir": workdir,
    }
    return LaunchConfig(**{**settings, **fields})


@pytest.fixture
def handle(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VllmHandle]:
    """Give a handle on a small server that speaks like vLLM; its parameter: what /pause takes."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    settings = config(tmp_path)
    pause = getattr(request, "param", ["mode", "clear_cache"])
    port = free_port()
    argv = [sys.executable, str(script), str(port), json.dumps(pause)]
    with EngineProcess.launch(argv, env={"PATH": "/usr/bin:/bin"}, workdir=settings.workdir) as process:
        said: list[str] = []
        made = VllmHandle(settings, process, port, on_progress=said.append)
        made.ready(soon())
        assert said == ["server process is up"]
        yield made
        made.stop(soon())


def test_ready_learns_version_and_model(handle: VllmHandle) -> None:
    assert handle.version == "0.32.0"
    (completion,) = handle.generate(["hello"], max_tokens=2, deadline=soon())
    assert (completion.tokens, completion.logprobs, completion.text) == ((5, 6), (-0.5, -0.25), "hello!")


def test_completion_of_another_form_is_a_failed_request(handle: VllmHandle) -> None:
    with pytest.raises(RequestFailed, match="another form"):
        handle.submit("odd", max_tokens=2, deadline=soon()).result()


def test_rpc_replies_are_told_apart_by_nonce(handle: VllmHandle) -> None:
    replies = handle.rpc("prepare", hooks=HooksSpec(options={"a": 1}), deadline=soon(), b=2)
    assert [(r.rank, r.in_step) for r in replies] == [(0, True), (1, True)]
    assert replies[0].value["options"] == {"a": 1}
    assert replies[0].value["arguments"] == {"b": 2}
    assert not any(r.in_step for r in handle.rpc("stale", hooks=HooksSpec(), deadline=soon()))
    again = handle.rpc("prepare", hooks=HooksSpec(), deadline=soon())
    assert again[0].expected_nonce != replies[0].expected_nonce


def test_reply_of_another_form_is_kept_raw(handle: VllmHandle) -> None:
    replies = handle.rpc("odd", hooks=HooksSpec(), deadline=soon())
    assert [r.raw for r in replies] == ["text", None, {"rank": "0"}]
    assert [(r.rank, r.in_step, r.value, r.error) for r in replies] == [(None, False, None, None)] * 3


def test_failed_rpc_has_status_and_body(handle: VllmHandle) -> None:
    with pytest.raises(RequestFailed, match="worker") as failure:
        handle.raw_rpc("raises", deadline=soon())
    assert failure.value.status == 500


def test_ranks_are_found_on_the_host_and_remembered(handle: VllmHandle) -> None:
    ranks = handle.ranks(soon())
    assert [(r.rank, r.source) for r in ranks] == [(0, "rpc"), (1, "rpc")]
    assert ranks[0].process == handle.process.root
    handle.process.root.send(SIGKILL)
    wait_for("the engine's end", lambda: not handle.process.root.alive, soon())
    again = handle.ranks(soon())
    assert [(r.process, r.source) for r in again] == [(r.process, "remembered") for r in ranks]


def test_communication_environment_names_what_ranks_differ_in(handle: VllmHandle) -> None:
    assert handle.communication_environment() == {"NCCL_X": "0=0,1=1", "backend": "gloo"}


@pytest.mark.parametrize(
    ("handle", "expected"),
    [
        (["mode", "clear_cache"], "/pause?mode=wait&clear_cache=false"),
        (["wait_for_inflight_requests"], "/pause?wait_for_inflight_requests=true"),
        ([], "/pause"),
    ],
    indirect=["handle"],
)
def test_quiesce_speaks_as_the_server_describes_it(handle: VllmHandle, expected: str) -> None:
    handle.quiesce(soon())
    handle.resume(soon())
    seen = handle._front.call("GET", "/seen", deadline=soon()).json()
    assert [path for path in seen if "pause" in path or "resume" in path] == [expected, "/resume"]
    assert handle.paused(soon()) is True


def asked(handle: VllmHandle) -> list[str]:
    """Return what the server was asked for since it was ready."""
    seen: list[str] = handle._front.call("GET", "/seen", deadline=soon()).json()
    return seen[seen.index("/v1/models") + 1 : -1]


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_leaves_asleep_what_would_resume_the_scheduler(handle: VllmHandle, level: int) -> None:
    reload = level == 2
    for _ in range(2):
        handle.sleep(level, soon())
        handle.wake(soon(), reload=reload)
        handle.resume(soon())
    cycle = [
        # The default mode would end the requests that the front holds.
        f"/sleep?level={level}&mode=wait",
        "/wake_up?tags=weights",
        *["/collective_rpc reload_weights"] * reload,
        "/wake_up?tags=kv_cache",
        "/resume",
    ]
    assert asked(handle) == cycle * 2
    handle.resume(soon())
    assert asked(handle)[-2:] == ["/seen", "/resume"]


def test_what_a_front_can_answer(handle: VllmHandle) -> None:
    front = Front(handle.process, handle.port)
    with pytest.raises(Unavailable):
        front.call("GET", "/unavailable", deadline=soon())
    with pytest.raises(RequestFailed, match="HTTP 404"):
        front.call("GET", "/nothing", deadline=soon())
    with pytest.raises(DeadlineExceeded, match="no answer within"):
        front.call("GET", "/silent", deadline=Deadline.after(0.2))
    assert front.health(soon()) is Health.SERVING
    assert Front(handle.process, free_port()).health(soon()) is Health.REFUSED
    handle.stop(soon())
    assert front.health(soon()) is Health.REFUSED
    with pytest.raises(RequestFailed, match="ended"):
        front.submit("/silent", {}, soon(), lambda response: response)


def test_requests_that_wait_do_not_hold_up_control(handle: VllmHandle) -> None:
    waiting = [handle._front.submit("/silent", {}, soon(), lambda r: r) for _ in range(20)]
    assert handle.health(soon()) is Health.SERVING
    handle.stop(soon())
    for future in waiting:
        with pytest.raises(Exception):  # noqa: B017, PT011 - broken off or never begun; but it ends
            future.result(20)


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "interpreter"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("text", "cause", "step"),
    [
        ("echo 'OSError: [Errno 98] Address already in use'; exit 3", "has the port", "as root"),
        ('echo "error: unrecognized arguments: --x"; exit 2', "does not know an argument", "[engine] args"),
        ("echo something else; exit 1", "something else", "engine.log"),
    ],
)
def test_engine_that_exits_at_start(tmp_path: Path, text: str, cause: str, step: str) -> None:
    handle = VllmEngine().launch(config(tmp_path, python=program(tmp_path, text)))
    with handle.process, pytest.raises(EngineStartError, match="exited with status") as error:
        handle.ready(soon())
    assert cause in error.value.cause
    assert step in error.value.next_step


def test_engine_that_is_never_ready(tmp_path: Path) -> None:
    only_as_server = 'case "$*" in *serve*) echo begun; exec sleep 600;; esac'
    handle = VllmEngine().launch(config(tmp_path, python=program(tmp_path, only_as_server)))
    with handle.process, pytest.raises(EngineStartError, match="not ready within") as error:
        handle.ready(Deadline.after(0.5))
    assert "begun" in error.value.cause


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": Path("/nonexistent")}, TargetError, "no model"),
        ({"mutation": "unknown"}, UsageError, "no mutation"),
        ({"tensor_parallel": 0}, UsageError, "tensor-parallel"),
        ({"args": ("--port=1",)}, UsageError, "--port"),
        ({"args": ("-tp", "4")}, UsageError, "-tp"),
        ({"args": ("--no-enable-sleep-mode",), "sleep_mode": True}, UsageError, "switch off the sleep mode"),
    ],
)
def test_launch_that_cannot_work_is_refused(
    tmp_path: Path, fields: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        VllmEngine().launch(config(tmp_path, **fields))


def test_target_args_and_env_win(tmp_path: Path) -> None:
    settings = config(
        tmp_path,
        args=("--dtype=bfloat16", "--no-enforce-eager", "--seed", "7"),
        env={"OMP_NUM_THREADS": "4", "PYTHONPATH": "/of/target"},
        import_paths=(Path("/alias"),),
    )
    words = vllm_launch.command(settings, 8000)
    assert "--dtype" not in words
    assert "--enforce-eager" not in words
    assert words.count("--seed") == 1
    assert words[words.index("--max-model-len") + 1] == "256"
    env = vllm_launch.environment(settings)
    assert env["OMP_NUM_THREADS"] == "4"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["PYTHONPATH"] == f"/alias:{injection.INJECT}:/of/target"


def test_an_engine_on_gpus_has_settings_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    config = LaunchConfig(
        python=Path(sys.executable),
        model=tmp_path,
        tensor_parallel=2,
        workdir=tmp_path,
        args=("--no-enforce-eager", "--kv-cache-memory-bytes", "1024"),
        env={"CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": "/engine/site"},
        processor="cuda",
    )
    words = vllm_launch.command(config, 8000)
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "--no-enable-prefix-caching" in words
    assert "--enforce-eager" not in words
    assert words.count("--kv-cache-memory-bytes") == 1
    env = vllm_launch.environment(config)
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["PYTHONPATH"].endswith(":/engine/site")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env
    # Switches of multicast that the caller has set reach the engine.
    assert {env[name] for name in ("NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST")} == {"1"}
    assert env["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("args", [(), ("--enable-sleep-mode",)])
def test_an_engine_that_is_to_sleep_is_told_so_once(tmp_path: Path, args: tuple[str, ...]) -> None:
    asleep = vllm_launch.command(config(tmp_path, processor="cuda", sleep_mode=True, args=args), 8000)
    assert asleep.count("--enable-sleep-mode") == 1
    # Neither of the bounds on memory is taken back by it.
    assert {"--gpu-memory-utilization", "--kv-cache-memory-bytes"} <= set(asleep)
    awake = vllm_launch.command(config(tmp_path, processor="cuda"), 8000)
    assert [word for word in asleep if word not in awake] == ["--enable-sleep-mode"]


def test_callers_shell_does_not_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/caller")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    env = vllm_launch.environment(config(tmp_path))
    assert env["PYTHONPATH"] == str(injection.INJECT)
    assert "VLLM_LOGGING_LEVEL" not in env
    assert env["NCCL_NVLS_ENABLE"] == "0"


def test_second_loader_lies_behind_the_first(tmp_path: Path) -> None:
    settings = config(tmp_path, mutation=vllm_launch.SECOND_LOADER)
    first, second = vllm_launch.environment(settings)["PYTHONPATH"].split(":")
    assert first == str(injection.INJECT)
    assert (Path(second) / "nvsnap_hooks" / "loader.py").is_file()


def test_reply_with_error_has_its_type() -> None:
    reply = parse_reply({"rank": 1, "nonce": "n", "error": {"type": "NotDrained", "message": "x"}}, "n")
    assert reply.in_step
    assert reply.error == {"type": "NotDrained", "message": "x"}


def test_half_alive_front_outlives_its_engine(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    settings = config(tmp_path)
    port, behind = free_port(), free_port()
    argv = vllm_launch.front_command(settings, port, behind, [sys.executable, str(script), str(behind), "[]"])
    with EngineProcess.launch(argv, env={"PATH": "/usr/bin:/bin"}, workdir=settings.workdir) as process:
        handle = VllmHandle(settings, process, port)
        handle.ready(soon())
        (completion,) = handle.generate(["hello"], max_tokens=2, deadline=soon())
        assert completion.tokens == (5, 6)
        _front, engine = process.tree()
        engine.send(SIGKILL)
        wait_for("the engine's end", lambda: not engine.alive, soon())
        assert handle.health(soon()) is Health.SERVING
        with pytest.raises(DeadlineExceeded):
            handle.generate(["hello"], max_tokens=2, deadline=Deadline.after(0.5))
        assert process.terminate(soon()).graceful


def test_front_threads_end_with_the_engine(tmp_path: Path) -> None:
    with EngineProcess.launch(["/bin/sleep", "600"], env={}, workdir=config(tmp_path).workdir) as process:
        pool = process.network_executor(1)
        assert isinstance(pool, ThreadPoolExecutor)
        front = Front(process, free_port())
        assert front.health(soon()) is Health.REFUSED
        front.close()
        with pytest.raises(RequestFailed):
            front.call("GET", "/health", deadline=soon())
