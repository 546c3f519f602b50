"""HTTP to an engine's front, from threads that sit in the engine's network namespace."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from nvsnap_conformance.engines.protocol import Health, NotConnected, RequestFailed, Unavailable
from nvsnap_conformance.errors import DeadlineExceeded, NvsnapError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.process import EngineProcess

T = TypeVar("T")

_CONTROL_THREADS = 4
_REQUEST_THREADS = 16


class Front:
    """The HTTP front of one engine.

    Control calls and requests have threads of their own, so that requests that wait in a quiesced engine
    never hold up the call that resumes it. No connection is kept alive: an idle one would be part of every
    image of the engine's sockets.
    """

    def __init__(self, process: EngineProcess, port: int) -> None:
        self._process = process
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"Connection": "close"},
            trust_env=False,
        )
        self._control = process.network_executor(_CONTROL_THREADS)
        self._requests = process.network_executor(_REQUEST_THREADS)

    def call(
        self,
        method: str,
        path: str,
        *,
        deadline: Deadline,
        json: Any = None,
        params: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Make one control call and return the response, whose status is below 400.

        Raises :class:`Unavailable` for 503, :class:`RequestFailed` for any other status from 400 on and for
        a broken connection, :class:`DeadlineExceeded` at the deadline.
        """
        future = self._submit(self._control, lambda: self._send(method, path, deadline, json, params))
        return self.result(future, f"{method} {path}", deadline)

    def submit(
        self, path: str, json: Any, deadline: Deadline, read: Callable[[httpx.Response], T]
    ) -> concurrent.futures.Future[T]:
        """POST in the background; the future gives ``read(response)`` or raises as :meth:`call` does."""
        return self._submit(self._requests, lambda: read(self._send("POST", path, deadline, json, None)))

    def result(self, future: concurrent.futures.Future[T], what: str, deadline: Deadline) -> T:
        """Return the future's result; raise :class:`DeadlineExceeded` where it is not there in time."""
        try:
            return future.result(deadline.remaining())
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise _late(what, deadline) from None

    def health(self, deadline: Deadline) -> Health:
        """Ask ``/health`` once."""
        try:
            self.call("GET", "/health", deadline=deadline)
        except RequestFailed as failure:
            return Health.REFUSED if failure.status is None else Health.UNHEALTHY
        except DeadlineExceeded:
            return Health.SILENT
        return Health.SERVING

    def close(self) -> None:
        """Close every connection; calls under way fail."""
        self._client.close()

    def _submit(
        self, pool: concurrent.futures.ThreadPoolExecutor, call: Callable[[], T]
    ) -> concurrent.futures.Future[T]:
        try:
            return pool.submit(call)
        except RuntimeError as error:
            raise RequestFailed("the engine has ended", status=None, body=str(error)) from error

    def _send(
        self, method: str, path: str, deadline: Deadline, json: Any, params: Mapping[str, str] | None
    ) -> httpx.Response:
        what = f"{method} {path}"
        try:
            # Each of httpx's own timeouts is per operation; together with result() the deadline holds.
            response = self._client.request(
                method, path, json=json, params=params, timeout=max(0.01, deadline.remaining())
            )
        except httpx.TimeoutException as error:
            raise _late(what, deadline) from error
        except httpx.ConnectError as error:
            raise NotConnected(what, status=None, body=f"{type(error).__name__}: {error}") from error
        except (httpx.HTTPError, RuntimeError) as error:
            # httpx raises RuntimeError for a client that has been closed.
            reason = f"{type(error).__name__}: {error}"
            raise RequestFailed(what, status=None, body=reason) from error
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise Unavailable(what, status=response.status_code, body=response.text)
        if response.is_error:
            raise RequestFailed(what, status=response.status_code, body=response.text)
        return response


def json_of(response: httpx.Response, what: str) -> Any:
    """Return the response's JSON; raise :class:`RequestFailed` where the body is none."""
    try:
        return response.json()
    except ValueError as error:
        raise RequestFailed(
            f"{what}: not JSON ({error})", status=response.status_code, body=response.text
        ) from error


def _late(what: str, deadline: Deadline) -> NvsnapError:
    return DeadlineExceeded(
        f"{what}: no answer within {deadline.budget:.1f} s",
        cause="the engine waits for something, or is stopped",
        next_step="see the stack bundle of this run",
    )
