"""The endpoint of agents: secrets, streams, retries, with OpenAI's own client. vLLM is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from flywheel.training.engine.endpoint import RolloutEndpoint
from flywheel.training.engine.session import Session
from tests.training.engine.scripted_application import (
    QUESTION,
    TOO_LONG,
    ScriptedApplication,
    TalkativeApplication,
    answered,
    asking,
    message,
    session,
    started,
)
from tests.waiting import until


@asynccontextmanager
async def listening(*sessions: Session) -> AsyncIterator[tuple[RolloutEndpoint, list[str]]]:
    endpoint = RolloutEndpoint()
    await endpoint.start()
    try:
        yield endpoint, [endpoint.open(each) for each in sessions]
    finally:
        await endpoint.stop()


def client(url: str, **settings: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", **settings)


async def post(url: str, body: Any) -> httpx2.Response:
    async with httpx2.AsyncClient() as http:
        return await http.post(f"{url}/chat/completions", json=body)


async def test_an_openai_client_is_answered() -> None:
    rollout = session(ScriptedApplication())
    async with listening(rollout) as (_, [url]), client(url) as agent:
        [model] = (await agent.models.list()).data
        found = await agent.chat.completions.create(model=model.id, messages=QUESTION)
    assert (found.model, found.choices[0].message.content) == (model.id, "It is 7.")
    assert found.usage is not None
    assert found.usage.completion_tokens == 2
    assert len(rollout.calls) == 1


@pytest.mark.parametrize(
    "tampered",
    [
        lambda url: url[:-4] + ("A" if url[-4] != "A" else "B") + "/v1",
        lambda url: url[:-4] + "/v1",
        lambda url: url[:-3] + "A/v1",
        lambda url: url.rsplit("/", 2)[0] + "/v1",
        lambda url: url.rsplit("/", 3)[0] + "/v1",
        lambda url: url.upper().replace("HTTP", "http").replace("/S/", "/s/").replace("/V1", "/v1"),
    ],
)
async def test_a_wrong_secret_finds_nothing(tampered: Callable[[str], str]) -> None:
    app = ScriptedApplication()
    async with listening(session(app), session(app)) as (_, [url, _]):
        wrong = await post(tampered(url), asking("?"))
        async with httpx2.AsyncClient() as http:
            models = await http.get(f"{tampered(url)}/models")
            unknown = await http.get(url.replace("/s/", "/health/"))
            forbidden = await http.get(f"{url}/chat/completions")
    # All the same: nobody learns what is there.
    assert {wrong.status_code, models.status_code, unknown.status_code, forbidden.status_code} == {404}
    assert wrong.content == models.content == unknown.content == forbidden.content
    assert app.asked == []


async def test_each_secret_is_that_of_one_rollout() -> None:
    one, two = session(ScriptedApplication()), session(ScriptedApplication())
    async with listening(one, two) as (endpoint, [url_one, url_two]):
        assert url_one != url_two
        await post(url_one, asking("?"))
        assert (len(one.calls), len(two.calls)) == (1, 0)
        assert endpoint.close(url_one) is one
        assert not endpoint.was_called_late(url_one)
        ended = await post(url_one, asking("and now?"))
        assert (endpoint.was_called_late(url_one), endpoint.was_called_late(url_two)) == (True, False)
        assert (ended.status_code, (await post(url_two, asking("?"))).status_code) == (404, 200)
    assert ended.json()["error"]["message"] == "Not Found"


@pytest.mark.parametrize(
    ("asked", "answers"), [({}, [60, 40]), ({"max_tokens": 25}, [25, 25, 25, 25]), ({"max_tokens": 90}, [60, 40])]
)
async def test_limits_hold_for_calls_at_the_same_time(asked: dict[str, Any], answers: list[int]) -> None:
    rollout = session(TalkativeApplication(), tokens=100, turn_tokens=60, turns=6)
    async with listening(rollout) as (_, [url]), client(url) as agent:
        calls = (agent.chat.completions.create(model="m", messages=QUESTION, **asked) for _ in range(8))
        found = await asyncio.gather(*calls, return_exceptions=True)
    refused = [each for each in found if isinstance(each, openai.BadRequestError)]
    assert [len(call.token_ids) for call in rollout.calls] == answers
    assert (rollout.generated, len(refused)) == (100, 8 - len(answers))
    assert {each.body["message"] for each in refused if isinstance(each.body, dict)} == {
        "this rollout has reached its limit of 100 generated tokens"
    }


async def test_turns_are_those_of_calls_at_the_same_time_too() -> None:
    rollout = session(ScriptedApplication(), turns=2)
    async with listening(rollout) as (_, [url]), client(url) as agent:
        calls = (agent.chat.completions.create(model="m", messages=QUESTION) for _ in range(8))
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each).__name__ for each in found].count("BadRequestError") == 6
    assert (len(rollout.calls), rollout.is_truncated) == (2, True)


@pytest.mark.parametrize("header", [{}, {"x-stainless-retry-count": "0"}])
async def test_an_agent_that_votes_gets_as_many_samples(header: dict[str, str]) -> None:
    rollout = session(TalkativeApplication(), tokens=10, turn_tokens=1)
    async with listening(rollout) as (_, [url]), httpx2.AsyncClient(headers=header) as http:
        found = [await http.post(f"{url}/chat/completions", json=asking("vote")) for _ in range(3)]
        found += await asyncio.gather(*(http.post(f"{url}/chat/completions", json=asking("vote")) for _ in range(3)))
        again = await http.post(
            f"{url}/chat/completions", json=asking("vote"), headers={"x-stainless-retry-count": "1"}
        )
    texts = [each.json()["choices"][0]["message"]["content"] for each in found]
    assert (sorted(texts), len(rollout.calls)) == ([f"answer {number}" for number in range(6)], 6)
    assert again.json() in [each.json() for each in found], "a retry"


async def test_a_client_that_asks_for_a_stream_gets_one() -> None:
    said = message("I add.", calls=[("add", '{"a": 3, "b": 4}'), ("add", '{"a": 7, "b": 1}')], reasoning="3 + 4")
    app = ScriptedApplication(answered(said, finish="tool_calls"))
    rollout = session(app)
    async with listening(rollout) as (_, [url]), client(url) as agent:
        stream = await agent.chat.completions.create(
            model="m", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert (app.asked[0]["stream"], len(rollout.calls)) == (False, 1)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    assert [reasoning for delta in deltas if (reasoning := getattr(delta, "reasoning", None))] == ["3 + 4"]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id, call.type) for call in calls] == [
        (0, "call-0", "function"),
        (1, "call-1", "function"),
    ]
    assert [call.function.arguments for call in calls if call.function] == ['{"a": 3, "b": 4}', '{"a": 7, "b": 1}']
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert finishes == [None] * (len(finishes) - 1) + ["tool_calls"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [2]
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


async def test_a_stream_that_breaks_off_is_remembered_unless_a_retry_is_answered() -> None:
    """The answer is longer than what the system holds of it for the client."""
    rollout = session(ScriptedApplication(answered(message("Wait. " * 4_000_000)), answered(message())))
    async with listening(rollout) as (_, [url]):
        async with (
            httpx2.AsyncClient() as http,
            http.stream("POST", f"{url}/chat/completions", json=asking("?", stream=True)) as reply,
        ):
            assert reply.status_code == 200
            assert rollout.fault is not None, "as long as it is sent"
        await post(url, asking("and now?", stream=True))
        assert rollout.fault == ("broken_stream", "its answer broke off as it was streamed")
        await post(url, asking("?", stream=True))
        assert rollout.fault is None


async def test_a_call_that_a_client_gives_up_is_remembered() -> None:
    app = ScriptedApplication(hold=True)
    rollout = session(app)
    async with listening(rollout) as (_, [url]):
        asked = asyncio.create_task(post(url, asking("?")))
        await started(app)
        [call] = rollout._calls
        asked.cancel()
        await until(lambda: not call.waiting, "the end of the request")
        app.go.set()
        await post(url, asking("and now?"))
    assert rollout.fault is not None
    assert rollout.fault[0] == "abandoned_call"


async def test_a_stream_ends_with_done_and_has_usage_only_if_asked() -> None:
    async with listening(session(ScriptedApplication())) as (_, [url]):
        found = await post(url, asking("?", stream=True, return_token_ids=True, logprobs=True))
    assert found.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in found.text.splitlines() if line]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert [chunk for chunk in chunks if "usage" in chunk] == []
    assert chunks[0]["prompt_token_ids"] == [5, 6, 7]
    assert chunks[-1]["choices"][0]["token_ids"] == [8, 9]
    assert len(chunks[-1]["choices"][0]["logprobs"]["content"]) == 2


class Impatient(httpx2.AsyncHTTPTransport):
    """Lets a client give up its first attempt when `gives_up` is set. Its connection ends with `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.gives_up = asyncio.Event()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        sending = super().handle_async_request(request)
        if request.headers["x-stainless-retry-count"] != "0":
            return await sending
        self.first = asyncio.create_task(sending)
        await self.gives_up.wait()
        raise httpx2.ReadTimeout("it takes too long", request=request)


@pytest.mark.slow
async def test_a_clients_retry_does_not_count_twice() -> None:
    """OpenAI's client gives up after a time and asks again; the first answer comes meanwhile."""
    app = ScriptedApplication(hold=True)
    rollout = session(app)
    transport = Impatient()
    http = httpx2.AsyncClient(transport=transport)
    async with listening(rollout) as (_, [url]), client(url, http_client=http) as agent:
        asking = asyncio.create_task(agent.chat.completions.create(model="m", messages=QUESTION))
        await started(app)
        transport.gives_up.set()
        [call] = rollout._calls
        await until(lambda: call.waiting == 2, "the second attempt")
        transport.first.cancel()
        await until(lambda: call.waiting == 1, "the end of the first attempt")
        app.go.set()
        found = await asking
    assert found.choices[0].message.content == "It is 7."
    assert (len(app.asked), len(rollout.calls), app.aborted) == (1, 1, 0)
    assert rollout.fault is None


async def test_the_servers_errors_are_the_clients() -> None:
    async with listening(session(ScriptedApplication((400, TOO_LONG)))) as (_, [url]), client(url) as agent:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 8 tokens") as refused:
            await agent.chat.completions.create(model="m", messages=QUESTION, stream=True)
    assert refused.value.param == "input_tokens"


async def test_an_engine_that_died_is_an_error_of_the_server() -> None:
    app = ScriptedApplication(RuntimeError("EngineCore died"))
    async with listening(session(app)) as (_, [url]), client(url, max_retries=0) as agent:
        with pytest.raises(openai.InternalServerError, match="the engine failed: EngineCore died"):
            await agent.chat.completions.create(model="m", messages=QUESTION)


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
async def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async with listening(session(ScriptedApplication())) as (_, [url]), httpx2.AsyncClient() as http:
        found = await http.post(f"{url}/chat/completions", content=body)
    assert (found.status_code, found.json()["error"]["type"]) == (400, "BadRequestError")


async def test_the_endpoint_is_reached_from_this_machine_alone_and_ends() -> None:
    app = ScriptedApplication(hold=True)
    async with listening(session(app)) as (endpoint, [url]):
        assert url.startswith("http://127.0.0.1:")
        asked = asyncio.create_task(post(url, asking("?")))
        await started(app)
    assert (await asked).status_code == 410
    with pytest.raises(httpx2.ConnectError):
        await post(url, asking("?"))
    await endpoint.stop()
