"""Small web servers beside the work of a process: the socket, the token, and uvicorn without its own signals."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from flywheel.errors import ConfigError, ReceiverError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import uvicorn
    from starlette.types import ASGIApp

BACKLOG: Final = 128
_HINTS: Final = {
    errno.EADDRINUSE: "Stop the program that listens there, or choose another port.",
    errno.EADDRNOTAVAIL: "Name an address of this machine, usually 127.0.0.1.",
    errno.EACCES: "Choose a port above 1023.",
}


def bearer_token(attempted: str, variable: str | None, setting: str | None, shortest: int = 1) -> str | None:
    """The token that clients must send; None without a variable. `setting` names the variable. Raises ConfigError."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    named = f"the variable {variable}, which {setting} names," if setting else f"the variable {variable}"
    if not token or token != token.strip() or not (token.isascii() and token.isprintable()):
        why = f"{named} {'holds no token' if token else 'is not set'}"
        raise ConfigError(attempted, why, "Put a long random text of printable ASCII characters into it.")
    if len(token) < shortest:
        why = f"{named} has fewer than {shortest} characters"
        raise ConfigError(attempted, why, "Set it to the output of `openssl rand -hex 16`.")
    return token


def web_server(app: ASGIApp, **options: Any) -> uvicorn.Server:
    """A server of `app` for an event loop that runs, with these options of uvicorn."""
    # Imported here: a process that listens nowhere does not load it.
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """The process handles signals itself."""
            yield

    return Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            **options,
        )
    )


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
        hint = _HINTS.get(error.errno or 0, hint)
        raise ReceiverError(attempt, error.strerror or str(error), hint, retryable=retryable) from error
    bound.setblocking(False)
    return bound
