"""HTTP clients that a server cannot exhaust: of each answer a limited size is read, within a total time.

One `Transport` serves every client: those of models in threads, which are `openai`'s, and ours in an event loop. Keys
and the meaning of a response belong to the callers.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
import httpcore2
import httpx2
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    wait_random_exponential,
)

from flywheel.secrets import is_sendable, masked_url, redact_secrets, register_secret, whole_url
from flywheel.system.heartbeat import beat

if TYPE_CHECKING:
    import openai

T = TypeVar("T", "openai.types.chat.ChatCompletion", httpx2.Response)
MAX_ANSWER_BYTES: Final = 4 << 20
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
"""For zlib: detect the header."""
OPENAI_URL: Final = "https://api.openai.com/v1"
NEVER: Final = threading.Event()
"""A stop event that is never set."""
RETRYABLE: Final = frozenset({408, 409, 429})


class AnswerTooLargeError(httpx2.RequestError):
    """An answer is larger than the limit. The rest of it was not read."""


class Transport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """For an `httpx2.Client` that many threads share, or for an `httpx2.AsyncClient`.

    The timeout of a request is the total time for it and its answer: one of httpx2 itself begins again with every
    byte. The extension `max_bytes` of a request limits its answer; 0 reads the status and the headers alone. In
    threads each request in flight has a connection of its own: a pool that they share scans all of its connections
    for every request.
    """

    def __init__(
        self,
        url: str,
        *,
        proxies: bool,
        max_bytes: int = MAX_ANSWER_BYTES,
        mend: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """Args:
            url: Root of what is asked.
            proxies: Whether to use those of the environment. They are for the internet, not for our own servers.
            max_bytes: Size limit of an answer to a request that has none.
            mend: Corrects the body of a success.

        Raises ValueError for a proxy that is not an HTTP proxy.
        """
        self._idle: deque[httpcore2.ConnectionPool] = deque()
        self._is_closed = False
        self._proxy = _proxy_for(url) if proxies else None
        # Certificates are loaded for https only: loading takes longer than all calls to a healthy server.
        self._ssl_context = ssl_context() if url.lower().startswith("https:") else None
        self._max_bytes = max_bytes
        self._mend = mend
        self._in_loop = httpx2.AsyncHTTPTransport(verify=self._ssl_context or False, proxy=self._proxy)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        seconds, max_bytes = self._begin(request)
        _thread.deadline = time.monotonic() + seconds
        try:
            pool = self._idle.pop()
        except IndexError:
            # A pool of one connection, which reconnects by itself.
            make: Callable[..., httpcore2.ConnectionPool] = httpcore2.ConnectionPool
            if self._proxy is not None:
                make = partial(httpcore2.HTTPProxy, str(self._proxy.url), proxy_auth=self._proxy.raw_auth)
            pool = make(ssl_context=self._ssl_context, max_connections=1, network_backend=_DeadlineBackend())
        url = request.url
        target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        try:
            with pool.stream(request.method, target, headers=request.headers.raw, content=request.read()) as response:
                headers = httpx2.Headers(response.headers)
                body = _Body(headers, max_bytes)
                for piece in response.iter_stream():
                    body.add(piece)
        except httpcore2.TimeoutException:
            raise _late(seconds) from None
        except httpx2.RequestError:
            raise
        except Exception as error:  # httpcore2's have no class in common
            raise httpx2.TransportError(_root_cause(error)) from error
        finally:
            self._idle.append(pool)
            if self._is_closed:
                self.close()
        return httpx2.Response(response.status, headers=headers, content=self._mend(bytes(body.content)))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        seconds, max_bytes = self._begin(request)
        try:
            async with asyncio.timeout(seconds):
                response = await self._in_loop.handle_async_request(request)
                try:
                    body = _Body(response.headers, max_bytes)
                    if max_bytes:
                        async for piece in response.aiter_raw():
                            body.add(piece)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise _late(seconds) from None
        content = self._mend(bytes(body.content))
        return httpx2.Response(response.status_code, headers=response.headers, content=content)

    def _begin(self, request: httpx2.Request) -> tuple[Any, int]:
        """Seconds and bytes for a request."""
        # A compressed body could expand to far more than the bytes that were read.
        request.headers["accept-encoding"] = "identity"
        seconds = request.extensions["timeout"]["read"]
        beat(seconds or 0.0)
        return seconds, request.extensions.get("max_bytes", self._max_bytes)

    def close(self) -> None:
        """Close what is idle, and what is in flight when it has its answer."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    __del__ = close
    """Not every owner closes its client."""

    async def aclose(self) -> None:
        await self._in_loop.aclose()


def _late(seconds: float) -> httpx2.ReadTimeout:
    return httpx2.ReadTimeout(f"no complete response within {seconds:g} s")


