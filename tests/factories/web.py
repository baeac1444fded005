"""Clients of the pages, and what is read from pages and logs."""

from __future__ import annotations

import html
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from flywheel.config.file import Config
from flywheel.web.server import application

TOKEN = "a-token-of-some-length"
FORM = {"content-type": "application/x-www-form-urlencoded"}
WAIT_SECONDS = 120


def client(config: Config) -> TestClient:
    return TestClient(application(config, names=frozenset({"testserver"})), raise_server_exceptions=True)


def asgi_client(app: ASGIApp, **headers: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1:4400", headers=headers
    )


def text_of(page: str) -> str:
    """The text of HTML, each run of white space as one blank."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def csrf_of(page: str) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    return found[1]


async def csrf_from(asked: httpx2.AsyncClient) -> str:
    return csrf_of((await asked.get("/sign-in", headers={"accept": "text/html"})).text)


def template_of(address: str) -> str:
    """The first word of a path and how many follow."""
    first, *rest = urlsplit(address).path.strip("/").split("/")
    return f"{first}/{len(rest)}"


def kinds_of(address: str) -> list[tuple[str, str]]:
    """The template of a page with each name in its query, or with none."""
    names = parse_qs(urlsplit(address).query, keep_blank_values=True) or [""]
    return [(template_of(address), name) for name in names]


def address_in(log: Path) -> str:
    """The first address that a log names; empty before."""
    return next(iter(re.findall(r"http://127\.0\.0\.1:\d+/", log.read_text())), "")
