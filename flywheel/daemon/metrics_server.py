"""Serves the daemon's `/metrics`, `/healthz` and `/readyz` (`daemon.metrics`), on its event loop.

Metrics never stop the daemon: an address that cannot be listened at is an error in the log, and tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from flywheel.config.ingest import host_and_port
from flywheel.config.serving import DaemonSettings
from flywheel.errors import FlywheelError
from flywheel.system.server_limits import (
    Limited,
    Receive,
    RefusedError,
    Scope,
    Send,
    ServerLimits,
    refuse_in_text,
    respond,
)
from flywheel.system.web_server import BackgroundServer, bearer_token, bound_socket, check_token

if TYPE_CHECKING:
    from flywheel.daemon.status import Facts

log = logging.getLogger(__name__)

FRESH_SECONDS: Final = 2.0
"""Requests within this time get the same metrics: reading the state for each would cost the daemon time."""
STOP_SECONDS: Final = 3
LIMITS: Final = ServerLimits(body_bytes=0)


class MetricsServer:
    """The server. `snapshot` reads the status.

    `unhealthy` says why the daemon does not work any more, `unready` why it does not work yet, or no longer; both are
    empty while it does. `concern` is what a restart would not cure.
    """

    def __init__(
        self,
        settings: DaemonSettings,
        snapshot: Callable[[], Awaitable[Facts]],
        unhealthy: Callable[[], str],
        unready: Callable[[], str],
        concern: Callable[[], str] = str,
    ) -> None:
        self._settings = settings
        self._snapshot, self._unhealthy, self._unready = snapshot, unhealthy, unready
        self._concern = concern
        self._server: BackgroundServer | None = None
        self._address = ("", 0)
        self._token: str | None = None
        self._reading = asyncio.Lock()
        self._read: tuple[float, bytes] = (float("-inf"), b"")

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port while it serves; the system chooses the port where `daemon.metrics` has port 0."""
        return None if self._server is None or self._server.has_ended else self._address

    async def listen(self) -> None:
        """Serve, unless it does already or should not. Raises ReceiverError and ConfigError."""
        if self._settings.metrics is None or self.address is not None:
            return
        host, port = host_and_port(self._settings.metrics)
        attempted = f"serve metrics at {self._settings.metrics}"
        self._token = bearer_token(attempted, self._settings.metrics_token_env, "daemon.metrics_token_env")
        bound = bound_socket(attempted, host, port, "daemon.metrics")
        self._address = (host, bound.getsockname()[1])
        # With a token, by any name.
        limits = LIMITS if self._token is None else replace(LIMITS, hosts=None)
        app = Limited(self._answer, limits, refuse_in_text)
        self._server = BackgroundServer(app, bound, "the metrics server", limits, stop_seconds=STOP_SECONDS)
        log.info("serving metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self._address[1])

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST

        if scope["method"] not in ("GET", "HEAD"):
            raise RefusedError(405, "only GET is answered", {"Allow": "GET, HEAD"})
        match scope["path"]:
            case "/metrics":
                check_token(scope, self._token)
                await respond(send, 200, await self._exposition(), CONTENT_TYPE_LATEST)
            case "/healthz":
                await _say(send, self._unhealthy(), self._concern())
            case "/readyz":
                await _say(send, self._unhealthy() or self._unready())
            case _:
                raise RefusedError(404, "there are only /metrics, /healthz and /readyz")

    async def _exposition(self) -> bytes:
        async with self._reading:
            read_at, text = self._read
            if time.monotonic() - read_at > FRESH_SECONDS:
                from flywheel.daemon.prometheus import exposition

                try:
                    text = exposition(await self._snapshot())
                except FlywheelError as error:
                    raise RefusedError(503, str(error)) from error
                self._read = (time.monotonic(), text)
        return text


async def _say(send: Send, why_not: str, concern: str = "") -> None:
    text = f"{why_not or concern or 'ok'}\n".encode()
    await respond(send, 503 if why_not else 200, text, "text/plain; charset=utf-8")
