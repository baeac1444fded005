"""The HTTP server of the OTLP receiver: connection limits and the route `POST /v1/traces`.

A 200 means that the spans are on disk. Errors that a client can retry get 503 with Retry-After. Requests that will
never be accepted get 400, 413 or 415, or are counted as rejected spans in a 200.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Final

from google.rpc import code_pb2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from flywheel.errors import ReceiverError
from flywheel.sources.otlp.decoding import (
    WINDOWS,
    Body,
    Encoding,
    TooLargeError,
    UndecodableError,
    accepted,
    inflated,
    refused,
    request_of,
)
from flywheel.sources.otlp.inbox import Row
from flywheel.sources.otlp.rows import rows_of

log = logging.getLogger(__name__)

HEADER_SECONDS: Final = 10.0
"""Longest time in seconds without a complete header: after connecting, and after each response."""
MAX_CONNECTIONS: Final = 512
SHARE_OF_DESCRIPTORS: Final = 4
"""A receiver uses at most this fraction (1/4) of the file descriptors that the process may open."""
LOG_SECONDS: Final = 60.0
"""Shortest time between two log lines about too many connections, or about missing descriptors."""


def max_connections() -> int:
    """Concurrent connections that one receiver accepts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // SHARE_OF_DESCRIPTORS)


