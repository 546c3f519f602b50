"""A known-bad front: keeps saying that it is healthy after its engine has died, and lets requests wait.

Run by the engine's interpreter as ``front_mutant.py --port P --engine-port Q -- ENGINE ARGV``: it starts
the engine, passes requests on to it, and has been healthy for good once the engine was. It is what a front
looks like that never asks its engine again (the half-alive engine of several reports: the workers are
gone, the port is open, clients wait for ever). Standard library only.
"""

from __future__ import annotations

import argparse
import http.client
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Front(ThreadingHTTPServer):
    """Passes requests on to the engine at ``engine_port``."""

    daemon_threads = True

    def __init__(self, port: int, engine_port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.engine_port = engine_port
        self.was_healthy = False
        self.for_ever = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Front

    def do_GET(self) -> None:
        """Answer a GET."""
        self._serve("GET")

    def do_POST(self) -> None:
        """Answer a POST."""
        self._serve("POST")

    def log_message(self, *_args: Any) -> None:
        """Log nothing: the engine has a log."""

    def _serve(self, method: str) -> None:
        health = self.path == "/health"
        if health and self.server.was_healthy:
            self._answer(200, b"", "text/plain")
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, answer, kind = self._ask_engine(method, body)
        except OSError:
            status, answer, kind = 502, b"the engine cannot be reached", "text/plain"
        if health and status == http.client.OK:
            self.server.was_healthy = True
        elif self.server.was_healthy and status >= http.client.INTERNAL_SERVER_ERROR:
            # The defect: the client waits for an engine that will not answer any more.
            self.server.for_ever.wait()
        self._answer(status, answer, kind)

    def _ask_engine(self, method: str, body: bytes) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.engine_port)
        try:
            connection.request(
                method, self.path, body, {"Content-Type": self.headers.get("Content-Type") or "text/plain"}
            )
            response = connection.getresponse()
            return response.status, response.read(), response.getheader("Content-Type") or "text/plain"
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> int:
    """Start the engine and stand before it until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine-port", type=int, required=True)
    parser.add_argument("engine", nargs="+")
    options = parser.parse_args()
    engine = subprocess.Popen(options.engine)
    front = Front(options.port, options.engine_port)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    signal.sigwait(stop)
    engine.terminate()
    return engine.wait()


if __name__ == "__main__":
    sys.exit(main())
