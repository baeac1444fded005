"""Genuine clients say which conversation a call belongs to."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flywheel
from flywheel.conversations import CONVERSATION_HEADER, MAX_HEADER_BYTES
from flywheel.serving.calls.call_log import CallLog, RecordedCall
from tests.factories.call_log import log_settings, stored
from tests.serving.fake_vllm import BASE, FakeVllm, running, with_middleware
from tests.waiting import wait_for

AB_TEST = {"target": BASE, "share": 0.5, "salt": "salt"}


class Server:
    def __init__(self, url: str, path: Path) -> None:
        self.url, self.path = url, path

    def calls(self, count: int) -> list[RecordedCall]:
        with CallLog(self.path) as log:
            wait_for(lambda: log.state().newest >= count, f"{count} calls")
            return stored(log)


@pytest.fixture
def server(app: FakeVllm, tmp_path: Path) -> Iterator[Server]:
    """Its alias has an A/B test between r0001 and the base model."""
    app.loaded["agent@r0001"] = "/adapters/r0001"
    path = tmp_path / "serving" / "calls.db"
    middleware = with_middleware(app, call_log=log_settings(path))
    with running(middleware) as url:
        change = {"alias": "agent", "target": "agent@r0001", "ab_test": AB_TEST}
        assert httpx2.put(f"{url}/flywheel/alias", json=change).status_code == 200
        yield Server(url, path)
    middleware._recorder.close()


QUESTION: Any = [{"role": "user", "content": "Who?"}]


def test_openais_client_sends_the_conversation(server: Server) -> None:
    http = openai.DefaultHttpxClient(auth=flywheel.conversation_header)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", http_client=http) as client:

        def ask(text: str) -> None:
            client.chat.completions.create(model="agent", messages=[{"role": "user", "content": text}])

        with flywheel.conversation("thread 7"):
            ask("Who?")
            with flywheel.conversation("thread 8"):
                ask("Who?")
            ask("Why?")
        ask("Who?")
    first, other, again, without = server.calls(4)
    assert (first.unit, first.arm, first.unit_kind) == (again.unit, again.arm, "conversation")
    assert len({first.unit, other.unit, without.unit}) == 3
    assert without.unit_kind == "fallback"
    assert first.credential == without.credential, "the client's own key stays"


async def test_concurrent_conversations_of_openais_async_client(server: Server) -> None:
    http = openai.DefaultAsyncHttpxClient(auth=flywheel.conversation_header)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", http_client=http) as client:

        async def ask(thread: str) -> None:
            with flywheel.conversation(thread):
                for _ in range(3):
                    await client.chat.completions.create(model="agent", messages=QUESTION)

        await asyncio.gather(*(ask(f"thread {number}") for number in range(8)))
    calls = server.calls(24)
    assert {call.unit_kind for call in calls} == {"conversation"}
    assert sorted(sum(call.unit == unit for call in calls) for unit in {call.unit for call in calls}) == [3] * 8


async def test_agentscopes_model_sends_the_conversation(server: Server) -> None:
    pytest.importorskip("agentscope")
    from agentscope.agent import Agent
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel

    http = openai.DefaultAsyncHttpxClient(auth=flywheel.conversation_header)
    model = OpenAIChatModel(
        credential=OpenAICredential(api_key="unused", base_url=f"{server.url}/v1"),
        model="agent",
        stream=False,
        client_kwargs={"http_client": http},
    )
    agent = Agent(name="calculator", system_prompt="You are a calculator.", model=model)
    with flywheel.conversation("thread 7"):
        for question in ("Who?", "Why?"):
            await agent.reply(UserMsg(name="user", content=question))
    first, *later = server.calls(2)
    assert first.unit_kind == "conversation"
    assert {call.unit for call in later} == {first.unit}
    await http.aclose()


def sent(conversation_id: str, client: Any) -> str:
    request = client.Request("GET", "http://localhost")
    with flywheel.conversation(conversation_id):
        assert flywheel.conversation_header(request) is request
    return str(request.headers[CONVERSATION_HEADER])


@given(st.text(min_size=1).filter(str.strip))
def test_any_id_is_one_that_a_header_can_carry(conversation_id: str) -> None:
    for client in (httpx, httpx2):
        value = sent(conversation_id, client)
        assert value.isascii() and value.isprintable()
        assert 0 < len(value) <= MAX_HEADER_BYTES
        assert value == value.strip()
    assert sent(conversation_id, httpx) == sent(conversation_id, httpx2)


def test_ids_that_are_sent_as_a_hash() -> None:
    assert sent("thread 7", httpx2) == "thread 7"
    assert sent("ü", httpx2) == hashlib.sha256("ü".encode()).hexdigest()
    assert len(sent("x" * 513, httpx2)) == 64
    assert len(sent("\ud800", httpx2)) == 64
    for empty in ("", "  "):
        with pytest.raises(ValueError, match="needs an id"), flywheel.conversation(empty):
            pass


def test_outside_a_conversation_nothing_is_sent() -> None:
    request = httpx2.Request("GET", "http://localhost")
    with flywheel.conversation("c"):
        pass
    assert CONVERSATION_HEADER not in flywheel.conversation_header(request).headers
