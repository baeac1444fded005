"""A server that has nothing but a call log, for tests of pulling."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

from flywheel.serving.calls.call_log import CallLog
from flywheel.serving.calls.call_log_page import page_json


class LogServer:
    """Serves the log at `path` as `flywheel serve` does, with pages of `page_calls`. It can go away and come back at
    the same address."""

    def __init__(self, path: Path, *, page_calls: int = 100) -> None:
        self.log = CallLog(path)
        self.page_calls = page_calls
        self.is_off = False
        self.requests = 0
        self._port = 0
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.log.close()

    def start(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urlsplit(self.path)
                server.requests += 1
                if server.is_off or asked.path != "/flywheel/calls":
                    status, body = 404, b'{"error": "there is no call log"}'
                else:
                    given = {name: int(values[0]) for name, values in parse_qs(asked.query).items()}
                    limit = min(given["limit"], server.page_calls)
                    status, body = 200, page_json(server.log, given["after"], limit, 4_000_000)
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.requests += 1
                if server.is_off or self.path != "/flywheel/calls/erase":
                    status, answer = 404, {"error": "serving.call_log is false"}
                else:
                    erased = server.log.erase(body["request_ids"])
                    status, answer = 200, {"erased": erased, "purged": server.log.purge(0)}
                self.send_response(status)
                self.send_header("content-length", str(len(json.dumps(answer))))
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *args: object) -> None:
                pass

        ThreadingHTTPServer.allow_reuse_address = True
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
