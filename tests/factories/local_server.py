"""HTTP servers in this process: a base for the model endpoints of tests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and sends JSON. Subclasses answer to `get` and `post`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def get(self) -> None:
        self.send(404, {})

    def post(self, request: Any) -> None:
        self.send(404, {})

    def send_head(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(length))
        self.end_headers()

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        """Send bytes as they are, anything else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_head(status, len(body), headers)
        self.wfile.write(body)


class LocalServer:
    """A context manager that serves on a free port of loopback; `base_url` is what configurations want."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no failure of the server."""
