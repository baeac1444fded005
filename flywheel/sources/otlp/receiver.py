"""The OTLP receiver: `POST /v1/traces` on the daemon's event loop. Accepted spans survive a stop.

A 200 means that the spans are on disk. Errors that a client can retry get 503 with Retry-After. Requests that will
never be accepted get another 4xx, or are counted as rejected spans in a 200. The receiver owns the socket, the web
server and the thread that decodes requests, and installs no signal handlers. Importing it loads protobuf.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from google.rpc import code_pb2
from starlette.requests import Request

from flywheel.config.ingest import host_and_port
from flywheel.errors import ReceiverError
from flywheel.records.privacy import NOBODY, PrivateNames
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
from flywheel.sources.otlp.inbox import BUSY_SECONDS, Inbox, Refusal, Row
from flywheel.sources.otlp.rows import rows_of
from flywheel.system.log import log_rarely
from flywheel.system.server_limits import (
    Limited,
    Receive,
    RefusedError,
    Scope,
    Send,
    ServerLimits,
    header,
    respond,
)
from flywheel.system.web_server import BackgroundServer, bearer_token, bound_socket, check_token

log = logging.getLogger(__name__)

PATH: Final = "/v1/traces"
STOP_SECONDS: Final = 3
LIMITS: Final = ServerLimits(body_hint="Send smaller batches.")
DECODED_AT_ONCE: Final = 8
"""Requests that are decoded and stored concurrently; others wait with their bodies."""
_LOGGED_CHARACTERS: Final = 500

_CODES: Final = {
    400: code_pb2.INVALID_ARGUMENT,
    401: code_pb2.UNAUTHENTICATED,
    404: code_pb2.NOT_FOUND,
    405: code_pb2.UNIMPLEMENTED,
    408: code_pb2.DEADLINE_EXCEEDED,
    413: code_pb2.RESOURCE_EXHAUSTED,
    415: code_pb2.INVALID_ARGUMENT,
    421: code_pb2.PERMISSION_DENIED,
    500: code_pb2.INTERNAL,
    503: code_pb2.UNAVAILABLE,
}


class TracesEndpoint:
    """An ASGI app. It decodes requests in `executor` and passes the rows to `store`, with the ids of traces that are
    `private` or refuse recording.

    With a `token`, requests need the header `Authorization: Bearer TOKEN`.
    """

    def __init__(
        self,
        store: Callable[[Sequence[Row], Collection[Refusal]], Awaitable[None]],
        executor: Executor,
        limits: ServerLimits,
        *,
        token: str | None = None,
        private: PrivateNames = NOBODY,
    ) -> None:
        self._store = store
        self._executor = executor
        self._token = token
        self._private = private
        self._max_body = limits.body_bytes
        self._free = asyncio.Semaphore(DECODED_AT_ONCE)
        self._failing = False
        self.app = Limited(self._export, limits, _refuse)

    async def _export(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_token(scope, self._token)
        if scope["path"] != PATH:
            why = f"{scope['path']} does not exist: only traces are received, at {PATH}; metrics and logs are not"
            raise RefusedError(404, why)
        if scope["method"] != "POST":
            raise RefusedError(405, "only POST is accepted", {"Allow": "POST"})
        encoding = _encoding_of(scope)
        if encoding is None:
            content_type = header(scope, b"content-type").decode("latin-1")
            raise RefusedError(415, f"content type {content_type!r} is not understood; send {' or '.join(Encoding)}")
        compression = header(scope, b"content-encoding").decode("latin-1").strip().lower() or "identity"
        if compression not in (*WINDOWS, "identity"):
            raise RefusedError(
                415, f"content encoding {compression!r} is not understood; send {' or '.join(WINDOWS)}"
            )
        try:
            body = await Request(scope, receive).body()
            async with self._free:
                answer = await self._decode_and_store(body, compression, encoding)
        except asyncio.CancelledError:
            # The server stops and its grace period is over. The client can retry.
            raise RefusedError(503, "the receiver is stopping") from None
        await respond(send, 200, answer, encoding.value)

    async def _decode_and_store(self, body: Body, compression: str, encoding: Encoding) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.run_in_executor(
                self._executor,
                lambda: rows_of(request_of(inflated(body, compression, self._max_body), encoding), self._private),
            )
            if rows.accepted:
                await self._store(rows.accepted, rows.private)
        except UndecodableError as error:
            raise RefusedError(400, str(error)) from error
        except TooLargeError as error:
            raise RefusedError(413, f"{error}. {LIMITS.body_hint}") from error
        except ReceiverError as error:
            # Logged once, not for every retry of every client.
            if not self._failing:
                log.error("%s", error)
            self._failing = True
            raise RefusedError(503, str(error)) from error
        except Exception as error:
            log.exception("a request for %s could not be handled", PATH)
            raise RefusedError(500, "the request could not be handled; the log says why") from error
        if self._failing and rows.accepted:
            self._failing = False
            log.info("storing spans works again")
        if rows.rejected:
            log.warning("rejected %d of %d spans: %s", rows.rejected, rows.rejected + len(rows.accepted), rows.why)
        return accepted(encoding, rows.rejected, rows.why)


def _encoding_of(scope: Scope) -> Encoding | None:
    media_type = header(scope, b"content-type").decode("latin-1").partition(";")[0].strip().lower()
    return next((encoding for encoding in Encoding if encoding.value == media_type), None)


async def _refuse(scope: Scope, send: Send, refusal: RefusedError) -> None:
    if refusal.status < 500 and refusal.status not in (404, 405):
        # These were spans, and not every client reports the loss.
        sender = scope["client"][0] if scope.get("client") else "a client"
        log_rarely(log, f"answered %s with {refusal.status}: %s", sender, str(refusal)[:_LOGGED_CHARACTERS])
    encoding = _encoding_of(scope) or Encoding.JSON
    body = refused(encoding, _CODES.get(refusal.status, code_pb2.UNKNOWN), str(refusal))
    await respond(send, refusal.status, body, encoding.value, refusal.headers)


class Receiver:
    """Receives at `listen` (HOST:PORT; port 0 lets the system choose one) and stores into `inbox`.

    `token_env` names the environment variable with the token that senders must send. Without it, every client that
    reaches the address may send. Of `private` users, conversations and agents only a count is stored.
    """

    def __init__(
        self,
        listen: str,
        inbox: Path,
        *,
        token_env: str | None = None,
        busy_seconds: float = BUSY_SECONDS,
        private: PrivateNames = NOBODY,
    ) -> None:
        self._listen = listen
        self._token_env = token_env
        self._private = private
        self._inbox = Inbox(inbox, busy_seconds=busy_seconds)
        self._thread: ThreadPoolExecutor | None = None
        self._server: BackgroundServer | None = None
        self._address: tuple[str, int] | None = None

    @property
    def url(self) -> str:
        """The URL for clients. The port is known when `start` has returned."""
        host, port = self._address or host_and_port(self._listen)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    async def start(self) -> None:
        """Open the inbox and listen. Raises ReceiverError (retryable if waiting may help) and ConfigError."""
        host, port = host_and_port(self._listen)
        token = bearer_token(f"receive spans at {self._listen}", self._token_env, "token_env")
        bound = bound_socket(f"receive spans at {host}:{port}", host, port, "listen")
        try:
            await self._inbox.open()
        except BaseException:
            bound.close()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="otlp")
        self._address = (host, bound.getsockname()[1])
        # With a token, by any name.
        limits = LIMITS if token is None else replace(LIMITS, hosts=None)
        app = TracesEndpoint(self._inbox.store, self._thread, limits, token=token, private=self._private).app
        self._server = BackgroundServer(app, bound, f"the receiver at {self.url}", limits, stop_seconds=STOP_SECONDS)
        log.info("receiving spans at %s", self.url)

    async def stop(self) -> None:
        """Stop listening, finish the requests in flight (at most a few seconds) and close the inbox."""
        if self._server is not None:
            await self._server.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)
        await self._inbox.close()
        self._server = self._thread = None
