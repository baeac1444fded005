"""HTTP to a model's endpoint: one request, one whole answer, within a time and a size.

urllib3 and not httpx: its pool costs the same for 16 threads and for 256, where httpx's looks at every connection for
every request. Knows nothing of completions, embeddings, attempts or keys.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
import orjson
import urllib3
from urllib3.exceptions import HTTPError

from flywheel.deadline import POOLS

MAX_BODY_BYTES: Final = 4 << 20
"""More than any verdict."""
PIECE_BYTES: Final = 1 << 16


class TransportError(Exception):
    """No whole answer came: refused, reset, too late."""


class TooLargeError(Exception):
    """The answer is larger than any that is wanted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its body; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def words(self) -> str:
        """What an answer that is not good says, in one line."""
        if location := self.headers.get("location"):
            return f"look at {location[:200]}"
        try:
            body = orjson.loads(self.body)
            error = body.get("error", body) if isinstance(body, dict) else body
            text = error.get("message", error) if isinstance(error, dict) else error
        except orjson.JSONDecodeError:
            text = self.body[:2000].decode("utf-8", "replace")
        return " ".join(str(text).split())[:300]

    @property
    def retry_after(self) -> float | None:
        """Seconds that the endpoint asked us to wait, if it did."""
        return seconds(self.headers.get("retry-after", ""))


class Transport:
    """Connections to one endpoint, kept open between calls. Thread-safe."""

    def __init__(
        self, url: str, *, timeout_seconds: float, connections: int, most_bytes: int = MAX_BODY_BYTES
    ) -> None:
        """What an endpoint sends beyond `most_bytes` is not read.

        Raises ValueError for a proxy in the environment that cannot be used.
        """
        self._most_bytes = most_bytes
        options: dict[str, object] = {
            "maxsize": connections,
            "timeout": urllib3.Timeout(total=timeout_seconds),
            "retries": False,  # who calls retries, and counts
        }
        parts = urlsplit(url)
        if parts.scheme == "https":
            options["ssl_context"] = _authorities()
        proxy = _proxy(parts.scheme, parts.hostname or "")
        try:
            self._pools = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)  # type: ignore[arg-type]
            self._pools.pool_classes_by_scheme = POOLS
            # There is one host only: looking its pool up for every call would cost more than the call's own work.
            self._pool = None if proxy else self._pools.connection_from_url(url)
        except HTTPError as error:
            raise ValueError(f"the proxy {proxy} that the environment names cannot be used: {error}") from error

    def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Raises TransportError, TooLargeError."""
        return self._answered("POST", url, headers, body)

    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """Raises TransportError, TooLargeError."""
        return self._answered("GET", url, headers, None)

    def _answered(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        try:
            response = self._sent(method, url, dict(headers), body)
            try:
                whole = self._body(response)
            except BaseException:
                response.close()  # a connection with an unread rest cannot be used again
                raise
            response.release_conn()
        except (HTTPError, OSError, ValueError) as error:
            raise TransportError(_cause(error)) from error
        return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, whole)

    def _sent(self, method: str, url: str, headers: dict[str, str], body: bytes | None) -> urllib3.BaseHTTPResponse:
        if self._pool is None:
            return self._pools.urlopen(method, url, redirect=False, body=body, headers=headers, preload_content=False)
        path = urlsplit(url)._replace(scheme="", netloc="").geturl()
        return self._pool.urlopen(
            method, path, body=body, headers=headers, retries=False, redirect=False, preload_content=False
        )

    def _body(self, response: urllib3.BaseHTTPResponse) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := response.read1(PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > self._most_bytes:
                raise TooLargeError(f"the answer is larger than {self._most_bytes >> 20} MiB")
        return b"".join(pieces)

    def close(self) -> None:
        self._pools.clear()


def is_address(url: str) -> bool:
    """Whether something can be asked there at all."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def seconds(asked: str) -> float | None:
    """A wait as HTTP has it: a number of seconds, or the time to come back at. None for what is neither."""
    try:
        if asked[:1].isdigit():
            return max(0.0, float(asked))
        at = parsedate_to_datetime(asked)
        # HTTP's dates are UTC, also where they do not say so.
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _authorities() -> ssl.SSLContext:
    """The system's authorities, those that SSL_CERT_FILE names, and Mozilla's for systems that have none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _proxy(scheme: str, host: str) -> str | None:
    if proxy_bypass(host):
        return None
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def _cause(error: BaseException) -> str:
    """The innermost error's words: what is around them names hosts and pools."""
    while (inner := error.__cause__ or getattr(error, "reason", None)) is not None and isinstance(inner, Exception):
        error = inner
    return " ".join(str(error).split()) or type(error).__name__
