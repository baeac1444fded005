"""Traces of which nothing is stored but a count: those that refuse recording, and those of excluded names."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.records.privacy import PrivateNames
from flywheel.records.trace import ReplySelection
from flywheel.sources.otlp import inbox as inboxes
from flywheel.sources.otlp.inbox import COLUMNS, Inbox, private_traces, prune
from flywheel.sources.otlp.receiver import Receiver
from flywheel.sources.otlp.rows import rows_of
from flywheel.sources.spans.replies import replies_of
from flywheel.sources.studio.schema import SCHEMAS, packed
from tests.sources.otlp.exporting import PROTOBUF, request, span, stored

NAMES = PrivateNames(frozenset({"ana", "None"}), frozenset({"c-1", "None"}), frozenset({"Secretary", "None"}))
SECRET = "the password is swordfish"
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": SECRET * 300}


@asynccontextmanager
async def posting(inbox: Path) -> AsyncIterator[httpx2.AsyncClient]:
    receiver = Receiver("127.0.0.1:0", inbox, private=NAMES)
    await receiver.start()
    try:
        async with httpx2.AsyncClient(base_url=receiver.url.removesuffix("/v1/traces"), timeout=60) as client:
            yield client
    finally:
        await receiver.stop()


async def post(client: httpx2.AsyncClient, *spans: Any) -> None:
    body = request(*spans).SerializeToString()
    answer = await client.post("/v1/traces", content=body, headers=PROTOBUF)
    assert answer.status_code == 200


def files(inbox: Path) -> bytes:
    return b"".join(each.read_bytes() for each in inbox.parent.glob(f"{inbox.name}*") if "-shm" not in each.name)


PRIVATE: list[dict[str, Any]] = [
    {"flywheel.record": False},
    {"flywheel.record": "No"},
    {"flywheel.record": 0},
    {"user.id": "ana"},
    {"enduser.id": "ana"},
    {"langfuse.user.id": "ana", "langfuse.observation.type": "span"},
    {"gen_ai.conversation.id": "c-1"},
    {"session.id": "c-1", "gen_ai.conversation.id": "other"},
    {"gen_ai.agent.name": "Secretary"},
    {"agent.name": "Secretary", "openinference.span.kind": "AGENT"},
]


@pytest.mark.parametrize("attributes", PRIVATE)
async def test_nothing_of_a_private_trace_is_stored_whatever_comes_first(
    tmp_path: Path, attributes: dict[str, Any]
) -> None:
    inbox = tmp_path / "inbox.sqlite"
    async with posting(inbox) as client:
        await post(client, span(2, CHAT, parent=1), span(3, CHAT, trace=2))
        assert len(stored(inbox)) == 2
        # The root comes last.
        await post(client, span(1, attributes))
        await post(client, span(4, CHAT, parent=1), span(5, {**CHAT, "x": "5"}, trace=2))
    assert [int(row["id"], 16) for row in stored(inbox) if row["attributes"] != "{}"] == [3, 5]
    async with posting(inbox) as client:  # after a restart
        await post(client, span(6, CHAT, parent=1), span(2, CHAT, parent=1))
    assert [int(row["id"], 16) for row in stored(inbox)] == [2, 3, 5]
    assert private_traces(inbox) == 1


async def test_what_was_stored_of_a_private_trace_is_overwritten(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox.sqlite"
    async with posting(inbox) as client:
        await post(client, *(span(at, CHAT, parent=1) for at in range(2, 9)))
        assert SECRET.encode() in files(inbox)
        await post(client, span(1, {"flywheel.record": False}))
        assert SECRET.encode() not in files(inbox)
        await post(client, span(1, {"flywheel.record": False}))
    assert private_traces(inbox) == 1
    # A reader finds rows, and no reply and nothing dead.
    schema = SCHEMAS["generation 2"]
    rows = {
        number: packed((number, *(v.encode() if isinstance(v, str) else v for v in (row[c] for c in schema.columns))))
        for number, row in enumerate(stored(inbox), 1)
    }
    assert replies_of(schema, rows, ReplySelection(), is_open=False, kinds=Counter()) == ([], [])
    assert await prune(inbox, 2**62) == 6


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"flywheel.record": True},
        {"flywheel.record": "yes"},
        {"user.id": "anabel"},
        {"user.id": "c-1", "gen_ai.conversation.id": "ana"},
        {"gen_ai.agent.name": "secretary"},
    ],
)
def test_other_traces_are_stored(attributes: dict[str, Any]) -> None:
    rows = rows_of(request(span(1, attributes)), NAMES)
    assert (len(rows.accepted), rows.private) == (1, set())


async def test_so_many_private_traces_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "MAX_REMEMBERED", 3)
    box = Inbox(tmp_path / "inbox.sqlite")
    rows = rows_of(request(*(span(at, trace=at) for at in range(1, 7)))).accepted
    ids = [row[COLUMNS.index("traceId")] for row in rows]
    started = int(rows[0][COLUMNS.index("startTimeUnixNano")])
    for each in [*ids, ids[-1]]:
        await box.store([], [(each, started)])
    await box.store(rows)
    await box.close()
    assert [int(row["id"], 16) for row in stored(box.path)] == [1, 2, 3]
    assert private_traces(box.path) == 6
    with sqlite3.connect(box.path) as connection:
        hashes = connection.execute("SELECT hash FROM private_runs").fetchall()
        assert len(hashes) == 3
    connection.close()
    assert not {bytes.fromhex(each) for each in ids} & {each for (each,) in hashes}
    assert private_traces(tmp_path / "none.sqlite") == 0
