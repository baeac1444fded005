"""`Host` headers and request targets that name another server, or more than a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.requests import Request

from flywheel.system.server_limits import Receive, Scope, Send, respond
from tests.attacks.servers import KINDS, TOKEN, running, sent, status

GOOD = (
    "localhost",
    "LocalHost:4400",
    "localhost.:1",
    "127.0.0.1",
    "127.0.0.1:65535",
    "[::1]",
    "[::1]:80",
    "10.0.0.7:8",
)
BAD = (
    "evil.example",
    "evil.example:80",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "",
    " ",
    ":80",
    "localhost:",
    "localhost:0",
    "localhost:65536",
    "localhost:999999",
    "localhost:8o",
    "localhost:-1",
    "localhost:80:80",
    "localhost:80/static/",
    "127.0.0.1:80/static/",
    "127.0.0.1:80/static/x?",
    "127.0.0.1/static/",
    "localhost?x=",
    "localhost#",
    "user@localhost",
    "user:word@127.0.0.1",
    "localhost@evil.example",
    "localhost,evil.example",
    "localhost evil.example",
    "localhost\\evil",
    "[::1",
    "::1",
    "::1]",
    "[::1]evil",
    "[::1].evil.example",
    "[localhost]",
    "[127.0.0.1]:x",
    "[fe80::1%25lo]",
    "[::]",
    "0.0.0.0",
    "127.1",
    "0x7f.1",
    "2130706433",
    "localhost..",
    "localhost%00",
    "l\xf6calhost",
    "localhost\xa0",
    "http://localhost",
)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_answers_by_its_own_names_alone(tmp_path: Path, kind: str) -> None:
    async with running(kind, tmp_path) as target:
        for host in GOOD:
            assert status(await sent(target, target.request(host))) == 200, host
        for host in BAD:
            answer = await sent(target, target.request(host))
            assert status(answer) in (400, 421), (host, answer[:300])
        for hosts, version in (
            (("localhost", "evil.example"), "1.1"),
            (("evil.example", "localhost"), "1.1"),
            ((), "1.1"),
            ((), "1.0"),
            (("localhost", "localhost"), "1.1"),
        ):
            answer = await sent(target, target.request(*hosts, version=version))
            assert status(answer) in (400, 421), (hosts, version, answer[:300])


TARGETS = (
    "GET http://localhost/tasks",
    "GET http://localhost/static/",
    "GET http://evil.example/tasks",
    "GET //static/../tasks",
    "GET /static/../tasks",
    "GET /static/..%2ftasks",
    "GET /static/%2e%2e/tasks",
    "GET /./tasks",
    "GET //tasks",
    "GET /tasks;/static/",
    "GET /tasks?/static/",
    "GET /tasks#/static/",
    "GET tasks",
    "GET @localhost/static/",
    "GET *",
    "OPTIONS *",
    "CONNECT localhost:80",
    "GET \\static\\..\\tasks",
    "GET /%2fstatic/",
    "GET /static/%00",
    "HEAD /tasks",
    "get /tasks",
    "TRACE /tasks",
    "GET /sign-in/../tasks",
    "GET /tasks/static/",
    "GET /static/\xff",
)


async def test_no_request_target_shows_a_page_without_the_token(tmp_path: Path) -> None:
    async with running("pages", tmp_path) as target:
        for start in TARGETS:
            for more in ("", "Referer: http://localhost/static/\r\n", "X-Forwarded-Prefix: /static\r\n"):
                answer = await sent(target, target.request("localhost", start=start, more=more))
                assert status(answer) not in (200, 500, 503), (start, answer[:300])
        for host in (*GOOD, *BAD):
            answer = await sent(target, target.request(host, start="GET /tasks"))
            assert status(answer) in (400, 401, 421), (host, answer[:300])
        allowed = target.request("localhost", start="GET /sign-in", more=f"Authorization: Bearer {TOKEN}\r\n")
        assert status(await sent(target, allowed)) == 200


async def model(scope: Scope, receive: Receive, send: Send) -> None:
    """What is behind the inference server's middleware."""
    await Request(scope, receive).body()
    await respond(send, 200, b"{}", "application/json")


@pytest.mark.parametrize("kind", KINDS)
async def test_no_request_is_an_error_of_the_server(tmp_path: Path, kind: str) -> None:
    chunked = "Transfer-Encoding: chunked\r\n"
    async with running(kind, tmp_path, model) as target:
        path = {"pages": "/sign-in", "otlp": "/v1/traces", "metrics": "/metrics", "serve": "/v1/embeddings"}[kind]
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        for more in (
            "Content-Length: 1\r\n\r\na",
            "Content-Length: -1\r\n\r\n",
            "Content-Length: 99999999999999999999\r\n\r\n",
            "Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            f"Content-Length: 1\r\n{chunked}\r\n0\r\n\r\n",
            f"{chunked}\r\nzz\r\n",
            f"{chunked}\r\n1\r\na\r\n0\r\n\r\n",
            f"{chunked}\r\n0;x={'y' * 5000}\r\n\r\n",
            "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "Content-Type: a/b; charset=\xff\r\n\r\n",
            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n\xff\xfe",
            "Content-Type: application/json\r\nContent-Encoding: gzip, gzip\r\nContent-Length: 2\r\n\r\n{}",
            "Content-Type: application/json\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
            "Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n",
            "Upgrade: websocket\r\n\r\n",
            "Authorization: Bearer \xff\xfe\r\n\r\n",
            "Cookie: flywheel_web=\xff\r\n\r\n",
            f"X: {'y' * 100_000}\r\n\r\n",
            "Range: bytes=" + "0-," * 5000 + "\r\n\r\n",
        ):
            answer = await sent(target, (head + more).encode("latin-1"))
            # The connection may be reset before the answer is read, where more was sent than is taken.
            assert status(answer) < 500, (more[:100], answer[:300])
        assert status(await sent(target, target.request("localhost"))) == 200
