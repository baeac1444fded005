"""Calls to a model's endpoint by the `openai` client: one request, one whole answer, within a time and a size.

Every call in flight has a client of its own: the pool of one that many threads share looks at every connection for
every request. Knows nothing of completions, embeddings, attempts or keys.
"""

from __future__ import annotations

import functools
import ssl
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
import httpcore2
import httpx2
import openai
import orjson

from flywheel.known_secrets import hidden, know

MAX_BODY_BYTES: Final = 4 << 20
"""More than any verdict."""
HEADERS: Final = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "flywheel"}
"""An answer that is packed could be far larger than what was read of it."""


class RequestFailedError(Exception):
    """No whole answer came: refused, reset, too late. The key is not in its words."""


class ResponseTooLargeError(Exception):
    """The answer is larger than any that is wanted."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer with its body, without the key, which some endpoints repeat; names of headers are in lower case."""

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
            return f"look at {hidden(location)[:200]}"
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


class ModelHttpClient:
    """`openai` clients for one endpoint, each with one connection that is kept open between calls. Thread-safe."""

    def __init__(self, url: str, *, timeout_seconds: float, most_bytes: int = MAX_BODY_BYTES) -> None:
        """`url` is the root of the API. What an endpoint sends beyond `most_bytes` is not read.

        Raises ValueError for a proxy in the environment that cannot be used.
        """
        self._url = url
        parts = urlsplit(url)
        proxy = _proxy(parts.scheme, parts.hostname or "")
        if proxy is not None and proxy.url.scheme not in ("http", "https"):
            raise ValueError(f"the proxy {proxy.url} that the environment names cannot be used: no HTTP proxy")
        authorities = _authorities() if parts.scheme == "https" else None
        self._make = functools.partial(_Requests, timeout_seconds, most_bytes, authorities, proxy)
        self._idle: deque[openai.OpenAI] = deque()
        # Also of one that nobody closed.
        self.close = weakref.finalize(self, _close, self._idle)

    def post(self, path: str, body: bytes, key: str) -> HttpAnswer:
        """Send JSON to `path` below the root. Raises RequestFailedError, ResponseTooLargeError."""
        headers = {**_headers(key), "content-type": "application/json"}
        return self._answered(
            lambda client: client.post(path, cast_to=httpx2.Response, content=body, options={"headers": headers})
        )

    def get(self, path: str, key: str = "") -> HttpAnswer:
        """Without a key where none is given. Raises RequestFailedError, ResponseTooLargeError."""
        return self._answered(
            lambda client: client.get(path, cast_to=httpx2.Response, options={"headers": _headers(key)})
        )

    def _answered(self, ask: Callable[[openai.OpenAI], httpx2.Response]) -> HttpAnswer:
        """The answer, whatever its status is."""
        try:
            client = self._idle.pop()
        except IndexError:
            client = self._client()
        try:
            response = ask(client)
        except openai.APIStatusError as error:
            response = error.response
        finally:
            self._idle.append(client)
        return HttpAnswer(response.status_code, response.headers, hidden(response.content))

    def _client(self) -> openai.OpenAI:
        # A key is given with its request; who calls retries, and counts; a redirect would carry the key on.
        requests = httpx2.Client(transport=self._make(), follow_redirects=False, trust_env=False)
        return openai.OpenAI(api_key="none", base_url=self._url, max_retries=0, http_client=requests)


def _close(idle: deque[openai.OpenAI]) -> None:
    while idle:
        idle.pop().close()


def _headers(key: str) -> dict[str, Any]:
    know(key)
    return {**HEADERS, "authorization": f"Bearer {key}" if key else openai.Omit()}


