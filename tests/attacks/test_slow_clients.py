"""Connections that say nothing, or only slowly, and too many of them: honest clients are answered beside them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from flywheel.daemon import metrics_server
from flywheel.serving.server import middleware
from flywheel.sources.otlp import receiver as otlp
from flywheel.system import log, server_limits
from flywheel.system.connections import Connections, Protocol
from flywheel.system.server_limits import ServerLimits, respond
from flywheel.web import guard
from tests.attacks.servers import OWN, WAIT_SECONDS, running, sent, status
from tests.waiting import until

MODULES: dict[str, Any] = {"pages": guard, "metrics": metrics_server, "otlp": otlp}


def limit(monkeypatch: pytest.MonkeyPatch, kind: str, **limits: Any) -> None:
    monkeypatch.setattr(MODULES[kind], "LIMITS", replace(MODULES[kind].LIMITS, **limits))


HALF_HEADER = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "
HALF_BODY = (
    b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
    b"Content-Length: 9\r\n\r\na"
)


@pytest.mark.parametrize("said", [b"", b"GET /", HALF_HEADER, HALF_BODY[:-4]])
@pytest.mark.parametrize("kind", OWN)
async def test_a_header_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, said: bytes
) -> None:
    limit(monkeypatch, kind, header_seconds=0.3)
    async with running(kind, tmp_path) as target:
        assert await sent(target, said) == b""


@pytest.mark.parametrize("kind", OWN)
async def test_a_header_after_another_request_has_a_deadline_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    limit(monkeypatch, kind, header_seconds=0.3)
    async with running(kind, tmp_path) as target:
        good = target.request("localhost").replace(b"Connection: close\r\n", b"")
        for said in (good + HALF_HEADER, good + good + HALF_HEADER):
            answer = await sent(target, said)
            assert answer.count(b"HTTP/1.1 200") == said.count(good)


@pytest.mark.parametrize("kind", ["pages", "otlp"])
async def test_a_body_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    limit(monkeypatch, kind, body_seconds=0.3)
    said = HALF_BODY if kind == "otlp" else HALF_BODY.replace(b"/v1/traces", b"/sign-in")
    async with running(kind, tmp_path) as target:
        reader = await target.connected(said)
        assert status(await reader.read(100)) == 408


@pytest.mark.slow
async def test_a_body_for_the_model_has_a_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(middleware, "ServerLimits", lambda **given: ServerLimits(**given, body_seconds=0.3))
    async with running("serve", tmp_path) as target:
        for path in (b"/v1/chat/completions", b"/v1/audio/transcriptions", b"/v1/load_lora_adapter"):
            said = HALF_BODY.replace(b"/v1/traces", path).replace(b"application/x-protobuf", b"application/json")
            reader = await target.connected(said)
            assert status(await reader.read(100)) == 408
        assert status(await sent(target, target.request("localhost"))) == 200


@pytest.mark.parametrize("kind", OWN)
async def test_beside_half_open_requests_others_are_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connections that the server waits for longest make room."""
    limit(monkeypatch, kind, connections=16)
    monkeypatch.setattr(log, "_logged", {})
    half_body = HALF_BODY if kind == "otlp" else HALF_BODY.replace(b"/v1/traces", b"/sign-in")
    async with running(kind, tmp_path) as target:
        opened = [await target.connected(half_body if at % 2 else HALF_HEADER) for at in range(100)]
        for _ in range(3):
            assert status(await sent(target, target.request("localhost"))) == 200
        assert sum("more than 16 connections" in record.message for record in caplog.records) == 1
        async with asyncio.timeout(WAIT_SECONDS):
            with contextlib.suppress(ConnectionResetError):
                assert await opened[0].read() == b""


def chat_head(size: int) -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\nConnection: close\r\n\r\n"
    ).encode()


class Busy:
    """Reads requests, and answers when it may."""

    def __init__(self) -> None:
        self.read = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()
        self.read += 1
        await self.may_answer.wait()
        await respond(send, 200, b"", "text/plain")


