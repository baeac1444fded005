"""Who gets which answer: without a key, with the agents' and with the admin key, and under which host name."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from flywheel.serving import routes
from flywheel.serving.server.asgi import route_path
from flywheel.system.server_limits import Message
from tests.serving.fake_vllm import BASE, FakeVllm, running, with_middleware

KEYS = {"FLYWHEEL_API_KEY": "agents", "FLYWHEEL_ADMIN_KEY": "admin", "VLLM_API_KEY": "internal"}
AGENTS = {"authorization": "Bearer agents"}
ADMIN = {"authorization": "Bearer admin"}

MANAGEMENT = {
    *routes.ADMINS,
    "/flywheel/alias",
    "/flywheel/calls",
    "/flywheel/calls/erase",
    "/flywheel/other",
    "/v1/%6Coad_lora_adapter",
}
UNKNOWN = {"/plugin", "/v1/files", "/v1/moderations", "/v1/files/file-1", "//v1/load_lora_adapter"}
"""Paths that no list names: of clients, of plugins, and of later versions of vLLM."""


@pytest.fixture
def app() -> FakeVllm:
    app = FakeVllm()
    app.echoes = {*routes.INFERENCE, *routes.OTHERS_OF_AGENTS, *routes.OPEN, *routes.ADMINS, *UNKNOWN, "/"}
    return app


@pytest.fixture
def url(app: FakeVllm) -> Iterator[str]:
    with running(with_middleware(app, **KEYS)) as url:
        yield url


def routes_of_vllm() -> set[str]:
    """Every path in the source of the installed vLLM, also those that only some settings switch on."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    sources = (Path(found.origin).parent / "entrypoints").rglob("*.py")
    decorated = r"@router\.(?:get|post|put|delete|websocket)\(\s*\"([^\"]+)\""
    route = re.compile(decorated + r"|add_api_route\(\s*\"([^\"]+)\"")
    return {"".join(paths) for source in sources for paths in route.findall(source.read_text())}


@pytest.mark.training
def test_every_route_of_vllm_is_somebodys() -> None:
    """A new vLLM has new routes: each is the agents' or it is not, and somebody has said so."""
    paths = routes_of_vllm()
    assert len(paths) > 50
    known = {path for path in paths if routes.is_agents(path)} | routes.OPEN | routes.ADMINS
    assert paths - known == set()
    assert not {path for path in routes.ADMINS if routes.is_agents(path)}


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic agents"}])
def test_nothing_but_health_answers_without_the_key(app: FakeVllm, url: str, headers: dict[str, str]) -> None:
    with httpx2.Client(base_url=url) as client:
        for path in sorted({*app.echoes, "/flywheel/alias"} - routes.OPEN):
            for method in ("GET", "POST", "PUT", "OPTIONS"):
                answer = client.request(method, path, headers=headers)
                assert answer.status_code == 401, f"{method} {path}"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "key" in answer.json()["error"]["message"]
        assert app.calls == []
        for path in routes.OPEN:
            assert client.get(path, headers=headers).status_code == 200


def test_the_agents_key_opens_inference_and_nothing_that_manages(app: FakeVllm, url: str) -> None:
    with httpx2.Client(base_url=url, headers=AGENTS) as client:
        for path in sorted({*routes.INFERENCE, *routes.OTHERS_OF_AGENTS}):
            assert client.post(path, json={"model": BASE}).status_code == 200, path
        app.calls.clear()
        for path in sorted(MANAGEMENT | UNKNOWN):
            for method in ("GET", "POST", "PUT"):
                answer = client.request(method, f"{url}{path}", json={})
                assert answer.status_code == (404 if path in UNKNOWN else 403), f"{method} {path}"
                message = answer.json()["error"]["message"]
                assert ("no such path" if path in UNKNOWN else "serving.admin_key_env") in message
    assert app.calls == []


def test_the_admin_key_opens_everything(app: FakeVllm, url: str) -> None:
    with httpx2.Client(base_url=url, headers=ADMIN) as client:
        for path in sorted(app.echoes - {path for path in app.echoes if path.endswith("load_lora_adapter")}):
            assert client.post(path, json={}).status_code == 200, path
        assert client.get("/flywheel/alias").json()["aliases"] == {"agent": BASE}


def test_a_response_is_the_agents(app: FakeVllm, url: str) -> None:
    app.echoes |= {"/v1/responses/resp_1", "/v1/responses/resp_1/cancel"}
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
        assert httpx2.get(f"{url}{path}").status_code == 401
        assert httpx2.get(f"{url}{path}", headers=AGENTS).status_code == 200


