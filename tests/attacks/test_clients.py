"""Servers that try to exhaust a client: whatever they send, little of it is read, and only for so long."""

from __future__ import annotations

import asyncio
import socketserver
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Self

import httpx2
import pytest

from flywheel.config.file import parse
from flywheel.daemon.notifier import NoticeTarget
from flywheel.errors import NotifyError, ServeError
from flywheel.serving.client.replica_client import Replica
from flywheel.system.http_client import (
    MAX_ANSWER_BYTES,
    AnswerTooLargeError,
    CallError,
    async_client,
    call_errors,
    model_client,
)

OK = b"HTTP/1.1 200 OK\r\n"
BLOCK = b"x" * (1 << 18)
SECONDS = 60.0
"""Protects tests from hanging."""
Play = Callable[[], Iterator[bytes]]


@cache
def packed(kind: int) -> bytes:
    """256 MB in one."""
    pack = zlib.compressobj(1, zlib.DEFLATED, kind)
    return b"".join([pack.compress(bytes(1 << 24)) for _ in range(16)]) + pack.flush()


def answer(body: bytes, *headers: bytes, status: bytes = OK) -> Play:
    return lambda: iter(
        [status, *(each + b"\r\n" for each in headers), b"content-length: %d\r\n\r\n" % len(body), body]
    )


def compressed(name: bytes, kind: int) -> Play:
    """Packed when it is first played, not when the tests are collected."""

    def play() -> Iterator[bytes]:
        yield from answer(packed(kind), b"content-encoding: " + name)()

    return play


def endless(begin: bytes, again: bytes) -> Play:
    return lambda: chain([begin], repeat(again))


