"""An OpenAI-compatible endpoint in this process whose model answers as a function says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.factories.local_server import JsonHandler, LocalServer

Reply = Callable[[dict[str, Any], int], tuple[int, Any]]
"""Status and body for a request, given the number of requests before it."""


def says(text: str, **message: Any) -> tuple[int, dict[str, Any]]:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}


def calls(name: str, arguments: str = "{}") -> tuple[int, dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return says("", tool_calls=[call])


class Endpoint(LocalServer):
    """A model whose answers a function gives."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        lock = threading.Lock()
        endpoint = self

        class Handler(JsonHandler):
            def post(self, request: dict[str, Any]) -> None:
                with lock:
                    before = len(endpoint.requests)
                    endpoint.requests.append(request)
                    endpoint.keys.append(self.headers.get("authorization", ""))
                status, body = endpoint.reply(request, before)
                self.send(status, body, {"retry-after": "0.01"} if status >= 429 else None)

        super().__init__(Handler)