class LogRateLimit:
    """Allows an event to be logged once per `seconds`."""

    def __init__(self, seconds: float = LOG_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last: float | None = None

    def allows(self) -> bool:
        now = self._clock()
        if self._last is not None and now - self._last < self._seconds:
            return False
        self._last = now
        return True


class Protocol(H11Protocol):
    """A connection with a deadline for each header. Connections beyond the limit are closed at once.

    uvicorn limits only the time between two requests; silent connections would hold descriptors forever.
    """

    too_many_log = LogRateLimit()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            if self.too_many_log.allows():
                log.warning("more than %d connections to the receiver: further ones are closed", max_connections())
            transport.abort()
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_deadline()

    def on_response_complete(self) -> None:
        # Before the base class handles the next request, which may have arrived already.
        self._start_deadline()
        super().on_response_complete()

    def _start_deadline(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def limit_accept_error_logs(loop: asyncio.AbstractEventLoop, where: str, fileno: int) -> None:
    """Log at most once a minute that no connection can be accepted; asyncio logs it hundreds of times a second."""
    before = loop.get_exception_handler() or (lambda loop, context: loop.default_exception_handler(context))
    rate = LogRateLimit()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> Any:
        error, socket = context.get("exception"), context.get("socket")
        if not isinstance(error, OSError) or error.errno not in _NO_RESOURCE:
            return before(loop, context)
        if socket is None or socket.fileno() != fileno:
            return before(loop, context)
        if rate.allows():
            log.error("cannot accept connections at %s: %s; senders retry", where, error.strerror)
        return None

    loop.set_exception_handler(handle)


_NO_RESOURCE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


PATH: Final = "/v1/traces"
MAX_BODY: Final = 32 * 1024 * 1024
"""Bytes of one body, compressed and uncompressed. A batch of 512 spans has a few megabytes."""
MAX_HELD: Final = 8 * MAX_BODY
"""Bytes of all received bodies, complete or still arriving. In addition, one at a time is decoded."""
DECODED_AT_ONCE: Final = 8
"""Requests that are decoded and stored concurrently; others wait with their bodies."""
READ_SECONDS: Final = 30.0
"""Longest time in which a body must arrive."""
_LOGGED_CHARACTERS: Final = 500
_LATER: Final = {"Retry-After": "5"}

_CODES: Final = {
    400: code_pb2.INVALID_ARGUMENT,
    401: code_pb2.UNAUTHENTICATED,
    404: code_pb2.NOT_FOUND,
    405: code_pb2.UNIMPLEMENTED,
    408: code_pb2.DEADLINE_EXCEEDED,
    413: code_pb2.RESOURCE_EXHAUSTED,
    415: code_pb2.INVALID_ARGUMENT,
    500: code_pb2.INTERNAL,
    503: code_pb2.UNAVAILABLE,
}


class TracesEndpoint:
    """Receives requests on the event loop, decodes them in `executor` and passes the rows to `store`.

    With a `token`, requests need the header `Authorization: Bearer TOKEN`.
    """

    def __init__(
        self,
        store: Callable[[Sequence[Row]], Awaitable[None]],
        executor: Executor,
        *,
        token: str | None = None,
        max_body: int = MAX_BODY,
        max_held: int = MAX_HELD,
    ) -> None:
        self._store = store
        self._executor = executor
        self._wanted = None if token is None else f"Bearer {token}".encode()
        self._max_body = max_body
        self._max_held = max_held
        self._held = 0
        self._free = asyncio.Semaphore(DECODED_AT_ONCE)
        self._failing = False
        self.app = Starlette(
            routes=[Route(PATH, self._export, methods=["POST"])],
            exception_handlers={HTTPException: _http_error},
        )

    async def _export(self, request: Request) -> Response:
        if self._wanted is not None:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not secrets.compare_digest(given, self._wanted):
                why = "the token is missing or wrong: send the header Authorization: Bearer TOKEN"
                raise HTTPException(401, why, {"WWW-Authenticate": "Bearer"})
        encoding = _encoding_of(request)
        compression = request.headers.get("content-encoding", "identity").strip().lower()
        if compression not in (*WINDOWS, "identity", ""):
            raise HTTPException(
                415, f"content encoding {compression!r} is not understood; send {' or '.join(WINDOWS)}"
            )
        body = bytearray()
        try:
            await self._receive(request, body)
            async with self._free:
                return await self._decode_and_store(body, compression, encoding)
        except asyncio.CancelledError:
            # The server stops and its grace period is over. The client can retry.
            raise HTTPException(503, "the receiver is stopping", _LATER) from None
        finally:
            self._held -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Read the request into `body` and count its bytes in `_held`."""
        too_large = HTTPException(413, f"the body is larger than {self._max_body:,} bytes; send smaller batches")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            raise too_large
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    self._held += len(chunk)
                    if len(body) > self._max_body:
                        raise too_large
                    if self._held > self._max_held:
                        raise HTTPException(503, "the receiver holds too many bodies; retry later", _LATER)
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {READ_SECONDS:g} seconds") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client disconnected before its body had arrived") from None

    async def _decode_and_store(self, body: Body, compression: str, encoding: Encoding) -> Response:
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.run_in_executor(
                self._executor, lambda: rows_of(request_of(inflated(body, compression, self._max_body), encoding))
            )
            if rows.accepted:
                await self._store(rows.accepted)
        except UndecodableError as error:
            raise HTTPException(400, str(error)) from error
        except TooLargeError as error:
            raise HTTPException(413, f"{error}; send smaller batches") from error
        except ReceiverError as error:
            # Logged once, not for every retry of every client.
            if not self._failing:
                log.error("%s", error)
            self._failing = True
            return _refusal(503, str(error), encoding, _LATER)
        except Exception:
            log.exception("a request for %s could not be handled", PATH)
            return _refusal(500, "the request could not be handled; the log says why", encoding)
        if self._failing and rows.accepted:
            self._failing = False
            log.info("storing spans works again")
        if rows.rejected:
            log.warning("rejected %d of %d spans: %s", rows.rejected, rows.rejected + len(rows.accepted), rows.why)
        return Response(accepted(encoding, rows.rejected, rows.why), media_type=encoding.value)


def _encoding_of(request: Request) -> Encoding:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        return Encoding(media_type)
    except ValueError:
        known = " or ".join(Encoding)
        raise HTTPException(415, f"content type {media_type!r} is not understood; send {known}") from None


def _refusal(status: int, why: str, encoding: Encoding, headers: Mapping[str, str] | None = None) -> Response:
    body = refused(encoding, _CODES.get(status, code_pb2.UNKNOWN), why)
    return Response(body, status, headers, media_type=encoding.value)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = error.detail
    if error.status_code == 404:
        why = f"{request.url.path} does not exist: only traces are received, at {PATH}; metrics and logs are not"
    elif error.status_code != 405:
        # These were spans, and not every client reports the loss.
        sender = request.client.host if request.client else "a client"
        log.warning("answered %s with %d: %s", sender, error.status_code, why[:_LOGGED_CHARACTERS])
    try:
        encoding = _encoding_of(request)
    except HTTPException:
        encoding = Encoding.JSON
    return _refusal(error.status_code, why, encoding, error.headers)
