"""Starts and stops the OTLP receiver on the daemon's event loop; accepted spans survive a stop.

Owns the socket, the web server and the thread that decodes requests. Installs no signal handlers.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flywheel.config.ingest import host_and_port
from flywheel.errors import ReceiverError
from flywheel.sources.otlp.inbox import BUSY_SECONDS, Inbox
from flywheel.web_server import BACKLOG, bearer_token, bound_socket, web_server

if TYPE_CHECKING:
    import uvicorn

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
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
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
        from flywheel.sources.otlp.server import Protocol, TracesEndpoint, limit_accept_error_logs

        app = TracesEndpoint(self._inbox.store, self._thread, token=token).app
        self._server = web_server(app, http=Protocol, backlog=BACKLOG, timeout_graceful_shutdown=STOP_SECONDS)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name=f"otlp {self._listen}")
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - a flag is all that it sets
            await asyncio.sleep(0.01)
        if self._serving.done():
            await self.stop()
            raise ReceiverError(f"receive spans at {self._listen}", "the web server ended at once", "See the log.")
        limit_accept_error_logs(asyncio.get_running_loop(), self.url, bound.fileno())
        log.info("receiving spans at %s", self.url)

    async def stop(self) -> None:
        """Stop listening, finish the requests in flight (at most a few seconds) and close the inbox."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])
            if not self._serving.cancelled() and (error := self._serving.exception()):
                log.error("the receiver at %s ended with an error", self._listen, exc_info=error)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)
        await self._inbox.close()
        self._server = self._serving = self._thread = None
