"""The Lineage page: adapters, deployments with their swaps, and both directions from an id."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select
from starlette.testclient import TestClient

from flywheel.config.file import Config
from flywheel.records.states import DeploymentState, RoundState, Split
from flywheel.store.deployments import BY_HAND
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import round_samples, tasks
from tests.factories.round import AT, comparison, put_deployment, put_tested_round
from tests.factories.trace import put_replies, replies_on
from tests.factories.web import client
from tests.web.recorded_state import HOSTILE, config_of


def put_samples(conn: Connection, directory: Path) -> None:
    """Sixty conversations in the training of two adapters of a line."""
    replies = replies_on(Split.TRAIN, 60)
    put_replies(conn, *replies)
    put_tested_round(conn, 1, RoundState.PROMOTED, directory, comparison())
    put_tested_round(conn, 2, RoundState.PROMOTED, directory, comparison(), parent="r0001")
    put_tested_round(conn, 3, RoundState.TRAINING, directory, parent="r0002")
    ids = list(conn.execute(select(tasks.c.id)).scalars())
    rows = [{"round_id": 1, "task_id": each, "split": Split.TRAIN.value} for each in ids]
    rows += [{"round_id": 2, "task_id": each, "split": Split.TRAIN.value} for each in ids[:2]]
    conn.execute(insert(round_samples), rows)
    put_deployment(conn, "r0001", "r0001: better", retired_at=AT)
    put_deployment(conn, "r0002", BY_HAND, previous="r0001")
    failed = {"state": DeploymentState.FAILED.value, "active_alias": None, "report": None, "activated_at": None}
    put_deployment(conn, None, "rollback", error=f"cannot reach it {HOSTILE}", **failed)


@pytest.fixture
async def config(tmp_path: Path) -> Config:
    config = config_of(tmp_path)
    store = await Store.open(config.state_dir)
    await store.write(partial(put_samples, directory=tmp_path / "rounds"))
    await store.close()
    return config


@pytest.fixture
def http(config: Config) -> TestClient:
    return client(config)


def test_what_serves_and_all_adapters_and_deployments(http: TestClient) -> None:
    page = http.get("/lineage").text
    serving = page[page.index('id="serving"') : page.index('id="adapters"')]
    assert serving.index("agent") < serving.index("r0002") < serving.index("r0001") < serving.index("base model")
    assert "60 samples" in page
    assert "2 samples" in page
    assert page.count('href="/deployments/') == 6


def test_lists_come_in_parts(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.web.lineage.ADAPTERS", 1)
    monkeypatch.setattr("flywheel.web.lineage.DEPLOYMENTS", 2)
    page = http.get("/lineage").text
    assert 'href="/lineage?adapters=2#adapters"' in page
    assert 'href="/lineage?deployments=2#deployments"' in page
    older = http.get("/lineage?adapters=2&deployments=2").text
    assert "60 samples" in older
    assert 'href="/deployments/1"' in older
    for wrong in ("x", "9" * 30, "-1"):
        assert http.get(f"/lineage?adapters={wrong}").status_code == 400


def test_from_an_adapter_to_its_conversations(http: TestClient) -> None:
    page = http.get("/lineage?id=agent@r0001").text
    assert "60 samples, the oldest first" in page
    assert page.count('href="/lineage?id=conversation-') == 50
    assert "r0002" in page[page.index("Trained from it") :], "the younger adapter"
    rest = http.get(page.partition('rel="next"')[0].rpartition('href="')[2].partition("#")[0].replace("&amp;", "&"))
    assert rest.text.count('href="/lineage?id=conversation-') == 10


def test_from_a_conversation_to_adapters_and_the_alias(http: TestClient) -> None:
    conversation = replies_on(Split.TRAIN, 1)[0].conversation_id
    page = http.get("/lineage", params={"id": conversation}).text
    adapters = page[page.index("Adapters that were trained on it") :]
    assert adapters.index("r0001") < adapters.index("r0002")
    assert '<strong>now</strong> <span class="dim">(by hand)</span>' in adapters
    assert "What is" in page[page.index('id="replies"') :]


def test_a_round_that_has_made_no_adapter_yet(http: TestClient) -> None:
    page = http.get("/lineage?id=r0003").text
    assert "never served" in page
    assert "It has no training samples." in page


def test_an_id_that_names_nothing_and_an_alias(http: TestClient) -> None:
    nothing = http.get("/lineage", params={"id": HOSTILE})
    assert nothing.status_code == 404
    assert "<script>doc" not in nothing.text
    alias = http.get("/lineage?id=agent", follow_redirects=False)
    assert (alias.status_code, alias.headers["location"]) == (303, "/lineage#deployments")


def test_a_deployment_with_the_report_of_its_swap(http: TestClient) -> None:
    page = http.get("/deployments/2").text
    assert "verified" in page
    assert "0.97" in page
    assert "Standard error: 0.042" in page
    failed = http.get("/deployments/3").text
    assert "the swap failed before it was recorded" in failed
    assert "cannot reach it" in failed
    assert "<script>doc" not in failed
    for number in ("9", "x", "9" * 40):
        assert http.get(f"/deployments/{number}").status_code == 404
