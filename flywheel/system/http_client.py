"""HTTP clients that a server cannot exhaust: of each answer a limited size is read, within a total time.

`BoundedClient` is for the event loop. `ModelHttpClient` is for threads and models (judge, embeddings, doctor):
`openai`, whose calls share one client, but no connection: a pool of connections that many threads share scans all of
them for every request. Keys and the meaning of a response belong to the callers.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
import httpcore2
import httpx2
import orjson
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    wait_random_exponential,
)

from flywheel.secrets import is_sendable, masked_url, redact_secrets, register_secret, whole_url
from flywheel.system.heartbeat import beat

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
        url = whole_url(url)
        super().__init__(base_url=url, headers=headers, timeout=seconds, trust_env=trust_env, verify=verify)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        seconds = request.extensions["timeout"]["read"]
        beat(seconds or 0.0)
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


OPENAI_URL: Final = "https://api.openai.com/v1"
NEVER: Final = threading.Event()
"""A stop event that is never set."""
HEADERS: Final = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "flywheel"}
"""A compressed body could expand to far more than the bytes that were read."""


RETRYABLE: Final = frozenset({408, 409, 429})


class CallError(Exception):
    """A call without a usable response. The message contains no key.

    Attributes:
        status: Status code of the response; 0 when none came.
        code, param: What the response says of its error in fields of these names; else empty.
        retry_after: Delay that the endpoint requested, in seconds.
        retryable: Whether the same call may succeed in a moment.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str = "",
        param: str = "",
        retry_after: float | None = None,
        final: bool = False,
    ) -> None:
        """`final` excludes a retry whatever the status is."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.retryable = not final and (status == 0 or status in RETRYABLE or status >= 500)


class ResponseTooLargeError(CallError):
    """The response body exceeds the size limit."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A response with its body. Header names are in lower case. Known secrets are removed from the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ModelHttpClient:
    """Sends requests to one endpoint over connections that stay open. Thread-safe."""

    def __init__(self, url: str, *, timeout_seconds: float, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        """Args:
            url: Root of the API.
            timeout_seconds: Total time for a request and its response, connecting included.
            max_bytes: Size limit of a response body.

        Raises ValueError for a proxy in the environment that cannot be used.
        """
        # Imported here: what asks no model needs 30 MB less.
        import openai

        transport = _BoundedTransport(url, timeout_seconds, max_bytes)
        # A redirect would send the key to another host. The proxies of the environment are the transport's.
        http = httpx2.Client(transport=transport, follow_redirects=False, trust_env=False)
        # Each request brings its key; its caller retries and counts.
        self._client = openai.OpenAI(api_key="none", base_url=whole_url(url), max_retries=0, http_client=http)
        # Runs also when the owner is collected without a call of `close`.
        self.close = weakref.finalize(self, http.close)

    def post(self, path: str, body: bytes, key: str) -> HttpAnswer:
        """Send JSON to `path` below the root. Raises CallError, also for a response that is no success."""
        answer = self._send(partial(self._client.post, content=body), path, key)
        if 200 <= answer.status < 300:
            return answer
        error = _error_of(answer)
        message, code = error.get("message", error), error.get("code")
        # An account without credit, for which others answer 402: no delay helps.
        is_out_of_quota = answer.status == 429 and "insufficient_quota" in (error.get("type"), code)
        raise CallError(
            f"it answered {answer.status} ({' '.join(str(message).split())[:300]})",
            status=402 if is_out_of_quota else answer.status,
            code=str(code or ""),
            param=str(error.get("param") or ""),
            retry_after=parse_retry_after(answer.headers.get("retry-after", "")),
        )

    def get(self, path: str, key: str = "") -> HttpAnswer:
        """Send no authorization without a key. Raises CallError without a response."""
        return self._send(self._client.get, path, key)

    def _send(self, method: Callable[..., httpx2.Response], path: str, key: str) -> HttpAnswer:
        import openai

        register_secret(key)
        if not is_sendable(key):
            raise CallError("its key cannot be sent: a character beyond ASCII or a line end is in it", status=401)
        headers = {**HEADERS, "authorization": f"Bearer {key}" if key else openai.Omit()}
        if method is not self._client.get:
            headers["content-type"] = "application/json"
        try:
            response = method(path, cast_to=httpx2.Response, options={"headers": headers})
        except openai.APIStatusError as error:
            response = error.response
        return HttpAnswer(response.status_code, response.headers, redact_secrets(response.content))


class _BoundedTransport(httpx2.BaseTransport):
    """Reads every response up to a deadline and a size. Each request in flight has a connection of its own."""

    def __init__(self, url: str, seconds: float, max_bytes: int) -> None:
        """Raises ValueError for a proxy in the environment that is not an HTTP proxy."""
        scheme, host = urlsplit(url).scheme, urlsplit(url).hostname or ""
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._ssl_context = ssl_context() if scheme == "https" else None
        self._idle: deque[tuple[httpcore2.ConnectionPool, _DeadlineBackend]] = deque()
        self._proxy: httpx2.Proxy | None = None
        proxies = {} if proxy_bypass(host) else getproxies()
        if proxy := proxies.get(scheme) or proxies.get("all"):
            if password := urlsplit(proxy).password:
                register_secret(password)
            self._proxy = httpx2.Proxy(proxy if "://" in proxy else f"http://{proxy}")
            if (used := self._proxy.url).scheme not in ("http", "https"):
                raise ValueError(f"the proxy {used} from the environment cannot be used: it is not an HTTP proxy")

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            connection, backend = self._idle.pop()
        except IndexError:
            # A pool of one connection, which reconnects by itself.
            backend = _DeadlineBackend()
            make: Callable[..., httpcore2.ConnectionPool] = httpcore2.ConnectionPool
            if self._proxy is not None:
                make = partial(httpcore2.HTTPProxy, str(self._proxy.url), proxy_auth=self._proxy.raw_auth)
            connection = make(ssl_context=self._ssl_context, max_connections=1, network_backend=backend)
        beat(self._seconds)
        backend.deadline = time.monotonic() + self._seconds
        url = request.url
        target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        try:
            with connection.stream(
                request.method, target, headers=request.headers.raw, content=request.read()
            ) as response:
                headers = httpx2.Headers(response.headers)
                body = Body(headers, self._max_bytes)
                for piece in response.iter_stream():
                    body.add(piece)
        except AnswerTooLargeError as error:
            raise ResponseTooLargeError(str(error), final=True) from None
        except httpcore2.TimeoutException as error:
            raise CallError(f"no complete response within {self._seconds:g} s") from error
        except (*_FAILURES, OSError, ValueError, zlib.error) as error:
            raise CallError(redact_secrets(_root_cause(error))) from error
        finally:
            self._idle.append((connection, backend))
        return httpx2.Response(response.status, headers=headers, content=bytes(body.content), request=request)

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()


_FAILURES: Final = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpcore2.UnsupportedProtocol,
)


