"""An embedding endpoint in this process: texts with the same words get the same vector, whatever their order."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

SIZE = 64


def by_words(text: str) -> list[float]:
    """One direction for each word."""
    vector = [0.0] * SIZE
    for word in re.findall(r"\w+", text.lower()):
        vector[int(hashlib.sha256(word.encode()).hexdigest(), 16) % SIZE] += 1.0
    return vector if any(vector) else [1.0] * SIZE


class EmbeddingServer:
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
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def texts(self) -> list[str]:
        return [text for request in self.requests for text in request]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(server: EmbeddingServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
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
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status != 200 and server.retry_after is not None:
                self.send_header("Retry-After", server.retry_after)
            self.end_headers()
            while server.drips and not server.ended.wait(0.05):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    return
            self.wfile.write(body)

    return Handler