async def test_many_bodies_at_once_are_all_read(tmp_path: Path) -> None:
    """60 of 5 MB where one may have 32 MB, in small: more than may arrive at once."""
    busy, body = Busy(), b'{"model": "agent"}'.ljust(100_000)
    async with running("serve", tmp_path, busy, max_body_bytes=640000) as target:
        opened = [await target.connected(chat_head(len(body)) + body[:-14_000]) for _ in range(60)]
        for piece in (body[-14_000:-9000], body[-9000:-9], body[-9:]):
            # Each of them has been read in part while there is no room. The oldest one must go on.
            await asyncio.sleep(0.1)
            for client in target.clients:
                client.write(piece)
        await until(lambda: busy.read == 60, "all requests in vLLM")
        busy.may_answer.set()
        async with asyncio.timeout(WAIT_SECONDS):
            assert {status(await reader.read()) for reader in opened} == {200}


async def test_bodies_that_the_model_has_read_have_a_limit_of_their_own(tmp_path: Path) -> None:
    busy, body = Busy(), b'{"model": "agent"}'.ljust(100_000)
    async with running("serve", tmp_path, busy, max_body_bytes=100000) as target:
        whole = chat_head(len(body)) + body
        opened = []
        for number in range(1, 33):
            opened.append(await target.connected(whole))
            await until(lambda number=number: busy.read == number, "a request in vLLM")  # type: ignore[misc]
        assert status(await sent(target, whole)) == 503
        busy.may_answer.set()
        async with asyncio.timeout(WAIT_SECONDS):
            assert {status(await reader.read()) for reader in opened} == {200}
        assert status(await sent(target, whole)) == 200


async def test_bodies_for_the_model_fill_no_memory_and_keep_no_probe_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_limits, "ROOM_SECONDS", 0.1)
    size = 100_000
    head = chat_head(size)
    async with running("serve", tmp_path, max_body_bytes=size) as target:
        opened = [await target.connected(head + b" " * (size - 9)) for _ in range(40)]
        answers = [asyncio.ensure_future(reader.read(2000)) for reader in opened]
        small = b'{"model": "agent", "messages": []}'
        assert status(await sent(target, chat_head(len(small)) + small)) == 200, "what arrives at once"
        await until(lambda: sum(answer.done() for answer in answers) >= 32, "answers to the first")
        refused = [answer.result() for answer in answers if answer.done()]
        assert {status(answer) for answer in refused} == {503}
        assert all(b"retry-after: 5" in answer.lower() for answer in refused)
        assert status(await sent(target, target.request("localhost"))) == 200
        for answer in answers:
            answer.cancel()
        await asyncio.wait(answers)
        await target.leave()
        body = b'{"model": "agent", "messages": []}'
        good = head.replace(str(size).encode(), str(len(body)).encode()) + body

        async def is_answered() -> bool:
            return status(await sent(target, good)) == 200

        await until(is_answered, "room for another body")


def test_the_limit_leaves_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft in (256, 1024, 65_536, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert 0 < Connections(ServerLimits()).most <= (ServerLimits().connections if soft < 0 else soft / 2)


def test_a_client_that_still_reads_an_answer_has_more_time() -> None:
    ended: list[int] = []
    waited: list[int] = []
    itself: Any = SimpleNamespace(
        transport=SimpleNamespace(get_write_buffer_size=lambda: left),
        _wait=lambda: waited.append(left),
        _end=lambda: ended.append(left),
    )
    for before, left in ((10, 9), (10, 10), (10, 0), (0, 0)):  # noqa: B007 - the functions above use it
        Protocol._expired(itself, before)
    assert (waited, ended) == ([9], [10, 0, 0])


async def test_connections_that_cannot_be_accepted_are_told_at_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio tells each of them, with a traceback, hundreds of times a second."""
    monkeypatch.setattr(log, "_logged", {})
    loop = asyncio.get_running_loop()
    async with running("otlp", tmp_path) as target:
        await sent(target, target.request("localhost"))
        caplog.clear()
        error = OSError(errno.EMFILE, "Too many open files")
        listening = SimpleNamespace(getsockname=lambda: ("127.0.0.1", target.port))
        for _ in range(500):
            loop.call_exception_handler({"message": "out of resource", "exception": error, "socket": listening})
        (told,) = caplog.records
        assert f"connections at 127.0.0.1:{target.port} cannot be accepted" in told.getMessage()
        assert told.exc_info is None
        caplog.clear()
        loop.call_exception_handler({"message": "something else", "exception": ValueError("x")})
        assert [record.name for record in caplog.records] == ["asyncio"]
