"""HTTP responses that are read until a time: status, headers and body together.

A socket's own timeout begins anew with every byte. A server that sends one now and then, in its headers or before
them, would never meet it.
"""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Any, Final

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class _UntilIO(io.RawIOBase):
    """What a socket receives, until its timeout as it is now has passed in all."""

    def __init__(self, received: io.RawIOBase, sock: socket.socket, seconds: float) -> None:
        self._received = received
        self._sock = sock
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        left = self._until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            return self._received.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(f"the answer was not whole after {round(self._seconds, 1):g} s") from None

    def close(self) -> None:
        self._received.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        seconds = sock.gettimeout()
        if seconds is not None:
            self.fp = io.BufferedReader(_UntilIO(self.fp.detach(), sock, seconds))


class _Connection(HTTPConnection):
    response_class = _Response


class _SecureConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


POOLS: Final = {"http": _Pool, "https": _SecurePool}
"""Connections whose responses are read so, for `urllib3.PoolManager`, by scheme."""
