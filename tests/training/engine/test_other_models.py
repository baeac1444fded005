"""Requests at a rollout's address that name another model: who answers them, over HTTP, and what is counted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from flywheel.secrets import REDACTED
from flywheel.training.engine.endpoint import OtherModels, RolloutEndpoint, listed, undecided
from flywheel.training.engine.session import Session
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.serving.fake_vllm import running
from tests.training.engine.scripted_application import QUESTION, ScriptedApplication, session

SECRET = "sk-of-the-auxiliary-model"


@asynccontextmanager
async def agent_of(rollout: Session, program: AgentProgram) -> AsyncIterator[tuple[openai.AsyncOpenAI, OtherModels]]:
    """A client of a rollout, without retries, and who answers in place of the policy."""
    endpoint = RolloutEndpoint()
    endpoint.others = OtherModels(program)
    await endpoint.start()
    try:
        url = endpoint.open(rollout)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client, endpoint.others
    finally:
        await endpoint.stop()


def program(url: str = "http://127.0.0.1:9/v1", **models: str) -> AgentProgram:
    return AgentProgram(auxiliary_models={"user": ModelEndpoint(url, "gpt-4o-mini", "key-1")}, models=models)


async def say(client: openai.AsyncOpenAI, model: str, **more: Any) -> str | None:
    found = await client.chat.completions.create(model=model, messages=QUESTION, **more)
    return found.choices[0].message.content


@pytest.mark.parametrize("name", ["user", "gpt-4o-mini"])
async def test_the_name_of_an_auxiliary_model_is_answered_by_it_and_never_recorded(name: str) -> None:
    app, user = ScriptedApplication(), Recorder(ScriptedModel())
    rollout = session(app)
    with running(user) as url:
        async with agent_of(rollout, program(f"{url}/v1")) as (client, others):
            said = await say(client, name, temperature=0.2, seed=5, logprobs=True, extra_body={"own": 1})
            stream = await client.chat.completions.create(model=name, messages=QUESTION, stream=True)
            parts = [event.choices[0].delta.content or "" async for event in stream if event.choices]
    assert said == "".join(parts) == "You asked: What is 3 plus 4?"
    assert (app.asked, rollout.calls, others.asked) == ([], (), {name: 2})
    # Its sampling is the agent's own.
    asked = {"model": "gpt-4o-mini", "messages": QUESTION}
    assert user.requests == [
        {**asked, "temperature": 0.2, "seed": 5, "logprobs": True, "own": 1},
        {**asked, "stream": True},
    ]


async def test_the_auxiliary_models_key_is_its_own_and_its_errors_are_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("USER_API_KEY", SECRET)
    keys: list[str] = []

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        keys.extend(value.decode() for name, value in scope["headers"] if name == b"authorization")
        body = json.dumps(
            {"error": {"message": f"too many for {SECRET}", "type": "rate_limit", "code": 429}}
        ).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with running(refusing) as url:
        rollout = session(ScriptedApplication())
        async with agent_of(rollout, program(f"{url}/v1")) as (client, _):
            with pytest.raises(openai.RateLimitError, match="too many"):
                await say(client, "user")
    assert keys == ["Bearer key-1"]
    why = f"an auxiliary model failed (HTTP status 429): too many for {REDACTED}"
    assert rollout.fault == ("engine_error", why)


async def test_an_auxiliary_model_that_cannot_be_reached_is_named() -> None:
    rollout = session(ScriptedApplication())
    async with agent_of(rollout, program()) as (client, _):
        with pytest.raises(openai.APIStatusError, match=r"rollout\.auxiliary_models\.user does not answer") as failed:
            await say(client, "user")
    assert (failed.value.status_code, rollout.calls) == (502, ())
    assert rollout.fault is not None
    assert rollout.fault[1].startswith(
        "an auxiliary model failed (HTTP status 502): rollout.auxiliary_models.user does"
    )


async def test_a_retry_that_an_auxiliary_model_answers_mends_what_failed() -> None:
    """As with the policy: without one, the rollout would have the reward of the machine's fault."""
    user, statuses = ScriptedModel(), [500, 200]

    async def failing_first(scope: Any, receive: Any, send: Any) -> None:
        if statuses.pop(0) == 200:
            await user(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    with running(failing_first) as url:
        rollout = session(ScriptedApplication())
        async with agent_of(rollout, program(f"{url}/v1")) as (client, _):
            with pytest.raises(openai.InternalServerError):
                await say(client, "user")
            assert rollout.fault is not None
            await say(client, "user")
    assert rollout.fault is None


async def test_a_call_of_an_auxiliary_model_that_is_given_up_is_remembered() -> None:
    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    with running(waiting) as url:
        rollout = session(ScriptedApplication())
        async with agent_of(rollout, program(f"{url}/v1")) as (client, _):
            with pytest.raises(openai.APITimeoutError):
                await say(client, "user", timeout=3)
    assert rollout.fault is not None
    assert rollout.fault[0] == "abandoned_call"


async def test_a_name_that_is_refused_reaches_no_model() -> None:
    app = ScriptedApplication()
    rollout = session(app)
    async with agent_of(rollout, program(**{"gpt-9": "refuse", "user": "policy"})) as (client, others):
        with pytest.raises(openai.NotFoundError, match=r"the model gpt-9 is refused .rollout\.models."):
            await say(client, "gpt-9")
        assert await say(client, "user") == "It is 7."
    assert (len(app.asked), len(rollout.calls), others.asked) == (1, 1, {"gpt-9": 1, "user": 1})


async def test_any_other_name_is_the_policys_and_is_counted_without_retries() -> None:
    rollout = session(ScriptedApplication())
    known = program(**{"my-agent": "policy"})
    async with agent_of(rollout, known) as (client, others):
        for name, retries in (("my-agent", "0"), ("gpt-9", "0"), ("gpt-9", "1")):
            assert await say(client, name, extra_headers={"x-stainless-retry-count": retries}) == "It is 7."
        async with httpx2.AsyncClient() as http:
            without = await http.post(f"{client.base_url}chat/completions", json={"messages": QUESTION})
    assert (without.status_code, others.asked) == (200, {"my-agent": 1, "gpt-9": 1})
    assert len(rollout.calls) == 3


def test_names_that_nothing_decides_are_one_sentence() -> None:
    asked = {"my-agent": 1200, "gpt-9": 2, "user": 1, "other": 1}
    known = program(**{"my-agent": "policy"})
    assert listed(asked) == "my-agent 1,200 times, gpt-9 2 times, user 1 time, other 1 time"
    assert undecided(known, asked).startswith("the agent asks for gpt-9 2 times, other 1 time, which is neither")
    assert undecided(known, {"my-agent": 1200, "user": 1}) == ""
