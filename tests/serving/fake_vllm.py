"""A stand-in for vLLM at the HTTP seam: the calls that Flywheel makes, answered as vLLM 0.32 answers them.

It can be told to fail. The alias middleware in front of it is the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import uvicorn

from flywheel.records.round import Probe, Recording
from flywheel.serving.environment_variables import SETTINGS_VARIABLE
from flywheel.serving.server.middleware import AliasMiddleware

BASE = "tiny"
PROMPT_TOKENS = 3
"""How long the prompts are whose continuation is measured."""
TOKENS = 64
RECORDED = Recording(
    adapter=[-0.5 - 0.001 * place for place in range(TOKENS)],
    base=[-1.0 - 0.02 * place for place in range(TOKENS)],
)
PROBE = Probe(
    texts=[list(range(PROMPT_TOKENS + TOKENS))],
    places=[(0, PROMPT_TOKENS + place) for place in range(TOKENS)],
    first=RECORDED,
    second=RECORDED,
)
"""What a round recorded for its adapter."""


class FakeVllm:
    """`logprobs` says what each model answers, `weights` what one loaded from a directory does; `faults` maps a path
    to the status and message that it answers with."""

    def __init__(self, logprobs: dict[str, list[float]] | None = None) -> None:
        self.loaded: dict[str, str] = {}
        self.logprobs = logprobs or {}
        self.weights: dict[str, list[float]] = {}
        self.faults: dict[str, tuple[int, str]] = {}
        self.calls: list[str] = []
        self.lora = True
        self.answer_seconds = 0.0
        self.says = "It is \\boxed{7}."
        self.slow_paths: set[str] = set()
        self.echoes = {"/v1/embeddings"}
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.disconnected = threading.Event()
        self.proceed = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.calls.append(f"{scope['method']} {path}")
        routes: dict[str, Callable[[], Awaitable[None]]] = {
            "/health": lambda: answer(send, 200, None),
            "/v1/models": lambda: self.models(send),
            "/v1/completions": lambda: self.complete(json.loads(body), send),
            "/v1/chat/completions": lambda: self.chat(json.loads(body), send),
            "/v1/responses": lambda: self.stream(json.loads(body), receive, send),
            **{place: lambda: self.echo(body, headers, send) for place in self.echoes},
        }
        if self.lora:
            routes["/v1/load_lora_adapter"] = lambda: self.load(json.loads(body), send)
            routes["/v1/unload_lora_adapter"] = lambda: self.unload(json.loads(body), send)
        if path in self.slow_paths:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if fault := self.faults.get(path):
            await answer(send, fault[0], {"error": {"message": fault[1]}})
        elif path in routes:
            await routes[path]()
        else:
            await answer(send, 404, {"detail": "Not Found"})

    async def models(self, send: Any) -> None:
        cards = [{"id": BASE, "owned_by": "vllm", "root": "/models/tiny", "parent": None}]
        cards += [{"id": n, "owned_by": "vllm", "root": p, "parent": BASE} for n, p in self.loaded.items()]
        await answer(send, 200, {"object": "list", "data": cards})

    async def unload(self, wanted: dict[str, Any], send: Any) -> None:
        name = wanted["lora_name"]
        if self.loaded.pop(name, None):
            await answer(send, 200, None)
        else:
            await answer(send, 404, {"error": {"message": f"The lora adapter '{name}' cannot be found."}})

    async def echo(self, body: bytes, headers: dict[str, str], send: Any) -> None:
        self.bodies.append(body)
        self.headers.append(headers)
        length = int(headers.get("content-length", "-1"))
        await answer(send, 200, {"length": len(body), "content_length": length, "headers": headers})

    async def load(self, wanted: dict[str, Any], send: Any) -> None:
        name, path = wanted["lora_name"], wanted["lora_path"]
        assert not wanted.get("load_inplace")
        if name in self.loaded:
            text = f"The lora adapter '{name}' has already been loaded."
            await answer(send, 400, {"error": {"message": text, "code": 400}})
        elif not Path(path).is_dir():
            text = f"Loading lora {name} failed: No adapter found for {path}"
            await answer(send, 404, {"error": {"message": text, "code": 404}})
        else:
            self.loaded[name] = path
            await answer(send, 200, None)

    async def complete(self, wanted: dict[str, Any], send: Any) -> None:
        model, ids = wanted["model"], wanted["prompt"]
        values = self.weights.get(self.loaded.get(model, ""), self.logprobs.get(model))
        if values is None or (model != BASE and model not in self.loaded):
            await answer(send, 404, {"error": {"message": f"The model `{model}` does not exist."}})
            return
        assert len(wanted["allowed_token_ids"]) == wanted["max_tokens"] == 1
        logprobs = {"token_logprobs": [values[len(ids) - PROMPT_TOKENS]]}
        await answer(send, 200, {"model": model, "choices": [{"text": "", "logprobs": logprobs}]})

    async def chat(self, wanted: dict[str, Any], send: Any) -> None:
        model = wanted["model"]
        if model != BASE and model not in self.loaded:
            await answer(send, 404, {"error": {"message": f"The model `{model}` does not exist."}})
            return
        await asyncio.sleep(self.answer_seconds)
        message = {"role": "assistant", "content": self.says}
        completion = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "model": model,
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 5},
        }
        await answer(send, 200, completion)

    async def stream(self, wanted: dict[str, Any], receive: Any, send: Any) -> None:
        """One event, then, when the test has seen it, another; unless the client leaves first."""
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        )
        await send({"type": "http.response.body", "body": wanted["model"].encode() + b"\n", "more_body": True})
        left = asyncio.create_task(receive())
        while not self.proceed.is_set() and not left.done():
            await asyncio.sleep(0.01)
        if left.done():
            assert left.result()["type"] == "http.disconnect"
            self.disconnected.set()
            return
        left.cancel()
        await send({"type": "http.response.body", "body": wanted["model"].encode() + b"\n"})


async def answer(send: Any, status: int, content: Any) -> None:
    body = b"" if content is None else json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def running(app: Any, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The app behind a real HTTP server, on a port that the system chooses unless one is given; its URL."""
    listener = socket.create_server((host, port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def server_environment(**given: Any) -> dict[str, str]:
    """The environment of a server: variables by their names, and fields of its settings by theirs."""
    environment = {name: value for name, value in given.items() if name.isupper()}
    settings = {name: value for name, value in given.items() if not name.isupper()}
    return environment | ({SETTINGS_VARIABLE: json.dumps(settings)} if settings else {})


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that an environment gives to a server."""
    settings: dict[str, Any] = json.loads(environment[SETTINGS_VARIABLE])
    return settings


def with_middleware(app: Any, **given: Any) -> Any:
    """The app behind the alias middleware, which reads its settings from the environment once, when it is made: those
    of `server_environment`."""
    names = {"FLYWHEEL_ALIAS": "agent", "FLYWHEEL_BASE_MODEL": BASE}
    with mock.patch.dict(os.environ, names | server_environment(**given)):
        return AliasMiddleware(app)


@contextlib.contextmanager
def replica(app: FakeVllm, wrap: Callable[[Any], Any] = with_middleware) -> Iterator[str]:
    with running(wrap(app)) as url:
        yield url
