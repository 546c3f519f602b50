"""Cheap signs of progress: metrics pages, also in another network namespace, and the kernel's counters."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.hang import progress
from tests.planted import synthetic as make
from tests.planted import victims

if TYPE_CHECKING:
    from collections.abc import Iterator

VLLM = b"""# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 120.0
vllm:generation_tokens_total{engine="1",model_name="m"} 7.0
vllm:generation_tokens_created{engine="0"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 0.0
"""
SGLANG = b"""sglang:generation_tokens_total{model="m"} 5
sglang:num_running_reqs{model="m"} 0
sglang:num_queue_reqs 1
"""
LOOPBACK = "http://127.0.0.1"


def test_vllm_page() -> None:
    poll = progress.parse_metrics(VLLM, 1.0)
    assert poll == progress.Poll(1.0, 130.0, True)


def test_sglang_page() -> None:
    poll = progress.parse_metrics(SGLANG, 1.0)
    assert poll == progress.Poll(1.0, 5.0, True)


@pytest.mark.parametrize(
    "text", [b"", b"<html>", b"cpu_seconds_total 3\n", b"vllm:generation_tokens_total NaNN\n"]
)
def test_page_without_known_counters_is_no_poll(text: bytes) -> None:
    assert progress.parse_metrics(text, 1.0) is None


@contextlib.contextmanager
def page(text: bytes, status: int = 200) -> Iterator[int]:
    """An HTTP server on the loopback with ``text`` at /metrics; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def test_page_is_fetched() -> None:
    with (
        page(VLLM) as port,
        contextlib.closing(progress.Metrics(f"{LOOPBACK}:{port}/metrics")) as source,
    ):
        poll = source.poll()
    assert poll is not None
    assert poll.counter == 130.0


def test_front_that_does_not_answer_is_no_poll() -> None:
    with (
        page(VLLM, 503) as port,
        contextlib.closing(progress.Metrics(f"{LOOPBACK}:{port}/metrics")) as source,
    ):
        assert source.poll() is None
    with contextlib.closing(progress.Metrics(f"{LOOPBACK}:{port}/metrics")) as source:
        assert source.poll() is None


def test_page_is_found_by_the_listening_sockets() -> None:
    with page(b"nothing") as other, page(VLLM) as port:
        assert {other, port} <= set(progress.listening_ports([os.getpid()]))
        assert progress.find_metrics([os.getpid()]) == f"{LOOPBACK}:{port}/metrics"


SERVER = """
import http.server, socketserver, sys, fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
    fcntl.ioctl(control, 0x8914, request)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"vllm:generation_tokens_total 42\\n")
    def log_message(self, *_): pass
with socketserver.TCPServer(("127.0.0.1", 8000), Handler) as server:
    print("up", flush=True)
    server.serve_forever()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="making a network namespace needs root")
def test_page_in_another_network_namespace_is_found_and_fetched() -> None:
    prefix = [shutil.which("unshare") or "unshare", "--net"]
    with victims.python(SERVER, prefix=prefix) as (one, _):
        url = progress.find_metrics([one.pid])
        assert url == "http://127.0.0.1:8000/metrics"
        with contextlib.closing(progress.Metrics(url, one.pid)) as source:
            poll = source.poll()
        assert poll is not None
        assert poll.counter == 42.0
    # The reader's thread went there, this one did not.
    assert Path("/proc/thread-self/ns/net").stat().st_ino == Path("/proc/self/ns/net").stat().st_ino


def grows(code: str) -> float:
    """How much the kernel's counter grows per second for one rank that runs ``code``."""
    with victims.python(code) as (one, _):
        member = replace(make.member(0), pid=one.pid, create_time=one.create_time)
        source = progress.KernelCounters([member])
        first = source.poll()
        assert first is not None

        def later() -> progress.Poll | None:
            poll = source.poll()
            return poll if poll is not None and poll.at - first.at > 1.0 else None

        last = wait_for("a second to pass", later, Deadline.after(20.0))
        return (last.counter - first.counter) / (last.at - first.at)


@pytest.mark.parametrize(
    "code", [victims.SLEEPER, victims.SPINNER, victims.NATIVE], ids=["asleep", "spinning", "in C"]
)
def test_standing_ranks_do_not_count(code: str) -> None:
    assert grows(code) < 1.0


WORKING = {
    "touches memory": (
        "import mmap\nprint('up', flush=True)\nwhile True:\n"
        "    with mmap.mmap(-1, 1 << 20) as new:\n        new.write(b'x' * (1 << 20))"
    ),
    "reads": (
        "print('up', flush=True)\nwhile True:\n"
        "    with open('/proc/self/exe', 'rb') as file:\n        file.read(1 << 20)"
    ),
    "has children at work": (
        "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "print('up', flush=True)\np.wait()"
    ),
}


@pytest.mark.parametrize("code", WORKING.values(), ids=WORKING)
def test_working_ranks_count(code: str) -> None:
    assert grows(code) > 1.0


def test_counters_of_ranks_that_are_gone_are_none() -> None:
    assert progress.KernelCounters([make.member(0)]).poll() is None
