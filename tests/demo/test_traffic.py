"""The traffic and the database it leaves: as Studio writes it, as the reader understands it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from demo.studio import StudioDatabase, Turn, agent_row, call_row
from demo.traffic import Traffic
from demo.users import TrafficError
from flywheel.cli.demo.questions import SYSTEM_PROMPT, solve
from flywheel.records.trace import Reply
from tests.serving.fake_vllm import FakeVllm, replica, running
from tests.sources.studio.reading import read_all
from tests.waiting import until

FIXTURE = Path(__file__).parent.parent / "data" / "studio" / "new_v2.sqlite"


def rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute(query).fetchall()


def replies(path: Path) -> list[Reply]:
    told, dead, _ = read_all(path, now=datetime.now(UTC))
    assert dead == []
    return told


def turn(**values: Any) -> Turn:
    defaults: dict[str, Any] = {
        "conversation_id": "c1",
        "agent": "Tutor",
        "question": "What is 3 plus 4?",
        "answer": "It is \\boxed{7}.",
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "What is 1 plus 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "What is 3 plus 4?"},
        ],
        "requested_model": "demo-agent",
        "answered_model": "demo-agent@r0001",
        "response_id": "chatcmpl-1",
        "finish_reason": "stop",
        "input_tokens": 30,
        "output_tokens": 7,
        "agent_started_ns": 1_795_238_568_817_212_745,
        "call_started_ns": 1_795_238_568_818_674_700,
        "call_ended_ns": 1_795_238_568_837_396_000,
        "agent_ended_ns": 1_795_238_568_837_904_000,
    }
    return Turn(**{**defaults, **values})


def test_the_schema_is_studios(tmp_path: Path) -> None:
    StudioDatabase(tmp_path / "studio.sqlite")
    StudioDatabase(tmp_path / "studio.sqlite")  # an existing one is taken as it is
    query = "SELECT type, name, sql FROM sqlite_master WHERE tbl_name IN ('span_table', 'migrations') ORDER BY name"

    def schema(path: Path) -> list[tuple[str, ...]]:
        found = [tuple(row) for row in rows(path, query)]
        return [(kind, name, " ".join((sql or "").replace(") ;", ")").split())) for kind, name, sql in found]

    assert schema(tmp_path / "studio.sqlite") == schema(FIXTURE)
    assert rows(tmp_path / "studio.sqlite", "PRAGMA journal_mode")[0][0] == "delete"
    migrations = "SELECT timestamp, name FROM migrations ORDER BY id"
    assert [tuple(r) for r in rows(tmp_path / "studio.sqlite", migrations)] == [
        tuple(r) for r in rows(FIXTURE, migrations)
    ]


@pytest.mark.parametrize(("operation", "make"), [("chat", call_row), ("invoke_agent", agent_row)])
def test_a_row_has_the_form_of_a_real_one(tmp_path: Path, operation: str, make: Any) -> None:
    """Same columns filled with values of the same kinds, same keys in every JSON column."""
    query = (
        f"SELECT * FROM span_table WHERE operationName = '{operation}' AND statusCode = 1 "
        """AND attributes NOT LIKE '%"tool%' AND attributes NOT LIKE '%"parts":[]%' ORDER BY rowid"""
    )
    real = rows(FIXTURE, query)[0]
    database = StudioDatabase(tmp_path / "studio.sqlite")
    database.export([make(turn())])
    [ours] = rows(database.path, "SELECT * FROM span_table")
    assert ours.keys() == real.keys()
    assert [type(value) for value in ours] == [type(value) for value in real]
    for column in ("attributes", "events", "links", "status", "resource", "scope"):
        mine, theirs = shape(json.loads(ours[column])), shape(json.loads(real[column]))
        if operation == "chat" and column == "attributes":
            mine.remove(".gen_ai.response.model")  # which the alias makes worth knowing
        assert mine == theirs


def shape(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {inner for key, item in value.items() for inner in shape(item, f"{path}.{key}")}
    if isinstance(value, list):
        return {inner for item in value for inner in shape(item, f"{path}[]")} or {path}
    return {path}


def test_the_reader_finds_the_reply(tmp_path: Path) -> None:
    database = StudioDatabase(tmp_path / "studio.sqlite")
    asked = turn()
    database.export([call_row(asked)])
    database.export([agent_row(asked)])
    [reply] = replies(database.path)
    assert (reply.query, reply.answer, reply.agent) == (asked.question, asked.answer, "Tutor")
    assert (reply.model, reply.adapter) == ("demo-agent", "demo-agent@r0001")
    assert reply.conversation_id == "c1"
    assert [message["content"] for message in reply.history] == [SYSTEM_PROMPT, "What is 1 plus 1?", "2"]
    assert (reply.input_tokens, reply.output_tokens) == (30, 7)


def test_a_span_that_is_sent_again_replaces_its_row(tmp_path: Path) -> None:
    database = StudioDatabase(tmp_path / "studio.sqlite")
    row = call_row(turn())
    database.export([row])
    database.export([{**row, "name": "again"}])
    assert [tuple(r) for r in rows(database.path, "SELECT rowid, name FROM span_table")] == [(1, "again")]


async def ask_until(traffic: Traffic, count: int) -> None:
    asking = asyncio.create_task(traffic.run())
    await until(lambda: sum(traffic.answered_by.values()) >= count or asking.done(), "answers")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_every_answer_is_written_once(tmp_path: Path) -> None:
    app = FakeVllm()
    app.loaded["agent@r0001"] = "/adapters/r0001"
    database = StudioDatabase(tmp_path / "studio.sqlite")
    with replica(app) as url:
        httpx2.put(f"{url}/flywheel/alias", json={"alias": "agent", "target": "agent@r0001"})
        traffic = Traffic(url, "agent", database, rate=500, seed=1)
        await ask_until(traffic, 40)
    answered = sum(traffic.answered_by.values())
    found = replies(database.path)
    assert len(found) == answered
    assert {reply.adapter for reply in found} == set(traffic.answered_by) == {"agent@r0001"}
    assert all(solve(reply.query) is not None for reply in found)
    assert all(reply.history[0]["content"] == SYSTEM_PROMPT for reply in found)
    turns = [reply.turn for reply in found]
    assert turns.count(1) >= 1  # some dialogues have a second turn, with its history
    conversations = {reply.conversation_id for reply in found}
    assert len(conversations) == turns.count(0)
    for spans in rows(database.path, "SELECT group_concat(operationName) FROM span_table GROUP BY traceId"):
        assert spans[0] == "chat,invoke_agent"


async def test_a_server_that_is_gone_ends_the_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.users.MAX_FAILURES", 3)
    app = FakeVllm()
    app.faults["/v1/chat/completions"] = (500, "broken")
    with running(app) as url:
        traffic = Traffic(url, "agent", StudioDatabase(tmp_path / "studio.sqlite"), rate=100)
        with pytest.raises(TrafficError, match="3 questions to agent failed in a row"):
            await asyncio.wait_for(traffic.run(), 60)
