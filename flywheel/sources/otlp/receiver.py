"""Starts and stops the OTLP receiver on the daemon's event loop; accepted spans survive a stop.

Owns the socket, the web server and the thread that decodes requests. Installs no signal handlers.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from flywheel.config.ingest import host_and_port
from flywheel.sources.otlp.inbox import BUSY_SECONDS, Inbox
from flywheel.system.web_server import BackgroundServer, bearer_token, bound_socket

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 3


class Receiver:
    """Receives at `listen` (HOST:PORT; port 0 lets the system choose one) and stores into `inbox`.

    `token_env` names the environment variable with the token that senders must send. Without it, every client that
    reaches the address may send.
    """

    def __init__(
        self, listen: str, inbox: Path, *, token_env: str | None = None, busy_seconds: float = BUSY_SECONDS
    ) -> None:
        self._listen = listen
        self._token_env = token_env
        self._inbox = Inbox(inbox, busy_seconds=busy_seconds)
        self._thread: ThreadPoolExecutor | None = None
        self._server: BackgroundServer | None = None
        self._address: tuple[str, int] | None = None

    @property
    def url(self) -> str:
        """The URL for clients. The port is known when `start` has returned."""
        host, port = self._address or host_and_port(self._listen)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/traces"

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
        # Imported here: a daemon without a receiver does not load protobuf.
        from flywheel.sources.otlp.server import LIMITS, TracesEndpoint

        # With a token, by any name.
        limits = LIMITS if token is None else replace(LIMITS, hosts=None)
        app = TracesEndpoint(self._inbox.store, self._thread, limits, token=token).app
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
