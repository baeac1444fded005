"""Starts and stops the OTLP receiver on the daemon's event loop; accepted spans survive a stop.

Owns the socket, the web server and the thread that decodes requests. Installs no signal handlers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flywheel.config.ingest import host_and_port
from flywheel.errors import ConfigError, ReceiverError
from flywheel.sources.otlp.inbox import BUSY_SECONDS, Inbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    import uvicorn

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 3
_BACKLOG: Final = 128
_HINTS: Final = {
    errno.EADDRINUSE: "Stop the program that listens there, often a collector, or choose another port.",
    errno.EADDRNOTAVAIL: "Name an address of this machine, usually 127.0.0.1.",
    errno.EACCES: "Choose a port above 1023.",
}


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
        token = _token(self._listen, self._token_env)
        bound = _bound(host, port)
        try:
            await self._inbox.open()
        except BaseException:
            bound.close()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="otlp")
        self._address = (host, bound.getsockname()[1])
        self._server = _server(self._inbox, self._thread, token)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name=f"otlp {self._listen}")
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - a flag is all that it sets
            await asyncio.sleep(0.01)
        if self._serving.done():
            await self.stop()
            raise ReceiverError(f"receive spans at {self._listen}", "the web server ended at once", "See the log.")
        from flywheel.sources.otlp.server import limit_accept_error_logs

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


def _token(listen: str, variable: str | None) -> str | None:
    """The token that senders must send; None without `token_env`. Raises ConfigError."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token or token != token.strip() or not (token.isascii() and token.isprintable()):
        why = f"the variable {variable}, which token_env names, {'holds no token' if token else 'is not set'}"
        raise ConfigError(
            f"receive spans at {listen}", why, "Put a long random text of printable ASCII characters into it."
        )
    return token


def _server(inbox: Inbox, thread: ThreadPoolExecutor, token: str | None) -> uvicorn.Server:
    # Imported here: a daemon without a receiver does not load a web server and protobuf.
    import uvicorn

    from flywheel.sources.otlp.server import Protocol, TracesEndpoint

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """The daemon handles signals."""
            yield

    return Server(
        uvicorn.Config(
            TracesEndpoint(inbox.store, thread, token=token).app,
            http=Protocol,
            backlog=_BACKLOG,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
    )


def _bound(host: str, port: int) -> socket.socket:
    attempt = f"receive spans at {host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ReceiverError(
            attempt, f"the host is not known ({error})", "Correct `listen`.", retryable=True
        ) from error
    # Clients try both families of a name; IPv4 is always available.
    family, kind, protocol, _, address = sorted(found, key=lambda one: one[0] != socket.AF_INET)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        retryable = error.errno == errno.EADDRINUSE
        hint = _HINTS.get(error.errno or 0, "Correct `listen`.")
        raise ReceiverError(attempt, error.strerror or str(error), hint, retryable=retryable) from error
    bound.setblocking(False)
    return bound
