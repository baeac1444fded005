"""The four servers on ports of their own in one event loop, and a client that sends any bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flywheel.config.file import Config, parse
from flywheel.daemon.metrics_server import MetricsServer
from flywheel.sources.otlp.receiver import Receiver
from flywheel.system.web_server import BackgroundServer, bound_socket
from flywheel.web import guard
from flywheel.web.server import application
from tests.serving.fake_vllm import FakeVllm, with_middleware

WAIT_SECONDS: Final = 60.0
TOKEN: Final = "a-token-of-some-length"
"""Of the pages."""
NAME: Final = "wheel.example"
"""A name of the pages and of the inference server, besides localhost."""


@dataclass(frozen=True)
class Target:
    """A running server, and a request that it answers with 200."""

    kind: str
    port: int
    start: str
    """The first line without the version."""
    fields: str = ""
    """Headers besides Host, each with its line end."""
    clients: list[asyncio.StreamWriter] = field(default_factory=list)
    """Connections, which are closed at the end."""

    async def connected(self, content: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(writer)
        writer.write(content)
        return reader

    async def leave(self) -> None:
        for client in self.clients:
            client.close()
            with contextlib.suppress(OSError):
                await client.wait_closed()
        self.clients.clear()

    def request(self, *hosts: str, more: str = "", start: str = "", version: str = "1.1") -> bytes:
        named = "".join(f"Host: {host}\r\n" for host in hosts)
        head = f"{start or self.start} HTTP/{version}\r\n{named}{self.fields}{more}Connection: close\r\n\r\n"
        return head.encode("latin-1")


POST: Final = "Content-Type: application/x-protobuf\r\nContent-Length: 0\r\n"
OWN: Final = ("pages", "metrics", "otlp")
KINDS: Final = (*OWN, "serve")


def settings(folder: Path, **more: Any) -> Config:
    raw = {
        "sources": [],
        "state": {"dir": "state"},
        "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "j"},
        "daemon": {"metrics": "127.0.0.1:0"},
        **more,
    }
    return parse(raw, "test", folder)


@asynccontextmanager
async def running(kind: str, folder: Path, app: Any = None, **environment: str) -> AsyncIterator[Target]:
    """One of the servers. `app` is behind the inference server's middleware instead of a vLLM without adapters."""
    server: Any
    if kind == "metrics":
        server = MetricsServer(settings(folder).daemon, _no_state, str, str)
        await server.listen()
        assert server.address is not None
        target = Target(kind, server.address[1], "GET /healthz")
    elif kind == "otlp":
        server = Receiver("127.0.0.1:0", folder / "inbox.sqlite")
        await server.start()
        target = Target(kind, int(server.url.split(":")[2].split("/")[0]), "POST /v1/traces", POST)
    else:
        bound = bound_socket("serve attackers", "127.0.0.1", 0, "the port")
        port = bound.getsockname()[1]
        if kind == "pages":
            pages = application(
                settings(folder), names=frozenset({"localhost", NAME}), token="a-token-of-some-length"
            )
            server = BackgroundServer(pages, bound, kind, guard.LIMITS)
            target = Target(kind, port, "GET /static/page.css")
        else:
            wrapped = with_middleware(app or FakeVllm(), allowed_hosts=["localhost", NAME], **environment)
            server = BackgroundServer(wrapped, bound, kind)  # without limits of ours, as in vLLM
            target = Target(kind, port, "GET /health")
    try:
        yield target
    finally:
        await target.leave()
        await server.stop()


async def _no_state() -> dict[str, Any]:
    raise AssertionError("no state is read here")


async def sent(target: Target, content: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    reader = await target.connected(content)
    async with asyncio.timeout(WAIT_SECONDS):
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while more := await reader.read(65_536):
                answer += more
        return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0