def _proxy_for(url: str) -> httpx2.Proxy | None:
    """The proxy that the environment names for a URL. Raises ValueError for one that is not an HTTP proxy."""
    scheme, host = urlsplit(url).scheme, urlsplit(url).hostname or ""
    proxies = {} if proxy_bypass(host) else getproxies()
    if not (named := proxies.get(scheme) or proxies.get("all")):
        return None
    if password := urlsplit(named).password:
        register_secret(password)
    proxy = httpx2.Proxy(named if "://" in named else f"http://{named}")
    if proxy.url.scheme not in ("http", "https"):
        raise ValueError(
            f"the proxy {proxy.url} from the environment is not an HTTP proxy: correct HTTPS_PROXY and HTTP_PROXY"
        )
    return proxy


class _Body:
    """The body of a response up to `max_bytes`, while it is read. Removes the encoding from the headers."""

    def __init__(self, headers: httpx2.Headers, max_bytes: int) -> None:
        # Compression is not requested, but some servers compress all the same.
        is_compressed = headers.pop("content-encoding", "") in ("gzip", "deflate")
        self._unpack = zlib.decompressobj(_GZIP_OR_ZLIB) if is_compressed else None
        self._max_bytes = max_bytes
        self.content = bytearray()

    def add(self, piece: bytes) -> None:
        """Raises AnswerTooLargeError and DecodingError."""
        try:
            self.content += self._unpack.decompress(piece, self._max_bytes + 1) if self._unpack else piece
        except zlib.error as error:
            raise httpx2.DecodingError(str(error)) from error
        if len(self.content) > self._max_bytes:
            raise AnswerTooLargeError(f"the response is larger than {self._max_bytes >> 20} MiB")


_thread = threading.local()
"""`deadline`: when the request in this thread ends."""


def _seconds_left() -> float:
    """Raises TimeoutException when no time is left."""
    if (left := _thread.deadline - time.monotonic()) <= 0:
        raise httpcore2.ReadTimeout
    return float(left)


class _DeadlineBackend(httpcore2.SyncBackend):
    """Opens connections on which every wait ends at the deadline.

    A socket's timeout restarts with every byte. A server that sends one byte now and then, in its headers or before
    them, would never reach it.
    """

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *args: Any, **options: Any
    ) -> httpcore2.NetworkStream:
        return _DeadlineStream(super().connect_tcp(host, port, _seconds_left(), *args, **options))


@dataclass(slots=True)
class _DeadlineStream(httpcore2.NetworkStream):
    _stream: httpcore2.NetworkStream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _seconds_left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _seconds_left())

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, _seconds_left()))

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


@cache
def ssl_context() -> ssl.SSLContext:
    """The system's authorities, those of SSL_CERT_FILE, and Mozilla's for systems without any.

    One context for all connections: each takes 33 ms and nearly a megabyte.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def async_client(
    url: str, *, seconds: float | httpx2.Timeout, headers: Mapping[str, str] | None = None, proxies: bool = False
) -> httpx2.AsyncClient:
    """A client of a `Transport`, which follows no redirects. Raises ValueError as the transport does."""
    transport = Transport(url, proxies=proxies)
    return httpx2.AsyncClient(
        base_url=whole_url(url), headers=headers, timeout=seconds, trust_env=False, transport=transport
    )


def model_client(
    url: str,
    *,
    seconds: float,
    max_bytes: int = MAX_ANSWER_BYTES,
    mend: Callable[[bytes], bytes] = redact_secrets,
) -> openai.OpenAI:
    """A client of a `Transport` for threads, which follows no redirects. `authorization` is a header of each call.
    Raises ValueError for what is no URL, and as the transport does."""
    if not is_http_url(url):
        raise ValueError(f"its endpoint {url} is no URL")
    # Imported here: what asks no model needs 30 MB less.
    import openai

    transport = Transport(url, proxies=True, max_bytes=max_bytes, mend=mend)
    return openai.OpenAI(
        api_key="none",
        base_url=whole_url(url),
        timeout=seconds,
        max_retries=0,  # its caller retries and counts
        default_headers={"user-agent": "flywheel"},
        http_client=httpx2.Client(transport=transport, trust_env=False),
    )


def authorization(key: str) -> dict[str, Any]:
    """The header with a key, or without a key the absence of one. Raises CallError for a key that cannot be sent."""
    import openai

    register_secret(key)
    if not is_sendable(key):
        raise CallError("its key cannot be sent: a character beyond ASCII or a line end is in it", status=401)
    return {"authorization": f"Bearer {key}" if key else openai.Omit()}


@dataclass(eq=False)
class CallError(Exception):
    """A call without a usable response. The message contains no key.

    Attributes:
        status: Status code of the response; 0 when none came, and 413 for one that is too large.
        code, param: What the response says of its error in fields of these names; else empty.
        retry_after: Delay that the endpoint requested, in seconds.
        final: No retry, whatever the status is.
    """

    message: str
    status: int = 0
    code: str = ""
    param: str = ""
    retry_after: float | None = None
    final: bool = False

    def __str__(self) -> str:
        return self.message

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed in a moment."""
        return not self.final and (self.status == 0 or self.status in RETRYABLE or self.status >= 500)


