"""What clients of other makers get: where they send the key, which models they see, and errors that they can show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from flywheel.serving.calls.call_log import CallLog
from tests.cases import for_each
from tests.factories.call_log import stored
from tests.serving.fake_vllm import BASE, FakeVllm, running, with_middleware

KEYS = {"FLYWHEEL_API_KEY": "agents", "FLYWHEEL_ADMIN_KEY": "admin", "VLLM_API_KEY": "internal"}
VERSION = "agent@r0001"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "7"}]}


@pytest.fixture
def app() -> FakeVllm:
    app = FakeVllm()
    app.loaded = {VERSION: "/adapters/r0001", "other@r0001": "/adapters/r0002"}
    app.echoes = set()
    return app


@pytest.fixture
def url(app: FakeVllm) -> Iterator[str]:
    with running(with_middleware(app, FLYWHEEL_ALIAS="agent\nother", **KEYS)) as url:
        yield url


def client(url: str, key: str = "agents") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def refused(call: Any, *given: Any, **named: Any) -> tuple[int, str]:
    """The status of a refusal, and its text as OpenAI's client reads it from the error's form."""
    with pytest.raises(openai.APIStatusError) as error:
        call(*given, **named)
    assert isinstance(error.value.body, dict)
    return error.value.status_code, str(error.value.body["message"])


@pytest.mark.slow
@for_each("name", ["x-api-key", "X-API-Key", "api-key", "authorization"])
def test_a_key_is_taken_from_where_each_maker_sends_it(app: FakeVllm, url: str, name: str) -> None:
    def asked(path: str, key: str) -> int:
        value = f"Bearer {key}".strip() if name == "authorization" else key
        return httpx2.post(f"{url}{path}", json={**ASK, "model": "agent"}, headers={name: value}).status_code

    assert [asked("/v1/chat/completions", key) for key in ("agents", "admin", "wrong", "", "internal")] == [
        200, 200, 401, 401, 401,
    ]  # fmt: skip
    assert asked("/flywheel/alias", "agents") == 403
    assert asked("/flywheel/alias", "admin") == 405


def test_calls_are_told_apart_by_the_key_wherever_it_is_sent(app: FakeVllm, tmp_path: Any) -> None:
    path = tmp_path / "calls.db"
    with_log = with_middleware(app, call_log={"path": str(path), "keep_days": 1, "max_bytes": 1000000})
    headers = [{"x-api-key": "a"}, {"x-api-key": "a"}, {"api-key": "b"}, {"authorization": "Bearer c"}, {}]
    with running(with_log) as url:
        for each in headers:
            answer = httpx2.post(f"{url}/v1/chat/completions", json={**ASK, "model": "agent"}, headers=each)
            assert answer.status_code == 200
    with_log._recorder.close()
    with CallLog(path) as log:
        first, again, azure, bearer, none = [call.credential for call in stored(log)]
    assert first == again
    assert len({first, azure, bearer, none}) == 4
    assert none == ""


def test_models_are_listed_and_retrieved(url: str) -> None:
    with client(url) as agents:
        assert [model.id for model in agents.models.list()] == [BASE, "agent", "other"]
        found = agents.models.retrieve("agent")
        assert (found.id, found.object, found.owned_by) == ("agent", "model", "flywheel")
        assert agents.models.retrieve(BASE).id == BASE
        for unknown in (VERSION, "gpt-5", "a/b"):
            status, text = refused(agents.models.retrieve, unknown)
            assert status == 404
            assert f"`{unknown}` does not exist" in text
            assert "agent, other" in text
    with client(url, "admin") as admin:
        assert [model.id for model in admin.models.list()] == [BASE, VERSION, "other@r0001", "agent", "other"]
        assert admin.models.retrieve(VERSION).id == VERSION


def test_a_model_on_the_hub_is_retrieved_by_its_name() -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        assert scope["path"] == "/v1/models"
        await FakeVllm.models(FakeVllm(), send)

    with running(with_middleware(app, FLYWHEEL_ALIAS="team/agent")) as url, client(url) as any_client:
        assert any_client.models.retrieve("team/agent").id == "team/agent"


def test_the_agents_key_asks_for_no_version_by_name(app: FakeVllm, url: str) -> None:
    with client(url) as agents, client(url, "admin") as admin:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/invocations"):
            given = {"authorization": "Bearer agents", "x-amzn-sagemaker-adapter-identifier": VERSION}
            for body in (
                f'{{"model": "{VERSION}"}}',
                '{"mod\\u0065l": "agent\\u0040r0001"}',
                f'{{"model": "{VERSION}", "model": "agent"}}',
            ):
                kind = {"content-type": "application/json"}
                answer = httpx2.post(f"{url}{path}", content=body, headers={**given, **kind})
                assert answer.status_code == 404
                assert f"`{VERSION}` does not exist. This server answers as agent, other." in answer.text
        assert app.calls == []
        assert agents.chat.completions.create(model="agent", **ASK).model == BASE
        assert agents.chat.completions.create(model=BASE, **ASK).model == BASE
        assert admin.chat.completions.create(model=VERSION, **ASK).model == VERSION
        # What a client may not ask for and what is not there look the same.
        missing = refused(agents.chat.completions.create, model="agent@r0009", **ASK)
        hidden = refused(agents.chat.completions.create, model=VERSION, **ASK)
        assert missing == (hidden[0], hidden[1].replace("r0001", "r0009"))


def test_no_header_replaces_the_model_of_an_agents_request(app: FakeVllm, url: str) -> None:
    app.echoes.add("/invocations")
    headers = {"x-amzn-sagemaker-adapter-identifier": VERSION}
    for key, kept in (("agents", False), ("admin", True)):
        httpx2.post(f"{url}/invocations", json={"model": "agent"}, headers={**headers, "x-api-key": key})
        assert ("x-amzn-sagemaker-adapter-identifier" in app.headers[-1]) is kept


def test_versions_are_exposed_by_setting(app: FakeVllm) -> None:
    with (
        running(with_middleware(app, **KEYS, expose_versions=True)) as url,
        client(url) as agents,
    ):
        assert VERSION in [model.id for model in agents.models.list()]
        assert agents.models.retrieve(VERSION).id == VERSION
        assert agents.chat.completions.create(model=VERSION, **ASK).model == VERSION


@for_each("key", ["agents", "admin"])
def test_an_unknown_model_is_told_of_the_aliases(app: FakeVllm, url: str, key: str) -> None:
    with client(url, key) as asking:
        status, text = refused(asking.chat.completions.create, model="gpt-5", **ASK)
    assert status == 404
    assert text == "The model `gpt-5` does not exist. This server answers as agent, other."


@for_each("key", ["agents", "admin"])
def test_what_the_server_does_not_have_is_not_found_in_openais_form(url: str, key: str) -> None:
    """For vLLM without an embedding model, and for what it has not at all."""
    with client(url, key) as asking:
        for call, given in (
            (asking.files.list, {}),
            (asking.files.retrieve, {"file_id": "file-1"}),
            (asking.moderations.create, {"input": "7"}),
            (asking.embeddings.create, {"model": "agent", "input": "7"}),
            (asking.images.generate, {"prompt": "7"}),
            (asking.batches.list, {}),
        ):
            assert refused(call, **given) == (404, "this server has no such path")
