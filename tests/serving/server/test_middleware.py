"""The alias middleware behind a real HTTP server: what it rewrites, what it leaves, and that no request is lost."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from flywheel.records.request_id import BASE_VERSION, mark_of
from flywheel.system.server_limits import Message, Receive, Send
from tests.serving.fake_vllm import BASE, FakeVllm, answer, running, with_middleware
from tests.waiting import SOON, until


def point(url: str, target: str, **more: str) -> httpx2.Response:
    return httpx2.put(f"{url}/flywheel/alias", json={"alias": "agent", "target": target, **more})


def test_an_alias_without_a_target_is_the_base_model(url: str) -> None:
    answer = httpx2.post(f"{url}/v1/chat/completions", json={"model": "agent", "messages": []})
    assert answer.json()["model"] == BASE
    shown = httpx2.get(f"{url}/flywheel/alias").json()
    assert shown.pop("instance") and list(shown.pop("revisions")) == ["agent"]
    expected = {"aliases": {"agent": BASE}, "paths": {}, "digests": {}, "waiting": {}, "base_model": BASE}
    assert shown == {**expected, "ab_tests": {}, "missing": {}, "max_adapters": None}


@pytest.mark.parametrize("path", ["/tokenize", "/v2/rerank", "/inference/v1/generate"])
def test_every_request_that_names_a_model_may_name_the_alias(app: FakeVllm, path: str) -> None:
    app.echoes.add(path)
    with running(with_middleware(app, VLLM_API_KEY="s3cret")) as url:
        answer = httpx2.post(f"{url}{path}", json={"model": "agent"}, headers={"authorization": "Bearer s3cret"})
        assert answer.status_code == 200
        assert json.loads(app.bodies[-1]) == {"model": BASE}


@pytest.mark.parametrize("path", ["/v1/other", "/plugin", "/pause", "/v1/embeddings/"])
def test_other_paths_are_not_touched(app: FakeVllm, url: str, path: str) -> None:
    app.echoes.add(path)
    body = b'{"model": "agent"}'
    httpx2.post(f"{url}{path}", content=body, headers={"content-type": "application/json", "x-request-id": "mine"})
    assert app.bodies == [body]
    assert app.headers[-1]["x-request-id"] == "mine"


async def test_other_paths_are_not_held_back() -> None:
    """The server has the first part of a body before the client has sent the second."""
    seen = asyncio.Event()

    async def app(scope: object, receive: Receive, send: Send) -> None:
        first = await receive()
        assert first["body"] == b"first"
        seen.set()
        assert (await receive())["body"] == b"second"
        await answer(send, 200, None)

    first = {"type": "http.request", "body": b"first", "more_body": True}
    parts = [first, {"type": "http.request", "body": b"second"}]

    async def receive() -> Message:
        if len(parts) == 1:
            await asyncio.wait_for(seen.wait(), 60)
        return parts.pop(0)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "headers": headers}
    await with_middleware(app)(scope, receive, send)
    assert sent[0]["status"] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/transcriptions", "/flywheel/alias", "/v1/other"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_refused(app: FakeVllm, path: str, declared: bool) -> None:
    app.echoes.add(path)
    body = b'{"model": "agent", "a": "' + b"x" * 100_000 + b'"}'
    content = body if declared else (body[at : at + 10_000] for at in range(0, len(body), 10_000))
    method = "PUT" if path == "/flywheel/alias" else "POST"
    with running(with_middleware(app, max_body_bytes=60000)) as url:
        headers = {"content-type": "application/json"}
        refused = httpx2.request(method, f"{url}{path}", content=content, headers=headers)
        assert refused.status_code == 413
        assert "bytes" in refused.json()["error"]["message"]
        assert app.bodies == []
        assert httpx2.post(f"{url}{path}", content=b"{}", headers=headers).status_code in (200, 405)


def test_a_deeply_nested_body_is_a_wrong_request(url: str) -> None:
    body = b'{"model": "agent", "messages": ' + b"[" * 100_000
    headers = {"content-type": "application/json"}
    refused = httpx2.post(f"{url}/v1/chat/completions", content=body, headers=headers)
    assert refused.status_code == 400
    assert "nested" in refused.json()["error"]["message"]


def test_a_body_with_many_models_is_a_wrong_request(app: FakeVllm, url: str) -> None:
    body = b"{" + b",".join([b'"model":"agent"'] * 200_000) + b"}"
    headers = {"content-type": "application/json"}
    refused = httpx2.post(f"{url}/v1/chat/completions", content=body, headers=headers)
    assert refused.status_code == 400
    assert "more than 1,000 keys" in refused.json()["error"]["message"]
    assert app.calls == []


@pytest.mark.slow
def test_the_request_id_says_which_version_answers(app: FakeVllm, url: str) -> None:
    app.loaded["agent@r0001"] = "/adapters/r0001"
    instance = httpx2.get(f"{url}/flywheel/alias").json()["instance"]

    def sent(model: str, **headers: str) -> str | None:
        httpx2.post(f"{url}/v1/embeddings", json={"model": model}, headers=headers)
        return app.headers[-1].get("x-request-id")

    versions = []
    for target in (BASE, "agent@r0001"):
        point(url, target)
        # What the client says of it is replaced.
        for headers in ({}, {"X-Request-Id": "mine"}, {"x-request-id": str(sent("agent"))}):
            mark = mark_of(sent("agent", **headers) or "")
            assert mark is not None
            assert mark.instance == instance
            versions.append(mark.version)
    assert versions == [BASE_VERSION] * 3 + ["agent@r0001"] * 3
    assert len({sent("agent") for _ in range(10)}) == 10
    assert sent("agent@r0001", **{"X-Request-Id": "mine"}) == "mine"
    assert sent("agent@r0001") is None
    # No client says of another request that the alias answered it.
    assert sent("agent@r0001", **{"X-Request-Id": str(sent("agent"))}) is None


def test_other_models_are_not_touched(url: str) -> None:
    assert httpx2.post(f"{url}/v1/chat/completions", json={"model": "agent2"}).status_code == 404
    assert httpx2.post(f"{url}/v1/chat/completions", json={"model": BASE}).json()["model"] == BASE


def test_a_big_chunked_body_arrives_whole(app: FakeVllm, url: str) -> None:
    text = "ü" * 2_000_000
    body = json.dumps({"messages": text, "model": "agent"}, ensure_ascii=False).encode()
    pieces = (body[i : i + 65_537] for i in range(0, len(body), 65_537))
    headers = {"content-type": "application/json; charset=utf-8"}
    answer = httpx2.post(f"{url}/v1/embeddings", content=pieces, headers=headers)
    assert answer.status_code == 200
    assert json.loads(app.bodies[0]) == {"messages": text, "model": BASE}
    seen = answer.json()
    assert seen["content_length"] == seen["length"] == len(app.bodies[0])
    assert "transfer-encoding" not in seen["headers"]


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", ""])
def test_other_content_is_not_touched(app: FakeVllm, url: str, kind: str) -> None:
    body = b'{"model": "agent"}'
    httpx2.post(f"{url}/v1/embeddings", content=body, headers={"content-type": kind} if kind else {})
    assert app.bodies == [body]


def test_a_streamed_answer_is_passed_on_as_it_comes(app: FakeVllm, url: str) -> None:
    with httpx2.stream("POST", f"{url}/v1/responses", json={"model": "agent"}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == BASE
        # The version changes while the answer is under way; the request keeps its own.
        assert point(url, "agent@r0001").status_code == 200
        app.proceed.set()
        assert list(lines) == [BASE]


def test_the_server_learns_that_a_client_left(app: FakeVllm, url: str) -> None:
    with httpx2.stream("POST", f"{url}/v1/responses", json={"model": "agent"}) as answer:
        assert next(answer.iter_lines()) == BASE
    assert app.disconnected.wait(SOON)


def test_a_client_that_leaves_within_its_request_costs_nothing(app: FakeVllm, url: str) -> None:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    connection.putrequest("POST", "/v1/embeddings")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"model": ')
    connection.close()
    assert httpx2.post(f"{url}/v1/chat/completions", json={"model": "agent"}).json()["model"] == BASE
    assert app.bodies == []


@pytest.mark.parametrize("path", ["/v1/embeddings", "/flywheel/alias", "/v1/load_lora_adapter"])
async def test_a_client_that_leaves_is_no_error_of_the_server(path: str) -> None:
    async def app(scope: object, receive: Receive, send: Send) -> None:
        await receive()
        raise ValueError("of the app")

    async def asked(*messages: Message) -> list[Message]:
        left, sent = [*messages], list[Message]()

        async def receive() -> Message:
            return left.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        method = "PUT" if path == "/flywheel/alias" else "POST"
        await with_middleware(app)(
            {"type": "http", "method": method, "path": path, "headers": headers}, receive, send
        )
        return sent

    part = {"type": "http.request", "body": b"{", "more_body": True}
    assert await asked(part, {"type": "http.disconnect"}) == []
    if path == "/v1/embeddings":
        with pytest.raises(ValueError, match="of the app"):
            await asked(part, {"type": "http.request", "body": b"}"})


def test_the_list_of_models_names_the_alias(app: FakeVllm, url: str) -> None:
    app.loaded["agent@r0001"] = "/adapters/r0001"
    point(url, "agent@r0001")
    cards = httpx2.get(f"{url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [BASE, "agent@r0001", "agent"]
    assert cards[-1]["root"] == "agent@r0001"


def test_compare_and_set(url: str) -> None:
    assert point(url, "agent@r0001", expected=BASE).json()["previous"] == BASE
    refused = point(url, "agent@r0002", expected=BASE)
    assert refused.status_code == 409
    assert "agent is agent@r0001" in refused.text
    assert point(url, "agent@r0002", expected="agent@r0001").status_code == 200
    assert httpx2.get(f"{url}/flywheel/alias").json()["aliases"] == {"agent": "agent@r0002"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 50_000,
        b"\xff",
        b'{"alias": "agent"}',
        b'{"alias": "agent", "target": 7}',
        b'{"alias": "", "target": "x"}',
        b'{"alias": "agent", "target": "agent"}',
        b'{"alias": "tiny", "target": "agent@r0001"}',
        b'{"alias": "agent", "target": "x", "expected": 1}',
        b'{"alias": "agent", "target": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_a_wrong_admin_request_changes_nothing(url: str, body: bytes) -> None:
    refused = httpx2.put(f"{url}/flywheel/alias", content=body)
    assert refused.status_code == (413 if len(body) > 65_536 else 400)
    assert "error" in refused.json()
    assert httpx2.get(f"{url}/flywheel/alias").json()["aliases"] == {"agent": BASE}
    assert httpx2.delete(f"{url}/flywheel/alias").status_code == 405


def test_a_restart_answers_with_the_same_version(tmp_path: Path) -> None:
    file = tmp_path / "aliases.json"
    settings = {"FLYWHEEL_ALIAS_FILE": str(file)}
    with running(with_middleware(FakeVllm(), **settings)) as url:
        point(url, "agent@r0003", path="/adapters/r0003", sha256="a hash")
    saved = {"target": "agent@r0003", "path": "/adapters/r0003", "sha256": "a hash"}
    assert json.loads(file.read_text()) == {"agent": saved}
    with running(with_middleware(FakeVllm(), loaded=["agent@r0003"], **settings)) as url:
        shown = httpx2.get(f"{url}/flywheel/alias").json()
        assert shown["aliases"] == {"agent": "agent@r0003"}
        assert shown["paths"] == {"agent@r0003": "/adapters/r0003"}
    with running(with_middleware(FakeVllm(), **settings)) as url:
        shown = httpx2.get(f"{url}/flywheel/alias").json()
        assert shown["aliases"] == {"agent": "agent@r0003"}
        assert shown["waiting"] == {"agent": "agent@r0003 is not loaded"}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"agent": 1}', b'{"agent": {}}', b"\xff"])
def test_a_damaged_alias_file_is_survived(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "aliases.json"
    file.write_bytes(content)
    with running(with_middleware(FakeVllm(), FLYWHEEL_ALIAS_FILE=str(file))) as url:
        assert httpx2.get(f"{url}/flywheel/alias").json()["aliases"] == {"agent": BASE}
        refused = httpx2.post(f"{url}/v1/chat/completions", json={"model": "agent", "messages": []})
        assert refused.status_code == 503
        assert f"the saved aliases in {file} cannot be read" in refused.json()["error"]["message"]
        assert point(url, "agent@r0001").status_code == 200
    assert json.loads(file.read_text())["agent"]["target"] == "agent@r0001"


def test_a_change_that_cannot_be_kept_does_not_happen(tmp_path: Path) -> None:
    with running(with_middleware(FakeVllm(), FLYWHEEL_ALIAS_FILE=str(tmp_path / "gone" / "a.json"))) as url:
        assert point(url, "agent@r0001").status_code == 500
        assert httpx2.get(f"{url}/flywheel/alias").json()["aliases"] == {"agent": BASE}


@pytest.mark.slow
async def test_flips_under_load_lose_and_mix_nothing(app: FakeVllm, url: str) -> None:
    """Each request is answered by a version that was current at some moment between its start and its end."""
    versions = [BASE, *(f"agent@r{i:04}" for i in range(1, 31))]
    app.loaded = dict.fromkeys(versions[1:], "/adapters")
    app.answer_seconds = 0.01
    begun, ended = 0, 0  # flips
    stop = asyncio.Event()
    answered = 0
    wrong: list[str] = []

    async def ask(client: httpx2.AsyncClient) -> None:
        nonlocal answered
        while not stop.is_set():
            oldest = ended
            answer = await client.post("/v1/chat/completions", json={"messages": [], "model": "agent"})
            version = versions.index(answer.json().get("model", "")) if answer.status_code == 200 else -1
            if not oldest <= version <= begun:
                wrong.append(f"{answer.status_code} {answer.text}: not in {oldest}..{begun}")
            answered += 1

    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(16)]
        for old, new in itertools.pairwise(versions):
            before = answered
            await until(lambda: answered > before, "an answer between two flips")  # noqa: B023
            begun += 1
            change = {"alias": "agent", "target": new, "expected": old}
            assert (await client.put("/flywheel/alias", json=change)).status_code == 200
            ended += 1
        stop.set()
        await asyncio.gather(*asking)
    assert wrong == []
    assert answered >= 30


def test_each_alias_of_a_server_has_a_target_of_its_own(app: FakeVllm) -> None:
    app.loaded |= {"agent@r0001": "/adapters/r0001", "other@r0002": "/adapters/r0002"}

    def answered_by(url: str) -> list[str]:
        return [
            httpx2.post(f"{url}/v1/chat/completions", json={"model": alias, "messages": []}).json()["model"]
            for alias in ("agent", "other")
        ]

    with running(with_middleware(app, FLYWHEEL_ALIAS="agent\nother")) as url:
        listed = {card["id"] for card in httpx2.get(f"{url}/v1/models").json()["data"]}
        assert {"agent", "other"} <= listed
        assert answered_by(url) == [BASE, BASE]
        assert (
            httpx2.put(f"{url}/flywheel/alias", json={"alias": "other", "target": "other@r0002"}).status_code == 200
        )
        assert answered_by(url) == [BASE, "other@r0002"]
        point(url, "agent@r0001")
        assert answered_by(url) == ["agent@r0001", "other@r0002"]
