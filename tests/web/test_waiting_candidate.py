"""The page of a round whose candidate waits: what it waits for, and the buttons that decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.records.states import RoundState
from flywheel.store import rounds
from flywheel.store.kernel.transitions import record
from flywheel.web import server
from tests.factories.config import with_settings
from tests.factories.round import comparison, put_tested_round
from tests.factories.state import read_state, write_state
from tests.factories.web import FORM, asgi_client, csrf_of
from tests.web.recorded_state import config_of


def waits(conn: Connection, directory: Path) -> None:
    put_tested_round(conn, 1, RoundState.PASSED, directory, comparison(), parent="r0000")
    record(conn, "rounds", ["1"], "evaluating", "passed", "waits for a person")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_state(tmp_path / "state", waits, tmp_path)
    return with_settings(config_of(tmp_path), gate={"mode": "manual"})


def state_of(config: Config) -> Any:
    return read_state(config.state_dir, rounds.by_name, "r0001")


async def test_the_page_says_what_a_candidate_waits_for_and_what_ends_it(config: Config) -> None:
    async with asgi_client(server.application(config)) as asked:
        page = (await asked.get("/rounds/r0001")).text
        assert "r0001 passed its test against r0000 and waits to be deployed" in page
        assert "It waits for a person: `flywheel deploy r0001`, until <span" in page
        assert "It was compared with r0000. As soon as something else serves, the round fails" in page
        assert 'action="/rounds/r0001/deploy"' in page and 'action="/rounds/r0001/refuse"' in page
        assert "waits for a person" in (await asked.get("/")).text
        assert "passed" in (await asked.get("/rounds")).text
        assert "waits to be deployed" in (await asked.get("/gate")).text
    async with asgi_client(server.application(config, is_read_only=True)) as asked:
        page = (await asked.get("/rounds/r0001")).text
        assert "It waits for a person" in page and '<form method="post"' not in page


async def test_a_person_refuses_by_a_button(config: Config) -> None:
    async with asgi_client(server.application(config), **FORM) as asked:
        form = urlencode({"csrf": csrf_of((await asked.get("/rounds/r0001")).text)})
        answer = await asked.post("/rounds/r0001/refuse", content=form)
        assert answer.status_code == 303
        page = (await asked.get(answer.headers["location"])).text
        assert "1 refused" in page and "was tested against r0000 and rejected" in page
        assert "It waits for" not in page
        again = await asked.post("/rounds/r0001/refuse", content=form)
        assert "it is rejected, and does not wait" in (await asked.get(again.headers["location"])).text
    row = state_of(config)
    assert row.state == "rejected" and row.reason.endswith("refused it")


async def test_a_person_approves_by_a_button_and_the_page_says_who_deploys(config: Config) -> None:
    async with asgi_client(server.application(config), **FORM) as asked:
        form = urlencode({"csrf": csrf_of((await asked.get("/rounds/r0001")).text)})
        answer = await asked.post("/rounds/r0001/deploy", content=form)
        page = (await asked.get(answer.headers["location"])).text
        assert "the daemon, or the next `flywheel run`, deploys r0001" in page
        assert "It waits for the daemon, or the next `flywheel run`" in page
        assert "approved" in page, "in the timeline"
        assert (await asked.post("/rounds/r0001/curves", content=form)).status_code == 404
    assert state_of(config).state == "passed"