class _DeadlineBackend(httpcore2.SyncBackend):
    """Opens connections on which every wait ends at the deadline.

    A socket's timeout restarts with every byte. A server that sends one byte now and then, in its headers or before
    them, would never reach it.
    """

    deadline = 0.0

    def seconds_left(self) -> float:
        """Raises TimeoutException when no time is left."""
        if (left := self.deadline - time.monotonic()) <= 0:
            raise httpcore2.ReadTimeout
        return left

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *args: Any, **options: Any
    ) -> httpcore2.NetworkStream:
        return _DeadlineStream(super().connect_tcp(host, port, self.seconds_left(), *args, **options), self)


@dataclass(slots=True)
class _DeadlineStream(httpcore2.NetworkStream):
    _stream: httpcore2.NetworkStream
    _backend: _DeadlineBackend

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._backend.seconds_left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._backend.seconds_left())

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        encrypted = self._stream.start_tls(ssl_context, server_hostname, self._backend.seconds_left())
        return _DeadlineStream(encrypted, self._backend)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _error_of(answer: HttpAnswer) -> dict[str, Any]:
    """The error object of an unsuccessful response; what is no object is its `message`."""
    if location := answer.headers.get("location"):
        return {"message": f"redirect to {redact_secrets(location)[:200]}"}
    try:
        body = orjson.loads(answer.body)
        error = body.get("error", body) if isinstance(body, dict) else body
    except orjson.JSONDecodeError:
        error = answer.body[:2000].decode("utf-8", "replace")
    return error if isinstance(error, dict) else {"message": error}


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
