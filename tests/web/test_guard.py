"""Who may see the pages and change anything by them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlencode

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from flywheel.web import server
from flywheel.web.guard import HEADERS, REFUSAL_SECONDS
from tests.factories.state import write_state
from tests.factories.web import FORM, TOKEN, asgi_client, csrf_from
from tests.web.recorded_state import config_of


async def act(request: Request) -> Response:
    return PlainTextResponse(f"done: {request.state.form}")


@pytest.fixture(autouse=True)
def state(tmp_path: Path) -> None:
    """Without one, no page is shown."""
    write_state(tmp_path / "state", lambda _: None)


@pytest.fixture
def with_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages have one more, which acts."""
    monkeypatch.setattr(server, "ROUTES", [*server.ROUTES, Route("/act", act, methods=["POST"])])


async def test_only_requests_by_its_own_names_are_answered(tmp_path: Path) -> None:
    own = ("127.0.0.1:4400", "localhost:4400", "LOCALHOST.", "[::1]:4400", "10.0.0.7")
    others = ("evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:4400")
    async with asgi_client(server.application(config_of(tmp_path))) as asked:
        for host in (*own, *others):
            status = (await asked.get("/tasks", headers={"host": host})).status_code
            assert status == (200 if host in own else 421), host
    named = server.application(config_of(tmp_path), names=frozenset({"wheel.example"}))
    async with asgi_client(named) as asked:
        assert (await asked.get("/tasks", headers={"host": "wheel.example"})).status_code == 200


async def test_every_answer_has_the_headers(tmp_path: Path) -> None:
    async with asgi_client(server.application(config_of(tmp_path))) as asked:
        for path in ("/tasks", "/no-such-page", "/static/page.css", "/static/no-such-file"):
            headers = (await asked.get(path)).headers
            assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "*" not in policy


async def test_without_the_token_nothing_is_shown(tmp_path: Path, with_action: None) -> None:
    async with asgi_client(server.application(config_of(tmp_path), token=TOKEN)) as asked:
        assert (await asked.get("/tasks")).status_code == 401
        redirected = await asked.get("/tasks", headers={"accept": "text/html"})
        assert (redirected.status_code, redirected.headers["location"]) == (303, "/sign-in")
        for given in ("", "Bearer", f"Basic {TOKEN}", "Bearer wrong", f"Bearer {TOKEN[:-1]}"):
            assert (await asked.get("/tasks", headers={"authorization": given})).status_code == 401
        assert (await asked.get("/tasks", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200
        form = urlencode({"csrf": await csrf_from(asked)})
        assert (await asked.post("/act", content=form, headers=FORM)).status_code == 401, "the form's token is no key"


async def test_signing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    async with asgi_client(server.application(config_of(tmp_path), token=TOKEN)) as asked:
        csrf = await csrf_from(asked)
        wrong = await asked.post("/sign-in", content=urlencode({"csrf": csrf, "token": "wrong"}), headers=FORM)
        assert (wrong.status_code, waited, "set-cookie" in wrong.headers) == (401, [REFUSAL_SECONDS], False)
        right = await asked.post("/sign-in", content=urlencode({"csrf": csrf, "token": TOKEN}), headers=FORM)
        assert right.status_code == 303
        assert {"httponly", "samesite=strict"} <= {
            each.strip().lower() for each in right.headers["set-cookie"].split(";")
        }
        assert TOKEN not in right.headers["set-cookie"]
        assert (await asked.get("/tasks")).status_code == 200
        other = server.application(config_of(tmp_path), token=TOKEN)
        asked._transport = httpx2.ASGITransport(app=other)
        assert (await asked.get("/tasks")).status_code == 401, "a session ends with its server"


async def test_forms_of_other_sites_change_nothing(tmp_path: Path, with_action: None) -> None:
    pages = server.application(config_of(tmp_path), token=TOKEN)
    async with asgi_client(pages, authorization=f"Bearer {TOKEN}", **FORM) as asked:
        csrf = await csrf_from(asked)
        good = urlencode({"csrf": csrf, "id": ["1", "2"]}, doseq=True)
        done = await asked.post("/act", content=good)
        assert (done.status_code, done.text) == (200, "done: {'id': ['1', '2']}")
        for content in ("", "csrf=", "csrf=wrong", f"csrf=wrong&csrf={csrf}"):
            assert (await asked.post("/act", content=content)).status_code == 403
        for headers in (
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            assert (await asked.post("/act", content=good, headers=headers)).status_code == 403
        for headers in ({"origin": "http://127.0.0.1:4400"}, {"sec-fetch-site": "same-origin"}):
            assert (await asked.post("/act", content=good, headers=headers)).status_code == 200
        assert (await asked.post("/act", content=good + "&x=" + "x" * 70_000)).status_code == 413


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_read_only_server_changes_nothing(tmp_path: Path, with_action: None, method: str) -> None:
    pages = server.application(config_of(tmp_path), token=TOKEN, is_read_only=True)
    async with asgi_client(pages, authorization=f"Bearer {TOKEN}", **FORM) as asked:
        form = urlencode({"csrf": await csrf_from(asked)})
        refused = await asked.request(method, "/act", content=form)
        assert (refused.status_code, refused.text) == (403, "This server is read-only.")
        assert (await asked.get("/tasks")).status_code == 200
