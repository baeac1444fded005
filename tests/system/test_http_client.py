"""The HTTP client for models: deadline, size limit, proxies, redirects and connections that stay open."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from openai.types.chat import ChatCompletion

from flywheel.config.judge import JudgeSettings
from flywheel.errors import JudgeError
from flywheel.judge.chat_completions import mended, reply_of
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.verdict import Exchange
from flywheel.secrets import redact_secrets
from flywheel.system import http_client
from flywheel.system.http_client import (
    MAX_ANSWER_BYTES,
    CallError,
    async_client,
    authorization,
    call_errors,
    model_client,
    post_chat,
)
from tests.factories.local_server import JsonHandler, LocalServer

Play = Callable[[JsonHandler], None]


class Served(LocalServer):
    """Lets `play` answer, and knows what was asked, and over how many connections."""

    def __init__(self, play: Play) -> None:
        self.paths: list[str] = []
        self.connections: set[object] = set()
        served = self

        class Handler(JsonHandler):
            def post(self, request: object) -> None:
                served.paths.append(self.path)
                served.connections.add(self.client_address)
                play(self)

        super().__init__(Handler)
        self.url = self.base_url.removesuffix("/v1")


def answers(body: bytes, status: int = 200, **headers: str) -> Play:
    return lambda handler: handler.send(status, body, headers)


def drips(handler: JsonHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class Client:
    """The client of models for the API at a URL."""

    def __init__(self, url: str, timeout: float = 30) -> None:
        self._client = model_client(url, seconds=timeout)
        self.close = self._client.close

    def post(self, path: str, body: bytes = b"{}") -> httpx2.Response:
        with call_errors():
            headers = authorization("key")
            return self._client.post(path, cast_to=httpx2.Response, content=body, options={"headers": headers})


def test_one_connection_serves_many_calls() -> None:
    with Served(answers(b"{}", Retry="7")) as served:
        http = Client(served.url)
        for _ in range(5):
            answer = http.post("/v1/chat?x=1")
        http.close()
    assert (answer.status_code, answer.content, answer.headers["retry"]) == (200, b"{}", "7")
    assert served.paths == ["/v1/chat?x=1"] * 5
    assert len(served.connections) == 1


def drips_headers(handler: JsonHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-pad: ")
    for _ in range(1000):
        handler.wfile.write(b"a")
        time.sleep(0.05)


def asks_to_continue(handler: JsonHandler) -> None:
    for _ in range(1000):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.05)


def is_silent(handler: JsonHandler) -> None:
    handler.rfile.read(1)


@pytest.mark.parametrize("play", [is_silent, drips, drips_headers, asks_to_continue])
@pytest.mark.parametrize("proxied", [False, True])
def test_a_slow_answer_ends_at_the_deadline(play: Play, proxied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(play) as served:
        if proxied:
            monkeypatch.setenv("http_proxy", served.url)
        url = "http://judge.example" if proxied else served.url
        http = Client(url, timeout=0.3)
        with pytest.raises(CallError, match=r"no complete response within 0\.3 s"):
            http.post("/v1")
        http.close()


@pytest.mark.slow
def test_a_slow_answer_leaves_its_connection_the_whole_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: now))

    def slow(handler: JsonHandler) -> None:
        nonlocal now
        now += 2
        answers(b"{}")(handler)

    with Served(slow) as served:
        http = Client(served.url, timeout=7)
        for _ in range(4):
            assert http.post("/v1").content == b"{}"
        http.close()
    assert len(served.connections) == 1


def test_an_answer_that_is_too_large_is_not_read() -> None:
    with Served(answers(b" " * (MAX_ANSWER_BYTES + 1))) as served:
        http = Client(served.url)
        with pytest.raises(CallError, match="4 MiB"):
            http.post("/v1")
        http.close()


def test_a_redirect_is_not_followed_with_the_key() -> None:
    with Served(answers(b"", 307, location="http://127.0.0.1:9/v1")) as served:
        settings = JudgeSettings(model="m", base_url=f"{served.url}/v1", max_attempts=1)
        grader = Grader(Rubric.model_validate({"id": "r", "custom_rubrics": "x"}), settings)
        with pytest.raises(JudgeError, match=r"307 \(redirect to http://127\.0\.0\.1:9/v1\).*judge\.base_url"):
            grader.grade(Exchange("q", "a"))
        grader.close()
    assert len(served.paths) == 1


def test_a_proxy_of_the_environment_is_used_except_where_it_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(answers(b"proxied")) as proxy, Served(answers(b"direct")) as served:
        monkeypatch.setenv("http_proxy", proxy.url)
        through = Client("http://judge.example")
        assert through.post("/v1/chat").content == b"proxied"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        past = Client(served.url)
        assert past.post("/v1/chat").content == b"direct"
        through.close()
        past.close()
    assert proxy.paths == ["http://judge.example/v1/chat"]


def test_a_proxy_that_cannot_be_used_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    settings = JudgeSettings(model="m", base_url="http://judge.example/v1", max_attempts=1)
    with pytest.raises(JudgeError, match="HTTPS_PROXY"):
        Grader(Rubric.model_validate({"id": "r", "custom_rubrics": "x"}), settings).grade(Exchange("q", "a"))


async def test_a_server_of_ours_is_asked_past_every_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(answers(b"{}")) as proxy, Served(answers(b"{}")) as served:
        monkeypatch.setenv("http_proxy", proxy.url)
        async with async_client(served.url, seconds=30, headers={"authorization": "Bearer admin"}) as ours:
            await ours.post("/v1/load_lora_adapter", json={})
        async with async_client(served.url, seconds=30, proxies=True) as theirs:
            await theirs.post("/hook", json={})
    assert served.paths == ["/v1/load_lora_adapter"]
    assert proxy.paths == [f"{served.url}/hook"]


@pytest.mark.parametrize("make", [model_client, partial(async_client, proxies=True)])
def test_a_proxy_that_is_no_http_proxy_is_named(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    monkeypatch.setenv("all_proxy", "socks5://user:hunter22@127.0.0.1:1")
    with pytest.raises(ValueError, match=r"the proxy socks5://.* is not an HTTP proxy: correct HTTPS_PROXY") as error:
        make("http://judge.example", seconds=1)
    assert "hunter22" not in str(error.value)


@pytest.mark.parametrize(
    "body", [b"[" * 10**6, b'"a"', b"null", b"[1]", b"<html>", b'{"choices": "abc"}', b'{"choices": 1}', b"\xff", b""]
)
def test_what_openai_makes_of_an_odd_body_is_a_broken_body(body: bytes) -> None:
    with Served(answers(body)) as served:
        client = model_client(served.url, seconds=30, mend=mended)
        with pytest.raises(CallError) as error, call_errors():
            reply = reply_of(post_chat(client, b"{}", "key", ChatCompletion))
            assert not reply.text and reply.problem
            raise CallError(reply.problem)
        client.close()
    assert error.value.retryable


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("mend", [mended, redact_secrets])
def test_a_key_that_is_sent_back_is_removed(status: int, mend: Callable[[bytes], bytes]) -> None:
    key = "sk-a-key-of-some-length"
    message = {"role": "assistant", "content": f"Your key is {key}"}
    body = json.dumps({"choices": [{"message": message}], "error": {"message": f"wrong: {key}"}}).encode()
    with Served(answers(body, status)) as served:
        client = model_client(served.url, seconds=30, mend=mend)
        with contextlib.suppress(CallError) if status == 200 else pytest.raises(CallError, match="secret") as error:
            assert "[secret]" in reply_of(post_chat(client, b"{}", key, ChatCompletion)).text
        client.close()
    assert key not in str(error)
