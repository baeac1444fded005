"""The HTTP face of the receiver: `POST /v1/traces`, answered as the OTLP specification says.

Its promise is that a 200 means "on disk". What a client can send again later is answered with 503 and Retry-After;
what will never be accepted, with 400, 413 or 415, or it is counted as rejected in a 200.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

from google.rpc import code_pb2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from flywheel.errors import ReceiverError
from flywheel.sources.otlp.bounds import TooLargeError
from flywheel.sources.otlp.inbox import Row
from flywheel.sources.otlp.messages import (
    WINDOWS,
    Body,
    Encoding,
    UndecodableError,
    accepted,
    inflated,
    refused,
    request_of,
)
from flywheel.sources.otlp.rows import rows_of

log = logging.getLogger(__name__)

PATH: Final = "/v1/traces"
MAX_BODY: Final = 32 * 1024 * 1024
"""Bytes of a body, packed and unpacked. An exporter's batch of 512 spans is a few megabytes."""
MAX_HELD: Final = 8 * MAX_BODY
"""Bytes of all bodies as they were sent, whole or still arriving. Beside them one at a time is unpacked and read."""
TAKEN_AT_ONCE: Final = 8
"""Requests that are unpacked, read and stored at once; others wait with their bodies."""
READ_SECONDS: Final = 30.0
_TOLD_CHARACTERS: Final = 500
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
    """Receives requests on the event loop; unpacks and reads them one after the other in `executor`."""

    def __init__(
        self,
        store: Callable[[Sequence[Row]], Awaitable[None]],
        executor: Executor,
        *,
        token: str | None = None,
        max_body: int = MAX_BODY,
        max_held: int = MAX_HELD,
    ) -> None:
        """Whoever sends must know the `token`, if there is one."""
        self._store = store
        self._executor = executor
        self._wanted = None if token is None else f"Bearer {token}".encode()
        self._max_body = max_body
        self._max_held = max_held
        self._held = 0
        self._turns = asyncio.Semaphore(TAKEN_AT_ONCE)
        self._failing = False
        self.app = Starlette(
            routes=[Route(PATH, self._export, methods=["POST"])],
            exception_handlers={HTTPException: _http_error},
        )

    async def _export(self, request: Request) -> Response:
        if self._wanted is not None:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not secrets.compare_digest(given, self._wanted):
                why = "the token is missing or another one: send the header Authorization: Bearer TOKEN"
                raise HTTPException(401, why, {"WWW-Authenticate": "Bearer"})
        encoding = _encoding_of(request)
        packing = request.headers.get("content-encoding", "identity").strip().lower()
        if packing not in (*WINDOWS, "identity", ""):
            raise HTTPException(415, f"content encoding {packing!r} is not understood; send {' or '.join(WINDOWS)}")
        body = bytearray()
        try:
            await self._receive(request, body)
            async with self._turns:
                return await self._take(body, packing, encoding)
        except asyncio.CancelledError:
            # The server is stopping and has waited long enough. The client may send the same again.
            raise HTTPException(503, "the receiver is stopping", _LATER) from None
        finally:
            self._held -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Fill `body`; what is in it counts as held."""
        too_large = HTTPException(413, f"the body is larger than {self._max_body:,} bytes; send smaller batches")
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > self._max_body:
            raise too_large
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    self._held += len(chunk)
                    if len(body) > self._max_body:
                        raise too_large
                    if self._held > self._max_held:
                        raise HTTPException(503, "there is no room for more bodies; send it again later", _LATER)
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {READ_SECONDS:g} seconds") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client went away before its body had arrived") from None

    async def _take(self, body: Body, packing: str, encoding: Encoding) -> Response:
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.run_in_executor(
                self._executor, lambda: rows_of(request_of(inflated(body, packing, self._max_body), encoding))
            )
            if rows.accepted:
                await self._store(rows.accepted)
        except UndecodableError as error:
            raise HTTPException(400, str(error)) from error
        except TooLargeError as error:
            raise HTTPException(413, f"{error}; send smaller batches") from error
        except ReceiverError as error:
            # Said once and not for every request of every client that tries again.
            if not self._failing:
                log.error("%s", error)
            self._failing = True
            return _refusal(503, str(error), encoding, _LATER)
        except Exception:
            log.exception("a request for %s could not be handled", PATH)
            return _refusal(500, "the request could not be handled; the log says why", encoding)
        if self._failing and rows.accepted:
            self._failing = False
            log.info("spans are being stored again")
        if rows.rejected:
            log.warning(
                "%d of %d spans were refused: %s", rows.rejected, rows.rejected + len(rows.accepted), rows.why
            )
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
        why = f"there is nothing at {request.url.path}: traces are received at {PATH}, metrics and logs are not"
    elif error.status_code != 405:
        # These were spans, and not every client says that they are lost.
        sender = request.client.host if request.client else "a client"
        log.warning("what %s sent was answered with %d: %s", sender, error.status_code, why[:_TOLD_CHARACTERS])
    try:
        encoding = _encoding_of(request)
    except HTTPException:
        encoding = Encoding.JSON
    return _refusal(error.status_code, why, encoding, error.headers)
