"""A port for a server that runs in another process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that the system chooses, and that it chooses for nobody else before the context ends.

    The socket that holds it is bound and does not listen. A server that sets SO_REUSEADDR, as vLLM's and uvicorn
    do, can listen at the port; until then a connection to it is refused.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, 0))
        yield int(held.getsockname()[1])