def post_chat(client: openai.OpenAI, body: bytes, key: str, cast_to: type[T]) -> T:
    """What `client.chat.completions.create` does, without its pass over the types of the request: that takes as long
    as the rest of it, in which no other thread runs. Raises CallError."""
    headers = {**authorization(key), "content-type": "application/json"}
    with call_errors():
        return client.post("/chat/completions", cast_to=cast_to, content=body, options={"headers": headers})


@contextmanager
def call_errors() -> Iterator[None]:
    """Makes a CallError of whatever `openai` raises, and of what the reading of an odd body raises."""
    import openai

    try:
        yield
    except openai.APIStatusError as error:
        raise _error_of_status(error) from error
    except openai.APIConnectionError as error:
        status = 413 if isinstance(error.__cause__, AnswerTooLargeError) else 0
        raise CallError(redact_secrets(str(error.__cause__)), status) from error
    except (openai.OpenAIError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CallError(f"the response cannot be read: {_in_line(redact_secrets(str(error)))}") from error


def _in_line(message: object) -> str:
    return " ".join(str(message)[:2000].encode("utf-8", "replace").decode().split())[:300]


def _error_of_status(error: openai.APIStatusError) -> CallError:
    status, headers, body = error.status_code, error.response.headers, error.body
    message = body.get("message", body) if isinstance(body, dict) else body
    if location := headers.get("location"):
        message = f"redirect to {redact_secrets(location)[:200]}"
    return CallError(
        f"it answered {status} ({_in_line(message)})",
        # An account without credit, for which others answer 402: no delay helps.
        status=402 if status == 429 and "insufficient_quota" in (error.type, error.code) else status,
        code=str(error.code or ""),
        param=str(error.param or ""),
        retry_after=parse_retry_after(headers.get("retry-after", "")),
    )


def retrying(
    attempts: int,
    most_seconds: float,
    stop: threading.Event,
    *,
    longest_wait: float = 20.0,
    is_retried: Callable[[RetryCallState], bool] = lambda _: True,
) -> Retrying:
    """Retries of calls that failed with a retryable CallError.

    They end when `stop` is set, and when the endpoint requests a delay of more than `most_seconds`. `is_retried` can
    exclude further errors.
    """
    return Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, CallError) and error.retryable) & is_retried,
        stop=lambda state: (
            state.attempt_number >= attempts or stop.is_set() or (_requested_delay(state) or 0.0) > most_seconds
        ),
        wait=lambda state: retry_delay(state, longest_wait),
        sleep=sleep_using_event(stop),
        reraise=True,
    )


def retry_delay(state: RetryCallState, longest: float = 20.0) -> float:
    """Seconds before the next attempt: what the endpoint requested, else a random time up to a doubling bound.

    With full jitter, threads that failed together do not come back together.
    """
    requested = _requested_delay(state)
    return wait_random_exponential(multiplier=0.5, max=longest)(state) if requested is None else requested


def _requested_delay(state: RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after if isinstance(error, CallError) else None


def endpoint_url(base_url: str | None) -> str:
    """The URL of an endpoint, without a slash at its end: `base_url`, else `$OPENAI_BASE_URL`, else empty. A name and
    password in it are masked; the clients here send them."""
    return masked_url((base_url or os.environ.get("OPENAI_BASE_URL") or "").rstrip("/"))


def is_http_url(url: str) -> bool:
    """Whether requests can be sent to this URL at all."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def parse_retry_after(value: str) -> float | None:
    """The delay in a Retry-After header, in seconds: it holds seconds or a date. None for anything else, and for no
    delay: a server that refuses calls and asks for none would get all attempts at once."""
    try:
        if value[:1].isdigit():
            seconds = float(value)
        else:
            at = parsedate_to_datetime(value)
            # HTTP dates are in UTC, also where they do not say so.
            seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return seconds if seconds > 0 else None


def _root_cause(error: BaseException) -> str:
    """The innermost error's message: those around it name hosts and pools."""
    while (inner := error.__cause__ or getattr(error, "reason", None)) is not None and isinstance(inner, Exception):
        error = inner
    return " ".join(str(error).split()) or type(error).__name__