TOO_LARGE: dict[str, Play] = {
    "a body without an end": endless(OK + b"\r\n", BLOCK),
    "a body of a length": endless(OK + b"content-length: 99999999999\r\n\r\n", BLOCK),
    "chunks": endless(OK + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (len(BLOCK), BLOCK)),
    "a chunk without an end": endless(OK + b"transfer-encoding: chunked\r\n\r\nffffffffff\r\n", BLOCK),
    "gzip": compressed(b"gzip", 31),
    "deflate": compressed(b"deflate", 15),
    "an error's body": endless(b"HTTP/1.1 500 No\r\n\r\n", BLOCK),
}
BROKEN: dict[str, Play] = {
    "headers without an end": endless(OK, b"x-pad: " + BLOCK[:9_000] + b"\r\n"),
    "a header without an end": endless(OK + b"x-pad: ", BLOCK),
    "trailers": endless(OK + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x-pad: " + BLOCK[:9_000] + b"\r\n"),
    "an extension of a chunk": endless(OK + b"transfer-encoding: chunked\r\n\r\n1;", BLOCK),
    "too short": answer(b"x", b"content-length: 100"),
    "a negative length": lambda: iter([OK, b"content-length: -1\r\n\r\n", b"x"]),
    "no number": lambda: iter([OK, b"content-length: 1e9\r\n\r\n", b"x"]),
    "no HTTP": lambda: iter([b"SSH-2.0-OpenSSH_9.6\r\n"]),
    "nothing": lambda: iter([]),
    "no gzip": answer(b"no gzip", b"content-encoding: gzip"),
}
SLOW: dict[str, Play] = {
    "one byte at a time": endless(OK + b"content-length: 1000000\r\n\r\n", b"x"),
    "a header one byte at a time": endless(OK + b"x-pad: ", b"x"),
    "an answer that is announced": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "silence": endless(OK, b""),
}
READ: dict[str, tuple[Play, bytes]] = {
    "br": (answer(b"no brotli", b"content-encoding: br"), b"no brotli"),
    "zstd": (answer(b"no zstd", b"content-encoding: zstd"), b"no zstd"),
    "twice": (answer(b"no gzip", b"content-encoding: gzip, gzip"), b"no gzip"),
    "a redirect": (answer(b"", b"location: http://192.0.2.1/", status=b"HTTP/1.1 302 Found\r\n"), b""),
    "more than its length": (lambda: iter([OK, b"content-length: 1\r\n\r\nxyz"]), b"x"),
}


class Server:
    """Plays one answer to each request, with a pause after each piece. `sent` counts the bytes that clients took."""

    def __init__(self, play: Play, pause: float = 0.0) -> None:
        self.sent = 0
        self.headers = b""
        self._stopping = threading.Event()
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(SECONDS)
                with suppress(OSError):
                    head = b""
                    while b"\r\n\r\n" not in head and (piece := self.request.recv(65536)):
                        head += piece
                    server.headers = head
                    for piece in play():
                        self.request.sendall(piece)
                        server.sent += len(piece)
                        if server._stopping.wait(pause) if pause else server._stopping.is_set():
                            return

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()  # waits for the handlers


async def get(url: str, seconds: float = SECONDS) -> None:
    """One request, which takes little memory."""
    tracemalloc.start()
    try:
        async with async_client(url, seconds=seconds) as client:
            await client.get("/")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 * MAX_ANSWER_BYTES


@pytest.mark.parametrize("play", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_an_answer_that_is_too_large_is_not_read(play: Play) -> None:
    with Server(play) as server:
        with pytest.raises(AnswerTooLargeError, match="larger than 4 MiB"):
            await get(server.url)
        assert b"accept-encoding: identity\r\n" in server.headers.lower()
    assert server.sent < 16 * MAX_ANSWER_BYTES


@pytest.mark.parametrize("play", BROKEN.values(), ids=BROKEN)
async def test_what_is_no_answer_is_an_error(play: Play) -> None:
    with Server(play) as server, pytest.raises(httpx2.HTTPError):
        await get(server.url)


@pytest.mark.parametrize("play", SLOW.values(), ids=SLOW)
async def test_the_time_is_that_of_the_whole_answer(play: Play) -> None:
    with Server(play, pause=0.01) as server, pytest.raises(httpx2.ReadTimeout):
        await get(server.url, seconds=0.5)


@pytest.mark.parametrize(("play", "body"), READ.values(), ids=READ)
async def test_what_was_not_asked_for_is_not_unpacked_or_followed(play: Play, body: bytes) -> None:
    with Server(play) as server:
        async with async_client(server.url, seconds=SECONDS) as client:
            assert (await client.get("/")).content == body


@pytest.mark.slow
@pytest.mark.parametrize("play", [*TOO_LARGE.values(), *SLOW.values()], ids=[*TOO_LARGE, *SLOW])
async def test_only_the_status_of_a_webhook_is_read(play: Play, tmp_path: Path) -> None:
    next(iter(play()))  # What is sent is packed before memory is measured.
    with Server(play, pause=0.01 if play in SLOW.values() else 0) as server:
        entry = {"url": f"{server.url}/hook", "on": ["promoted"], "timeout_seconds": 1}
        raw = {"sources": [], "state": {"dir": "state"}, "notify": [entry]}
        config = parse(raw, "test", tmp_path)
        target = NoticeTarget(None, config, config.notify[0])  # type: ignore[arg-type]
        tracemalloc.start()
        with suppress(NotifyError):
            await target._post("number", b"{}")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_ANSWER_BYTES
    assert server.sent < 4 * MAX_ANSWER_BYTES


@pytest.mark.parametrize("name", ["a body without an end", "chunks", "gzip", "headers without an end", "too short"])
async def test_the_clients_of_judges_read_as_little(name: str) -> None:
    with Server({**TOO_LARGE, **BROKEN}[name]) as server:
        client = model_client(server.url, seconds=SECONDS)
        with pytest.raises(CallError), call_errors():
            await asyncio.to_thread(client.chat.completions.create, model="m", messages=[])
        client.close()
    assert server.sent < 16 * MAX_ANSWER_BYTES


@pytest.mark.parametrize(
    "body", [b"[" * 10**6, b'{"data": ' + b"9" * 5_000 + b"}", b'{"error": ' + b"[" * 10**6, b"\xff\xfe{", b"NaN"]
)
@pytest.mark.parametrize("status", [OK, b"HTTP/1.1 400 Bad Request\r\n"])
async def test_a_replica_that_answers_nonsense_is_named(body: bytes, status: bytes) -> None:
    with Server(answer(body, b"connection: close", status=status)) as server:
        async with Replica(server.url) as replica:
            for asked in (replica.models(), replica.alias("agent"), replica.calls(0, 1), replica.load("a", "/a")):
                with pytest.raises(ServeError, match=server.url):
                    await asked
