"""`flywheel serve` prints that it is ready when it can be reached, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flywheel.system.server_limits import Message, Receive, Send
from tests.serving.fake_vllm import BASE, with_middleware
from tests.waiting import until


async def application(scope: object, receive: Receive, send: Send) -> None:
    """One that starts and never stops."""
    assert (await receive())["type"] == "lifespan.startup"
    await send({"type": "lifespan.startup.complete"})
    await receive()


async def test_it_says_so_once_it_can_be_reached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    stop = asyncio.Event()
    messages: list[Message] = [{"type": "lifespan.startup"}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not messages:
            await stop.wait()
        return messages.pop() if messages else {"type": "lifespan.shutdown"}

    async def send(message: Message) -> None:
        sent.append(message)

    refused: list[OSError] = []
    connect = asyncio.open_connection

    async def noted(*place: Any) -> Any:
        try:
            return await connect(*place)
        except OSError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(asyncio, "open_connection", noted)
    middleware = with_middleware(application, address=url)
    serving = asyncio.create_task(middleware({"type": "lifespan"}, receive, send))
    await until(lambda: len(refused) >= 3, "tries to reach it")
    assert sent == [{"type": "lifespan.startup.complete"}]
    assert capsys.readouterr().out == "", "nobody listens there yet"
    listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", free_port)
    printed = ""
    async with asyncio.timeout(60):
        while not printed:
            await asyncio.sleep(0.01)
            printed = capsys.readouterr().out
    assert printed == f"flywheel serve is ready at {url}/v1: agent is answered by {BASE}\n"
    listening.close()
    stop.set()
    await serving


async def test_a_server_that_was_started_by_hand_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "lifespan.startup"}

    async def send(message: Message) -> None:
        sent.append(message)

    await with_middleware(application)({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.complete"]
    assert capsys.readouterr().out == ""
