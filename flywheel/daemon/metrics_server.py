"""Serves the daemon's `/metrics`, `/healthz` and `/readyz` (`daemon.metrics`), on its event loop.

Metrics never stop the daemon: an address that cannot be listened at is an error in the log, and tried again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from flywheel.config import DaemonSettings
from flywheel.config.ingest import host_and_port, is_loopback
from flywheel.errors import FlywheelError
from flywheel.web_server import bearer_token, bound_socket, web_server

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

FRESH_SECONDS: Final = 2.0
"""Requests within this time get the same metrics: reading the state for each would cost the daemon time."""
STOP_SECONDS: Final = 3
MAX_CONNECTIONS: Final = 64


class MetricsServer:
    """The server. `snapshot` is the state as `status --json` shows it.

    `unhealthy` says why the daemon does not work any more, `unready` why it does not work yet, or no longer; both are
    empty while it does. `concern` is what a restart would not cure.
    """

    def __init__(
        self,
        settings: DaemonSettings,
        snapshot: Callable[[], Awaitable[dict[str, Any]]],
        unhealthy: Callable[[], str],
        unready: Callable[[], str],
        concern: Callable[[], str] = str,
    ) -> None:
        self._settings = settings
        self._snapshot, self._unhealthy, self._unready = snapshot, unhealthy, unready
        self._concern = concern
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._token: str | None = None
        self._reading = asyncio.Lock()
        self._read: tuple[float, bytes] = (float("-inf"), b"")
        self.address: tuple[str, int] | None = None
        """Host and port while it serves; the system chooses the port where `daemon.metrics` has port 0."""

    async def listen(self) -> None:
        """Serve, unless it does already or should not. Raises ReceiverError and ConfigError."""
        if self._settings.metrics is None or self._serving is not None:
            return
        host, port = host_and_port(self._settings.metrics)
        attempted = f"serve metrics at {self._settings.metrics}"
        self._token = bearer_token(attempted, self._settings.metrics_token_env, "daemon.metrics_token_env")
        bound = bound_socket(attempted, host, port, "daemon.metrics")
        options = {"limit_concurrency": MAX_CONNECTIONS, "timeout_graceful_shutdown": STOP_SECONDS}
        self._server = web_server(self._app(), http="h11", **options)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="metrics server")
        self._serving.add_done_callback(self._ended)
        self.address = (host, bound.getsockname()[1])
        log.info("serving metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self.address[1])

    def _ended(self, serving: asyncio.Task[None]) -> None:
        self._serving = self._server = self.address = None
        if not serving.cancelled() and (error := serving.exception()):
            log.error("the metrics server ended with an error", exc_info=error)

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        return Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])

    async def _metrics(self, request: Request) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST
        from starlette.responses import PlainTextResponse, Response

        if refused := self._refusal(request):
            return refused
        async with self._reading:
            read_at, text = self._read
            if time.monotonic() - read_at > FRESH_SECONDS:
                from flywheel.daemon.prometheus import exposition

                try:
                    text = exposition(await self._snapshot())
                except FlywheelError as error:
                    return PlainTextResponse(f"{error}\n", 503)
                self._read = (time.monotonic(), text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request without the token; on loopback also to one of a web page in a browser here."""
        from starlette.responses import PlainTextResponse

        if self._token is not None:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
                why = "the token is missing or wrong: send the header Authorization: Bearer TOKEN\n"
                return PlainTextResponse(why, 401, {"WWW-Authenticate": "Bearer"})
            return None
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        except ValueError:
            host = ""
        return None if is_loopback(host) else PlainTextResponse("this host name is not served here\n", 403)

    async def _healthz(self, _: Request) -> Response:
        return _answer(self._unhealthy(), self._concern())

    async def _readyz(self, _: Request) -> Response:
        return _answer(self._unhealthy() or self._unready())


def _answer(why_not: str, concern: str = "") -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(f"{why_not or concern or 'ok'}\n", 503 if why_not else 200)
