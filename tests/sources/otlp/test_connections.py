"""Connections that say nothing, too many of them, and clients that do not know the token."""

from __future__ import annotations

import asyncio
import errno
import resource
from asyncio.trsock import TransportSocket
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.config import parse
from flywheel.errors import ConfigError
from flywheel.sources.otlp import Receiver, server
from flywheel.sources.otlp.server import LogRateLimit, max_connections
from tests.sources.otlp.exporting import PROTOBUF, ids, request, span

GOOD = request(span(1)).SerializeToString()
HEAD = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
TOKEN = "a-long-random-text"


async def connected(receiver: Receiver) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx2.URL(receiver.url)
    assert url.host and url.port
    return await asyncio.open_connection(url.host, url.port)


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the other side has closed the connection, within a minute."""
    async with asyncio.timeout(60):
        try:
            while await reader.read(4096):
                pass
        except ConnectionResetError:
            pass
    return True


@pytest.mark.parametrize("said", [b"", b"POST /v1/tra", HEAD, HEAD + b"Content-Length: 4\r\n"])
async def test_a_header_has_a_deadline(receiver: Receiver, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    reader, writer = await connected(receiver)
    writer.write(said)
    assert await ended(reader)
    writer.close()


async def test_a_header_that_comes_after_another_request_has_a_deadline_too(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    reader, writer = await connected(receiver)
    writer.write(HEAD + f"Content-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD)
    assert b" 200 " in await reader.readline()
    writer.write(HEAD)
    assert await ended(reader)
    writer.close()


async def test_a_body_has_its_own_deadline(receiver: Receiver, inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch may arrive slowly."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.2)
    reader, writer = await connected(receiver)
    writer.write(HEAD + f"Content-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD[:9])
    await asyncio.sleep(0.6)
    writer.write(GOOD[9:])
    assert b" 200 " in await reader.readline()
    assert ids(inbox) == [1]
    writer.close()


async def test_connections_beyond_the_limit_are_closed_and_it_is_told_once(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(server.Protocol, "too_many_log", LogRateLimit())
    idle = [await connected(receiver) for _ in range(4)]
    while len(receiver._server.server_state.connections) < 4:  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
    for _ in range(20):
        reader, writer = await connected(receiver)
        assert await ended(reader)
        writer.close()
    assert sum("more than 4 connections" in record.message for record in caplog.records) == 1
    for _, writer in idle:
        writer.close()
    async with asyncio.timeout(60), httpx2.AsyncClient() as client:
        while receiver._server.server_state.connections:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        assert (await client.post(receiver.url, content=GOOD, headers=PROTOBUF)).status_code == 200


@pytest.mark.parametrize("soft", [256, 1024, 65_536, resource.RLIM_INFINITY])
def test_the_limit_leaves_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert 0 < max_connections() <= (server.MAX_CONNECTIONS if soft < 0 else soft / 2)


async def test_connections_that_cannot_be_accepted_are_told_at_a_rate(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio tells each of them, with a traceback, hundreds of times a second."""
    loop = asyncio.get_running_loop()
    (server,) = receiver._server.servers  # type: ignore[union-attr]

    def refused(socket: Any) -> None:
        error = OSError(errno.EMFILE, "Too many open files")
        loop.call_exception_handler(
            {"message": "socket.accept() out of system resource", "exception": error, "socket": socket}
        )

    for _ in range(500):
        refused(server.sockets[0])
    (told,) = caplog.records
    assert told.getMessage().startswith(f"cannot accept connections at {receiver.url}: Too many open files")
    assert told.exc_info is None
    caplog.clear()
    loop.call_exception_handler({"message": "something else", "exception": ValueError("x")})
    assert [record.name for record in caplog.records] == ["asyncio"]
    assert isinstance(server.sockets[0], TransportSocket)


def test_a_rate_allows_one_in_its_time() -> None:
    now = 0.0
    rate = LogRateLimit(60, lambda: now)
    assert [rate.allows() for _ in range(3)] == [True, False, False]
    now = 61
    assert [rate.allows() for _ in range(2)] == [True, False]


@pytest.mark.parametrize("listen", ["0.0.0.0:4318", "[::]:4318", "192.0.2.1:4318", "gateway:4318"])
def test_an_address_that_others_reach_needs_a_token(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"other machines reach listen .*token_env") as caught:
        parse({"sources": [{"type": "otlp", "listen": listen}]}, "test", tmp_path)
    assert caught.value.exit_code == 78
    parse({"sources": [{"type": "otlp", "listen": listen, "token_env": "T"}]}, "test", tmp_path)


@pytest.mark.parametrize("listen", ["127.0.0.1:4318", "127.1.2.3:1", "[::1]:4318", "localhost:4318"])
def test_an_address_of_this_machine_needs_none(tmp_path: Path, listen: str) -> None:
    parse({"sources": [{"type": "otlp", "listen": listen}]}, "test", tmp_path)


async def test_who_does_not_know_the_token_sends_nothing(inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_A_TEST", TOKEN)
    receiver = Receiver("127.0.0.1:0", inbox, token_env="TOKEN_OF_A_TEST")
    await receiver.start()
    async with httpx2.AsyncClient() as client:
        for given in (
            {},
            {"Authorization": "Bearer another"},
            {"Authorization": TOKEN},
            {"Authorization": "Bearer é"},
        ):
            headers = {**PROTOBUF, **{name: value.encode() for name, value in given.items()}}
            answer = await client.post(receiver.url, content=GOOD, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert TOKEN not in answer.text
        assert ids(inbox) == []
        known = {**PROTOBUF, "Authorization": f"Bearer {TOKEN}"}
        assert (await client.post(receiver.url, content=GOOD, headers=known)).status_code == 200
    assert ids(inbox) == [1]
    await receiver.stop()


@pytest.mark.parametrize("held", [None, "", " x", "käse"])
async def test_a_token_that_is_none_is_a_wrong_configuration(
    inbox: Path, monkeypatch: pytest.MonkeyPatch, held: str | None
) -> None:
    monkeypatch.delenv("TOKEN_OF_A_TEST", raising=False)
    if held is not None:
        monkeypatch.setenv("TOKEN_OF_A_TEST", held)
    with pytest.raises(ConfigError, match="TOKEN_OF_A_TEST, which token_env names"):
        await Receiver("127.0.0.1:0", inbox, token_env="TOKEN_OF_A_TEST").start()