def test_vllm_is_given_its_own_key(app: FakeVllm, url: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize", "/health", "/v1/audio/translations"):
        httpx2.post(f"{url}{path}", json={}, headers=AGENTS)
        assert app.headers[-1]["authorization"] == "Bearer internal"


def test_without_an_agents_key_inference_is_open_and_management_is_not(app: FakeVllm) -> None:
    with running(with_middleware(app, **{**KEYS, "FLYWHEEL_API_KEY": ""})) as url:
        for headers in ({}, {"authorization": "Bearer EMPTY"}, AGENTS):
            assert httpx2.post(f"{url}/v1/chat/completions", json={}, headers=headers).status_code == 200
            assert app.headers[-1]["authorization"] == "Bearer internal"
            for path, status in (("/v1/load_lora_adapter", 401), ("/flywheel/alias", 401), ("/plugin", 404)):
                assert httpx2.post(f"{url}{path}", json={}, headers=headers).status_code == status
        assert httpx2.get(f"{url}/flywheel/alias", headers=ADMIN).status_code == 200


def test_a_server_that_was_started_by_hand_keeps_its_key(app: FakeVllm) -> None:
    with running(with_middleware(app, VLLM_API_KEY="s3cret")) as url:
        right = {"authorization": "bearer s3cret"}
        assert httpx2.post(f"{url}/invocations", json={}).status_code == 401
        assert httpx2.post(f"{url}/invocations", json={}, headers=right).status_code == 200
        assert httpx2.get(f"{url}/flywheel/alias", headers=right).status_code == 403


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_an_admin_key_that_cannot_be_read_opens_nothing(
    app: FakeVllm, tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "admin.key"
    if content is not None:
        file.write_text(content)
    with running(with_middleware(app, FLYWHEEL_API_KEY="", FLYWHEEL_ADMIN_KEY_FILE=str(file))) as url:
        assert httpx2.post(f"{url}/v1/chat/completions", json={"model": "agent"}).status_code == 200
        for headers in ({}, {"authorization": "Bearer"}, ADMIN):
            assert httpx2.get(f"{url}/flywheel/alias", headers=headers).status_code == 401
    assert str(file) in caplog.text


def test_an_admin_key_in_a_file(app: FakeVllm, tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text("admin\n")
    file = str(tmp_path / "admin.key")
    with running(with_middleware(app, FLYWHEEL_API_KEY="", FLYWHEEL_ADMIN_KEY_FILE=file)) as url:
        assert httpx2.get(f"{url}/flywheel/alias", headers=ADMIN).status_code == 200


@pytest.mark.parametrize(("setting", "status"), [(False, 401), (True, 200)])
def test_metrics_are_open_by_setting(app: FakeVllm, setting: bool, status: int) -> None:
    with running(with_middleware(app, **KEYS, open_metrics=setting)) as url:
        assert httpx2.get(f"{url}/metrics").status_code == status
        assert httpx2.get(f"{url}/metrics", headers=AGENTS).status_code == 200
        assert httpx2.get(f"{url}/version").status_code == 401


async def websocket(*headers: tuple[bytes, bytes], path: str = "/v1/realtime", **environment: str) -> list[Message]:
    """What the middleware sends to who opens a websocket."""
    sent: list[Message] = []

    async def app(scope: object, receive: object, send: object) -> None:
        sent.append({"type": "reached the app"})

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": list(headers)}
    await with_middleware(app, **environment)(scope, receive, send)
    return sent


async def test_websockets_need_the_key_as_well() -> None:
    for refused in (await websocket(**KEYS), await websocket((b"authorization", b"Bearer wrong"), **KEYS)):
        assert [message["type"] for message in refused] == ["websocket.close"]
    assert await websocket((b"authorization", b"Bearer agents"), **KEYS) == [{"type": "reached the app"}]
    management = await websocket((b"authorization", b"Bearer agents"), path="/plugin", **KEYS)
    assert [message["type"] for message in management] == ["websocket.close"]


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("agents.internal", True),
        ("agents.internal:443", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:localhost", False),
        ("0.0.0.0", False),
        ("", False),
    ],
)
async def test_only_known_hosts_on_loopback(app: FakeVllm, host: str, allowed: bool) -> None:
    hosts = ["localhost", "127.0.0.1", "::1", "agents.internal"]
    with running(with_middleware(app, allowed_hosts=hosts)) as url:
        for method, path in (("POST", "/v1/completions"), ("GET", "/flywheel/alias"), ("GET", "/health")):
            answer = httpx2.request(method, f"{url}{path}", headers={"host": host})
            assert answer.status_code == (200 if allowed else 421), path
    if not allowed:
        assert "serving.allowed_hosts" in answer.text
    sent = await websocket((b"host", host.encode()), allowed_hosts=hosts)
    assert [message["type"] for message in sent] == ["reached the app" if allowed else "websocket.close"]


def test_elsewhere_any_host_will_do(app: FakeVllm) -> None:
    with running(with_middleware(app)) as url:
        assert httpx2.get(f"{url}/health", headers={"host": "anything.example"}).status_code == 200


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/api", "/api/v1/models", "/v1/models"),
        ("/api", "/apihealth", "/apihealth"),
        ("/v", "/v1/models", "/v1/models"),
        ("/api", "/api", ""),
    ],
)
def test_the_root_path_is_not_part_of_the_route(root: str, path: str, expected: str) -> None:
    assert route_path({"path": path, "root_path": root}) == expected
