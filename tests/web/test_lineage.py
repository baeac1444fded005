"""Lineage on the pages of rounds and tasks, the page that an id leads to, deployments, and erasures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select
from starlette.testclient import TestClient

from flywheel.config.file import Config
from flywheel.daemon.rounds.removal import erase_from_results, erase_from_round
from flywheel.records.states import DeploymentState, RoundState, SkipReason, Split
from flywheel.store import ledger
from flywheel.store.deployments import BY_HAND
from flywheel.store.kernel.schema import round_samples, tasks
from flywheel.training.data.rollout_file import groups
from tests.factories.round import AT, comparison, put_deployment, put_tested_round
from tests.factories.state import execute, write_state
from tests.factories.trace import batch, put_replies, record, replies_on, reply
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
def config(tmp_path: Path) -> Config:
    write_state(tmp_path / "state", put_samples, tmp_path / "rounds")
    return config_of(tmp_path)


@pytest.fixture
def http(config: Config) -> TestClient:
    return client(config)


def test_what_serves_and_the_deployments_of_the_base_model(http: TestClient) -> None:
    page = http.get("/rounds").text
    serving = page[page.index('id="serving"') : page.index('id="overlay"')]
    assert serving.index("agent") < serving.index("r0002") < serving.index("r0001") < serving.index("base model")
    table = page[page.index('id="deployments"') :]
    assert table.count('href="/deployments/') == 1 and 'href="/deployments/3"' in table
    for wrong in ("x", "9" * 30, "-1"):
        assert http.get(f"/rounds?deployments={wrong}").status_code == 400


def lineage_of(page: str) -> str:
    return page[page.index('id="lineage"') :]


def test_from_an_adapter_to_its_conversations(http: TestClient) -> None:
    page = http.get("/rounds/r0001").text
    lineage = lineage_of(page)
    assert lineage.index("60") < lineage.index("Trained from it") < lineage.index("r0002"), "the younger adapter"
    assert 'href="/deployments/1"' in lineage
    conversation = replies_on(Split.TRAIN, 1)[0].conversation_id
    assert conversation in page[page.index('id="selection"') : page.index('id="lineage"')]
    first = lineage_of(http.get("/rounds/r0002").text)
    assert first.index("2</td>") < first.index("60</td>") < first.index("the base model")
    without_adapter = lineage_of(http.get("/rounds/r0003").text)
    assert "It has never served." in without_adapter and "No adapter was trained from it." in without_adapter


def test_each_deployment_of_an_adapter_is_on_a_page_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(conn: Connection) -> None:
        put_tested_round(conn, 1, RoundState.PROMOTED, tmp_path / "rounds", comparison())
        for _ in range(3):
            put_deployment(conn, "r0001", BY_HAND, retired_at=AT)

    write_state(tmp_path / "state", put)
    monkeypatch.setattr("flywheel.web.lineage.PER_PAGE", 2)
    http = client(config_of(tmp_path))
    first = lineage_of(http.get("/rounds/r0001").text)
    [older] = re.findall(r'href="([^"]*)#lineage" rel="next"', first)
    rest = lineage_of(http.get(older).text)
    shown = [re.findall(r'href="/deployments/(\d+)"', page) for page in (first, rest)]
    assert shown == [["3", "2"], ["1"]] and 'rel="next"' not in rest
    assert http.get("/rounds/r0001?deployments=x").status_code == 400


def test_from_a_conversation_to_adapters_and_the_alias(http: TestClient) -> None:
    page = lineage_of(http.get("/lineage", params={"id": replies_on(Split.TRAIN, 1)[0].conversation_id}).text)
    adapters = page[page.index("Adapters that were trained on it") :]
    assert adapters.index("r0001") < adapters.index("r0002")
    assert '<strong>now</strong> <span class="dim">(by hand)</span>' in adapters
    assert "this one" in page[page.index('id="replies"') :]


def put_conversation(conn: Connection) -> None:
    """Three replies of one conversation, the second of which has no task."""
    found = [reply(number, conversation_id="a talk") for number in (1, 3)]
    found.insert(1, reply(2, conversation_id="a talk", skip=SkipReason.INTERRUPTED))
    record(conn, ledger.source_id(conn, "/a"), batch(*found), train_ratio=1.0, split_seed=42)


def test_the_replies_of_a_conversation_with_those_without_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path / "state", put_conversation)
    http = client(config_of(tmp_path))
    replies = http.get("/lineage", params={"id": "a talk"}).text.partition('id="replies"')[2]
    assert "this one" in replies and 'href="/tasks/t-' in replies and "interrupted" in replies
    monkeypatch.setattr("flywheel.web.lineage.PER_PAGE", 1)
    first = http.get("/lineage", params={"id": "a talk"})
    assert 'rel="next"' in first.text
    [rest] = re.findall(r'href="([^"]*\?replies=\d+)#replies" rel="next"', first.text)
    assert "interrupted" in http.get(rest).text
    told = http.get("/lineage", params={"id": reply(2).span_id})
    assert told.status_code == 404 and "has no task: interrupted" in told.text


def put_late_task(conn: Connection) -> None:
    """A conversation whose first reply with a task comes after forty without one."""
    without = [reply(number, conversation_id="a talk", skip=SkipReason.INTERRUPTED) for number in range(1, 41)]
    found = batch(*without, reply(41, conversation_id="a talk"))
    record(conn, ledger.source_id(conn, "/a"), found, train_ratio=1.0, split_seed=42)


def test_a_conversation_leads_to_its_first_task_behind_any_number_of_replies_without_one(tmp_path: Path) -> None:
    write_state(tmp_path / "state", put_late_task)
    answer = client(config_of(tmp_path)).get("/lineage", params={"id": "a talk"}, follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/tasks/t-")


def test_an_id_leads_to_its_page(http: TestClient) -> None:
    for old, new in (
        ("/lineage", "/rounds#serving"),
        ("/lineage?adapters=2", "/rounds#serving"),
        ("/lineage?id=agent", "/rounds#serving"),
        ("/lineage?id=r0001&after=9", "/rounds/r0001#lineage"),
        ("/lineage?id=agent@r0001", "/rounds/r0001#lineage"),
    ):
        answer = http.get(old, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, new)
    nothing = http.get("/lineage", params={"id": HOSTILE})
    assert (nothing.status_code, "<script>doc" in nothing.text) == (404, False)


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


def test_the_pages_of_a_round_without_its_erased_tasks(own_state: Config) -> None:
    directory = own_state.state_dir / "rounds" / "r0001"
    spec = json.loads((directory / "spec.json").read_bytes())
    asked = {task["task_id"]: task["query"] for task in (*spec["train"], *spec["held_out"])}
    before = list(groups(directory))
    scores = json.loads((directory / "result.json").read_bytes())["comparison"]["scores"]
    gone = {before[0].task_id, scores[0]["task_id"]}
    assert erase_from_round(directory, gone) > 0
    keys = ", ".join(f"'{task}'" for task in gone)
    execute(
        own_state.state_dir / "state.db", f"UPDATE tasks SET state = 'erased', payload = '{{}}' WHERE key IN ({keys})"
    )
    write_state(own_state.state_dir, erase_from_results, gone)

    pages = client(own_state)
    left = [group for group in before if group.task_id not in gone]
    [group] = [group for group in left if (group.step, group.group) == (left[0].step, left[0].group)]
    paths = (
        "/rounds", "/rounds/r0001", "/rounds/r0002", "/rollouts/r0001",
        f"/rollouts/r0001/{group.step}-{group.group}", "/gate/r0001",
    )  # fmt: skip
    shown = {}
    for path in paths:
        response = pages.get(path)
        assert response.status_code == 200, path
        shown[path] = response.text
    assert not [path for path, text in shown.items() for task in gone if asked[task] in text]
    assert len(list(groups(directory))) == len(left) < len(before)
    assert asked[group.task_id] in shown[f"/rollouts/r0001/{group.step}-{group.group}"]
    sentence = "trained on texts that were erased since (1 of 67 samples, 1.5%)"
    assert sentence in re.sub(r"\s+", " ", shown["/rounds/r0001"])
    assert "it goes on from adapters that were" in shown["/rounds/r0002"]
