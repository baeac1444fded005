"""Small web servers beside the work of a process: the socket, the token, and uvicorn without its own signals."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
from collections.abc import Coroutine
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from flywheel.errors import ConfigError, ReceiverError
from flywheel.secrets import is_sendable
from flywheel.system.log import is_no_repetition
from flywheel.system.server_limits import App, RefusedError, Scope, ServerLimits, header

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request

T = TypeVar("T")

log = logging.getLogger(__name__)

BACKLOG: Final = 128
CLIENT_GONE: Final = 499
"""Status of a response that no client waits for."""
DATE_SECONDS: Final = 1.0
_HINTS: Final = {
    errno.EADDRINUSE: "Stop the program that listens there, or choose another port: `{setting}`.",
    errno.EADDRNOTAVAIL: "Name an address of this machine, usually 127.0.0.1: `{setting}`.",
    errno.EACCES: "Choose a port above 1023: `{setting}`.",
}


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of some work for a request whose body was read; None if its client leaves before, which cancels the
    work."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


def bearer_token(attempted: str, variable: str | None, setting: str | None, shortest: int = 1) -> str | None:
    """The token that clients must send; None without a variable. `setting` names the variable. Raises ConfigError."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    named = f"the variable {variable}, which {setting} names," if setting else f"the variable {variable}"
    if not token or token != token.strip() or not is_sendable(token):
        why = f"{named} {'holds no token' if token else 'is not set'}"
        raise ConfigError(attempted, why, "Put a long random text of printable ASCII characters into it.")
    if len(token) < shortest:
        why = f"{named} has fewer than {shortest} characters"
        raise ConfigError(attempted, why, "Set it to the output of `openssl rand -hex 16`.")
    return token


def check_token(scope: Scope, token: str | None) -> None:
    """Raise RefusedError for a request without the token; None needs none."""
    scheme, _, given = header(scope, b"authorization").partition(b" ")
    if token is not None and not (
        scheme.lower() == b"bearer" and secrets.compare_digest(given.strip(), token.encode())
    ):
        why = "the token is missing or wrong: send the header Authorization: Bearer TOKEN"
        raise RefusedError(401, why, {"WWW-Authenticate": "Bearer"})


def web_server(app: App, limits: ServerLimits | None, *, stop_seconds: int) -> uvicorn.Server:
    """A server of `app`. `limits` are those of its connections; the app applies the others. When it is to stop, open
    requests get `stop_seconds`."""
    # Imported here: a process that listens nowhere does not load it.
    import uvicorn

    from flywheel.system.connections import Connections, Protocol, handle_accept_errors

    # Any client can cause uvicorn's warnings, with each request.
    logging.getLogger("uvicorn.error").addFilter(is_no_repetition)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().set_exception_handler(handle_accept_errors)
            await super().startup(sockets)

    settings: dict[str, Any] = {
        "http": "auto" if limits is None else partial(Protocol, Connections(limits)),
        "backlog": BACKLOG,
        "log_config": None,
        "log_level": "warning",
        "access_log": False,
        "lifespan": "off",
        "ws": "none",
        "server_header": False,
        "proxy_headers": False,
        "timeout_graceful_shutdown": stop_seconds,
    }
    return Server(uvicorn.Config(app, **settings))


class BackgroundServer:
    """A server beside other work of the event loop that runs. The process handles signals itself. At rest, the server
    wakes once a second; uvicorn's own loop would wake ten times.
    """

    def __init__(
        self, app: App, bound: socket.socket, name: str, limits: ServerLimits | None = None, *, stop_seconds: int = 1
    ) -> None:
        self._name = name
        self._server = web_server(app, limits, stop_seconds=stop_seconds)
        self._server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]
        self._server.main_loop = self._until_stopped  # type: ignore[method-assign]
        self._stopping = asyncio.Event()
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name=name)
        self._serving.add_done_callback(self._ended)

    @property
    def has_ended(self) -> bool:
        return self._serving.done()

    async def stop(self) -> None:
        """Stop listening, and finish the requests in flight."""
        while not (self._server.started or self.has_ended):  # noqa: ASYNC110 - a flag is all that it sets
            await asyncio.sleep(0.01)
        self._server.should_exit = True
        self._stopping.set()
        await asyncio.wait([self._serving])

    async def _until_stopped(self) -> None:
        while not await self._server.on_tick(0):
            # What the server does at rest is to write the time into the header `date` of its answers.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), DATE_SECONDS)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()):
            log.error("%s ended with an error", self._name, exc_info=error)


def bound_socket(attempt: str, host: str, port: int, setting: str) -> socket.socket:
    """A socket that listens there. `setting` names the address. Raises ReceiverError."""
    hint = f"Correct `{setting}`."
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ReceiverError(attempt, f"the host is not known ({error})", hint, retryable=True) from error
    # Clients try both families of a name; IPv4 is always available.
    family, kind, protocol, _, address = sorted(found, key=lambda one: one[0] != socket.AF_INET)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        retryable = error.errno == errno.EADDRINUSE
        hint = _HINTS.get(error.errno or 0, hint).format(setting=setting)
        raise ReceiverError(attempt, error.strerror or str(error), hint, retryable=retryable) from error
    bound.setblocking(False)
    return bound
