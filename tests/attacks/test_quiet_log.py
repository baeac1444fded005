"""Requests that a client may repeat without a token, thousands of times in a second, do not fill the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flywheel.sources.otlp.receiver import Receiver
from flywheel.system import log
from tests.attacks.servers import OWN, WAIT_SECONDS, Target, running, sent, status

REQUESTS = 2000
MOST_WARNINGS = 4
LONG = b"x" * 5_000_000


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_logged", {})


def pieces(content: bytes) -> Iterator[bytes]:
    return (content[start : start + 65_536] for start in range(0, len(content), 65_536))


async def test_refused_requests_are_logged_at_a_rate_of_their_own_by_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTLP_TOKEN", "a-long-random-text")
    receiver = Receiver("127.0.0.1:0", tmp_path / "inbox.sqlite", token_env="OTLP_TOKEN")
    await receiver.start()
    target = Target("otlp", int(receiver.url.split(":")[2].split("/")[0]), "POST /v1/traces")
    one = b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    try:
        answer = await sent(target, one * REQUESTS + target.request("localhost", more="Content-Length: 0\r\n"))
        assert answer.count(b"HTTP/1.1 401") == REQUESTS + 1
        known = "Authorization: Bearer a-long-random-text\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n"
        assert status(await sent(target, target.request("localhost", more=known))) == 415
    finally:
        await target.leave()
        await receiver.stop()
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split(": ")[0] for message in found] == [
        "answered 127.0.0.1 with 401",
        "answered 127.0.0.1 with 415",
    ]


@pytest.mark.parametrize("kind", OWN)
async def test_warnings_of_the_web_server_are_logged_at_a_rate(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(kind, tmp_path) as target:
        one = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: nonsense\r\n\r\n"
        answer = await sent(target, one * REQUESTS + target.request("localhost"))
        assert answer.count(b"HTTP/1.1 ") == REQUESTS + 1
        for _ in range(3):
            assert status(await sent(target, b"nonsense\r\n\r\n")) == 400
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) <= MOST_WARNINGS, messages


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("start", [b"POST /", b"POST /v1/traces", b"GET /healthz"])
async def test_a_body_that_proves_to_be_wrong_after_the_answer_is_no_error(
    tmp_path: Path, kind: str, start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """An extension of a chunk can be as long as a client likes."""
    async with running(kind, tmp_path) as target:
        chunked = start + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader = await target.connected(chunked)
        async with asyncio.timeout(WAIT_SECONDS):
            await target.clients[-1].drain()
            await asyncio.sleep(0.05)
            try:
                for piece in pieces(b"1;" + LONG + b"\r\nx\r\n0\r\n\r\n"):
                    target.clients[-1].write(piece)
                    await target.clients[-1].drain()
                while await reader.read(65_536):
                    pass
            except OSError:
                pass  # the server has closed the connection
        assert status(await sent(target, target.request("localhost"))) == 200
    assert "Traceback" not in caplog.text
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
