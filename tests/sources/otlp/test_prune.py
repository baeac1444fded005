"""Old and erased spans leave the inbox; what a reader's cursor stands on never does."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import httpx2
import pytest

from flywheel.errors import ReceiverError
from flywheel.sources.otlp.inbox import erase, prune, traces_of
from flywheel.system.purge import purge
from tests.factories.planted import WORDS, planted_in
from tests.sources.otlp.exporting import BEGAN, PROTOBUF, ids, request, span, stored

FOREVER = 2**62


def ended(number: int) -> int:
    return BEGAN + number * 1_000_000 + 1_000_000_000


async def send(client: httpx2.AsyncClient, *numbers: int) -> None:
    body = request(*(span(n) for n in numbers)).SerializeToString()
    assert (await client.post("/v1/traces", content=body, headers=PROTOBUF)).status_code == 200


async def test_spans_that_ended_before_a_time_are_deleted(client: httpx2.AsyncClient, inbox: Path) -> None:
    # More than one transaction's worth, the old ones spread among the others.
    numbers = [n if n % 3 else n + 1_000_000 for n in range(1, 1801)]
    await send(client, *numbers)
    assert await prune(inbox, ended(1_000_000)) == 1200
    assert ids(inbox) == [n for n in numbers if n > 1_000_000]
    assert await prune(inbox, ended(1_000_000)) == 0
    await send(client, 5)
    assert ids(inbox)[-1] == 5


async def test_no_row_number_is_given_twice(client: httpx2.AsyncClient, inbox: Path) -> None:
    await send(client, 1, 2, 3)
    newest = rowids(inbox)[-1]
    assert await prune(inbox, FOREVER) == 2
    await send(client, 4)
    assert rowids(inbox) == [newest, newest + 1]


def rowids(inbox: Path) -> list[int]:
    connection = sqlite3.connect(inbox)
    found = [rowid for (rowid,) in connection.execute("SELECT rowid FROM span_table ORDER BY rowid")]
    connection.close()
    return found


async def test_an_empty_inbox_and_none(client: httpx2.AsyncClient, inbox: Path, tmp_path: Path) -> None:
    assert await prune(inbox, FOREVER) == 0
    assert stored(inbox) == []
    assert await prune(tmp_path / "none.sqlite", FOREVER) == 0
    assert not (tmp_path / "none.sqlite").exists()


async def test_erased_spans_keep_their_row_numbers_and_nothing_else(client: httpx2.AsyncClient, inbox: Path) -> None:
    said = {"gen_ai.conversation.id": WORDS[0], "user.id": WORDS[1], "text": WORDS[2] * 40}
    spans = [span(n, said if n % 3 else {"text": "other"}, trace=1 + n % 3) for n in range(1, 400)]
    body = request(*spans).SerializeToString()
    assert (await client.post("/v1/traces", content=body, headers=PROTOBUF)).status_code == 200
    before, others = rowids(inbox), [row for row in stored(inbox) if "other" in str(row)]
    assert len(others) == 133 and set(planted_in(inbox.parent)) == set(WORDS)
    by_name, by_user = await traces_of(inbox, [WORDS[0]], "", []), await traces_of(inbox, [], WORDS[1], [])
    assert by_name == by_user and len(by_name) == 2
    assert await erase(inbox, by_name) == 266
    assert await erase(inbox, by_name) == 0
    assert purge(inbox, 5.0)
    assert planted_in(inbox.parent) == {}
    assert rowids(inbox) == before
    assert [row for row in stored(inbox) if "other" in str(row)] == others
    # The receiver goes on with the connection that it has.
    await send(client, 1000)
    assert rowids(inbox) == [*before, before[-1] + 1]


async def test_what_is_no_inbox_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_text("no database" * 1000)
    with pytest.raises(ReceiverError, match="cannot prune the inbox"):
        await prune(path, FOREVER)