class _Requests(httpx2.BaseTransport):
    """One request at a time, whose answer is read until a time and up to a size."""

    def __init__(
        self, seconds: float, most_bytes: int, authorities: ssl.SSLContext | None, proxy: httpx2.Proxy | None
    ) -> None:
        self._most_bytes = most_bytes
        self._deadline = _Deadline(seconds)
        options: dict[str, Any] = {
            "ssl_context": authorities,
            "max_connections": 1,
            "network_backend": _Backend(self._deadline),
        }
        if proxy is None:
            self._pool = httpcore2.ConnectionPool(**options)
        else:
            self._pool = httpcore2.HTTPProxy(str(proxy.url), proxy_auth=proxy.raw_auth, **options)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self._deadline.begin()
        url = request.url
        target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        try:
            with self._pool.stream(
                request.method, target, headers=request.headers.raw, content=request.read()
            ) as answer:
                headers = httpx2.Headers(answer.headers)
                body = self._body(answer.iter_stream(), headers.pop("content-encoding", ""))
        except (*_FAILURES, OSError, ValueError, zlib.error) as error:
            raise RequestFailedError(hidden(_cause(error))) from error
        return httpx2.Response(answer.status, headers=headers, content=body, request=request)

    def _body(self, stream: Iterable[bytes], encoding: str) -> bytes:
        # Not asked for; some servers pack their answers all the same.
        packed = zlib.decompressobj(_EITHER_HEADER) if encoding in ("gzip", "deflate") else None
        pieces: list[bytes] = []
        size = 0
        for piece in stream:
            pieces.append(packed.decompress(piece, self._most_bytes + 1) if packed else piece)
            size += len(pieces[-1])
            if size > self._most_bytes:
                raise ResponseTooLargeError(f"the answer is larger than {self._most_bytes >> 20} MiB")
        return b"".join(pieces)

    def close(self) -> None:
        self._pool.close()


_EITHER_HEADER: Final = zlib.MAX_WBITS | 32
"""For zlib: the data says itself whether it is gzip or deflate."""
_FAILURES: Final = (
    httpcore2.NetworkError,
    httpcore2.TimeoutException,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpcore2.UnsupportedProtocol,
)


class _Deadline:
    """When the answer to the request under way has to be whole."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0

    def begin(self) -> None:
        self._until = time.monotonic() + self._seconds

    @property
    def left(self) -> float:
        """Seconds. Raises TimeoutException when none are left."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise self.passed
        return left

    @property
    def passed(self) -> httpcore2.TimeoutException:
        return httpcore2.ReadTimeout(f"the answer was not whole after {self._seconds:g} s")


class _Backend(httpcore2.NetworkBackend):
    """Connections whose every wait ends at the deadline.

    A timeout of the socket begins anew with every byte: a server that sends one now and then, in its headers or
    before them, would never meet it.
    """

    def __init__(self, deadline: _Deadline) -> None:
        self._sockets = httpcore2.SyncBackend()
        self._deadline = deadline

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *args: Any, **options: Any
    ) -> httpcore2.NetworkStream:
        try:
            return _Stream(
                self._sockets.connect_tcp(host, port, self._deadline.left, *args, **options), self._deadline
            )
        except httpcore2.ConnectTimeout:
            raise self._deadline.passed from None


class _Stream(httpcore2.NetworkStream):
    def __init__(self, stream: httpcore2.NetworkStream, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return self._stream.read(max_bytes, self._deadline.left)
        except httpcore2.ReadTimeout:
            raise self._deadline.passed from None

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._stream.write(buffer, self._deadline.left)
        except httpcore2.WriteTimeout:
            raise self._deadline.passed from None

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, self._deadline.left), self._deadline)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def is_http_url(url: str) -> bool:
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


@functools.cache
def _authorities() -> ssl.SSLContext:
    """The system's authorities, those that SSL_CERT_FILE names, and Mozilla's for systems that have none.

    One context for all connections: each takes 33 ms to make, and nearly a megabyte.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _proxy(scheme: str, host: str) -> httpx2.Proxy | None:
    """What the environment names. Raises ValueError for what is none."""
    if proxy_bypass(host):
        return None
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if proxy and (password := urlsplit(proxy).password):
        know(password)
    return httpx2.Proxy(proxy if "://" in proxy else f"http://{proxy}") if proxy else None


def _cause(error: BaseException) -> str:
    """The innermost error's words: what is around them names hosts and pools."""
    while (inner := error.__cause__ or getattr(error, "reason", None)) is not None and isinstance(inner, Exception):
        error = inner
    return " ".join(str(error).split()) or type(error).__name__
