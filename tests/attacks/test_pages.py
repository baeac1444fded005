"""Addresses and forms with values that no page makes: each is answered by a page, never by an error of the server."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import pytest
from starlette.routing import Route

from flywheel.config.file import Config
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from flywheel.store.views.task_counts import FILTERS
from flywheel.web import server
from flywheel.web.guard import LONGEST_ADDRESS
from flywheel.web.tasks import OTHERS
from tests.factories.trace import batch, record, reply
from tests.web.recorded_state import config_of, unpack

NINES = "9" * 5000
VALUES = {
    "digits": NINES,
    "2^63": str(2**63),
    "2^64": str(2**64),
    "negative": "-1",
    "other digits": "٣",
    "superscript": "²",
    "nan": "nan",
    "infinite": "1e999",
    "underscores": "1_0",
    "blanks": " 1 ",
    "NUL": "%00",
    "lone surrogate": "%ED%A0%80",
    "not UTF-8": "%FF%FE",
    "slash": "%2F",
    "dots": "..%2F..%2Fetc%2Fpasswd",
    "markup": "%3Cscript%3E",
    "template": "%7B%7B7*7%7D%7D",
    "SQL": "%27%20OR%201%3D1--",
    "wildcards": "%25" * 2000,
    "quotes": "%22" * 2000,
    "brackets": "[" * 2000,
    "empty": "",
}
TASKS = (*FILTERS, *OTHERS)
PARAMETERS = {
    "/tasks": TASKS,
    "/tasks.jsonl": TASKS,
    "/tasks/{key:path}": ("asked", "queue", "at", "blind", "replies"),
    "/labels": ("before", "only", "ended"),
    "/labels/next": ("queue", "at", "blind"),
    "/dead-letters": ("state", "group", "page", "asked"),
    "/rounds": ("before", "deployments"),
    "/rounds/overlay": ("round", "of"),
    "/rounds/{round}": ("split", "after", "steps", "round"),
    "/rollouts/{round}": ("step", "lowest", "highest", "criterion", "end", "task", "order", "after"),
    "/rollouts/{round}/{group}": ("rollout", "sample", "from"),
    "/gate": ("before",),
    "/lineage": ("id",),
}
"""What each page takes from its query."""
ROUTES = [route for route in server.ROUTES if isinstance(route, Route)]
FORMS = ("label", "criterion", "comment", "hidden", "queue", "at", "blind", "verb", "id", "group", "name", "token")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return unpack(tmp_path_factory.mktemp("attacked"))


@pytest.fixture
async def client(state: Config) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=server.application(state))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client


def filled(path: str, value: str, known: dict[str, str]) -> str:
    return re.sub(r"{(\w+)(?::path)?}", lambda found: known.get(found[1], value), path)


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES)
async def test_no_address_is_an_error_of_the_server(client: httpx2.AsyncClient, value: str) -> None:
    for route in ROUTES:
        if "GET" not in (route.methods or ()):
            continue
        known = {"round": "r0001"}
        paths = {filled(route.path, VALUES[value], {}), filled(route.path, VALUES[value], known)}
        for path in paths:
            answer = await client.get(path)
            assert answer.status_code < 500, (path[:100], answer.text[:500])
        for name in PARAMETERS.get(route.path, ()):
            path = filled(route.path, "1-1" if name in ("rollout", "sample", "from") else "1", known)
            answer = await client.get(f"{path}?{name}={VALUES[value]}")
            assert answer.status_code < 500, (path, name, answer.text[:500])


@pytest.mark.parametrize("value", VALUES)
async def test_no_form_is_an_error_of_the_server(client: httpx2.AsyncClient, value: str) -> None:
    page = (await client.get("/dead-letters")).text
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found is not None
    headers = {"content-type": "application/x-www-form-urlencoded"}
    verbs: list[dict[str, Any]] = [{}, {"verb": "retry"}, {"verb": "drop"}, {"label": "accept"}]
    for route in ROUTES:
        if "POST" not in (route.methods or ()):
            continue
        for path in {filled(route.path, VALUES[value], {}), filled(route.path, VALUES[value], {"verb": "release"})}:
            for fixed in verbs:
                rest = "&".join(f"{name}={VALUES[value]}" for name in FORMS if name not in fixed)
                content = f"{urlencode({'csrf': found[1], **fixed})}&{rest}"
                answer = await client.post(path, content=content, headers=headers)
                assert answer.status_code < 500 and answer.status_code != 403, (path[:100], answer.text[:500])


async def test_every_parameter_of_an_address_is_in_the_corpus() -> None:
    source = "".join(path.read_text() for path in Path(server.__file__).parent.glob("*.py"))
    asked = set(re.findall(r'(?:query_params|query)\.get\(\s*"(\w+)"', source))
    asked |= set(re.findall(r'position\([^,]+, "(\w+)"\)', source)) | set(re.findall(r'given\("(\w+)"\)', source))
    known = {name for names in PARAMETERS.values() for name in names}
    assert asked and asked <= known, asked - known
    assert set(PARAMETERS) <= {route.path for route in ROUTES}
    fields = set(re.findall(r'field\(request, "(\w+)"\)', source))
    assert fields and fields <= set(FORMS), fields - set(FORMS)


async def test_a_long_address_is_refused_with_a_page(client: httpx2.AsyncClient) -> None:
    """SQLite refuses long patterns."""
    answer = await client.get("/tasks", params={"text": "a" * 60_000})
    assert (answer.status_code, "longer than 8,192 characters" in answer.text) == (414, True)
    longest = "a" * (LONGEST_ADDRESS - len("/taskstext="))
    assert (await client.get("/tasks", params={"text": longest})).status_code == 200


async def test_a_number_that_no_row_has_is_no_part_of_the_list(client: httpx2.AsyncClient) -> None:
    for value in (NINES, str(2**63), "٣", "-1"):
        answer = await client.get("/tasks", params={"after": value})
        assert (answer.status_code, "is no place in a list" in answer.text) == (400, True)


async def test_a_task_whose_key_has_slashes_has_a_page(tmp_path: Path) -> None:
    keys = ["a/b", "a/b/label", "a//b", "/a", "a/", "a/../b", "a?b#c", "50%2F", "ä/ß"]
    config = config_of(tmp_path)
    store = await Store.open(config.state_dir)
    replies = batch(*(reply(at, span_id=key) for at, key in enumerate(keys)))
    await store.write(
        lambda conn: record(conn, ledger.source_id(conn, "/a"), replies, train_ratio=0.7, split_seed=42)
    )
    await store.close()
    transport = httpx2.ASGITransport(app=server.application(config))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        addresses = set(re.findall(r'href="(/tasks/[^"?]+)"', (await client.get("/tasks")).text))
        assert len(addresses) == len(keys)
        for address in addresses:
            shown = await client.get(address)
            assert shown.status_code == 200, address
            form = re.search(r'action="(/tasks/[^"]+/label)"', shown.text)
            assert form is not None and form[1] == f"{address}/label"


def test_no_path_is_taken_from_the_url_of_a_request() -> None:
    """Starlette below 1.0.1 makes it from the `Host` header."""
    package = Path(server.__file__).parent.parent
    made = {path.name for path in package.rglob("*.py") if re.search(r"request\.(url|base_url)\.", path.read_text())}
    assert made == set()
