"""HTTP clients that a server cannot exhaust: of each answer a limited size is read, within a total time."""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import certifi
import httpx2

MAX_ANSWER_BYTES: Final = 4 << 20
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
"""For zlib: detect the header."""


class AnswerTooLargeError(httpx2.RequestError):
    """An answer is larger than the limit. The rest of it was not read."""


class Body:
    """The body of a response up to `max_bytes`, while it is read. Removes the encoding from the headers."""

    def __init__(self, headers: httpx2.Headers, max_bytes: int) -> None:
        # Compression is not requested, but some servers compress all the same.
        is_compressed = headers.pop("content-encoding", "") in ("gzip", "deflate")
        self._unpack = zlib.decompressobj(_GZIP_OR_ZLIB) if is_compressed else None
        self._max_bytes = max_bytes
        self.content = bytearray()

    def add(self, piece: bytes) -> None:
        """Raises AnswerTooLargeError and zlib.error."""
        self.content += self._unpack.decompress(piece, self._max_bytes + 1) if self._unpack else piece
        if len(self.content) > self._max_bytes:
            raise AnswerTooLargeError(f"the response is larger than {self._max_bytes >> 20} MiB")


class BoundedClient(httpx2.AsyncClient):
    """An `httpx2.AsyncClient` that follows no redirects. Every `timeout` is the total time of a request, and the
    extension `max_bytes` of a request limits its answer; 0 reads the status and the headers alone.

    A timeout of httpx2 itself begins again with every byte, and an answer is read and unpacked to its end.
    """

    def __init__(
        self, url: str, *, seconds: float | None, headers: Mapping[str, str] | None = None, trust_env: bool = False
    ) -> None:
        """The proxies of the environment (`trust_env`) are for the internet, not for our own servers."""
        # Certificates are loaded for https only: loading takes longer than all calls to a healthy server.
        verify = ssl_context() if url.lower().startswith("https:") else False
        super().__init__(base_url=url, headers=headers, timeout=seconds, trust_env=trust_env, verify=verify)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        seconds = request.extensions["timeout"]["read"]
        max_bytes = request.extensions.get("max_bytes", MAX_ANSWER_BYTES)
        try:
            async with asyncio.timeout(seconds):
                response = await super().send(request, **{**options, "stream": True})
                try:
                    body = Body(response.headers, max_bytes)
                    if max_bytes:
                        async for piece in response.aiter_raw():
                            body.add(piece)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx2.ReadTimeout(f"no complete response within {seconds:g} s", request=request) from None
        except zlib.error as error:
            raise httpx2.DecodingError(str(error), request=request) from error
        return httpx2.Response(
            response.status_code, headers=response.headers, content=bytes(body.content), request=request
        )


@cache
def ssl_context() -> ssl.SSLContext:
    """The system's authorities, those of SSL_CERT_FILE, and Mozilla's for systems without any.

    One context for all connections: each takes 33 ms and nearly a megabyte.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
