"""An embedding endpoint in this process: texts with the same words get the same vector, whatever their order."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tests.factories.local_server import JsonHandler, LocalServer

SIZE = 64


def by_words(text: str) -> list[float]:
    """One direction for each word."""
    vector = [0.0] * SIZE
    for word in re.findall(r"\w+", text.lower()):
        vector[int(hashlib.sha256(word.encode()).hexdigest(), 16) % SIZE] += 1.0
    return vector if any(vector) else [1.0] * SIZE


class EmbeddingServer(LocalServer):
    """A context manager. `status` other than 200 is what it answers; `refused` are texts that it does not take, each
    with the status that says so. It takes no more than `most` texts at once, and drips bytes while it `drips`."""

    def __init__(self, embed: Callable[[str], Any] = by_words) -> None:
        self.embed = embed
        self.status = 200
        self.said = "this input is too long"
        self.retry_after: str | None = None
        self.body: Any = None
        self.refused: dict[str, int] = {}
        self.most = 1 << 20
        self.drips = False
        self.ended = threading.Event()
        self.failures: list[int] = []
        self.requests: list[list[str]] = []
        self.keys: list[str] = []
        super().__init__(_handler(self))

    @property
    def texts(self) -> list[str]:
        return [text for request in self.requests for text in request]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.ended.set()
        super().__exit__(kind, error, at)


def _handler(server: EmbeddingServer) -> type[JsonHandler]:
    class Handler(JsonHandler):
        def post(self, request: dict[str, Any]) -> None:
            texts = request["input"]
            server.requests.append(texts)
            server.keys.append(self.headers["Authorization"])
            status = server.failures.pop(0) if server.failures else server.status
            if status == 200:
                status = next((server.refused[text] for text in texts if text in server.refused), status)
            if status == 200 and len(texts) > server.most:
                status = 400
            data = [{"index": n, "embedding": server.embed(text)} for n, text in enumerate(texts)]
            good = {"object": "list", "model": request["model"], "data": data, "usage": {}}
            bad = {"error": {"message": server.said}}
            body = json.dumps(server.body or (good if status == 200 else bad)).encode()
            waits = status != 200 and server.retry_after is not None
            self.send_head(status, len(body), {"retry-after": server.retry_after or ""} if waits else None)
            while server.drips and not server.ended.wait(0.05):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    return
            self.wfile.write(body)

    return Handler
