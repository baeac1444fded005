"""A span sent here is stored as Studio stored it, and read as the reply that Studio's own row is read as."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from google.protobuf.json_format import MessageToDict

from flywheel.sources.otlp.inbox import COLUMNS
from tests.sources.otlp.exporting import JSON, PROTOBUF, fixture, request_of, stored
from tests.sources.studio.reading import read_all
from tests.sources.studio.writer import DATA

JSON_COLUMNS = ("attributes", "events", "status", "resource")
IDS = {"traceId", "spanId", "parentSpanId"}


def hexadecimal(value: Any) -> Any:
    """Protobuf's JSON with OTLP's ids."""
    if isinstance(value, list):
        return [hexadecimal(item) for item in value]
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex().upper() if key in IDS else hexadecimal(item)
            for key, item in value.items()
        }
    return value


async def send_fixture(client: httpx2.AsyncClient, name: str, headers: dict[str, str]) -> None:
    rows = fixture(name)
    for first in range(0, len(rows), 100):
        request = request_of(rows[first : first + 100])
        if headers is JSON:
            body = json.dumps(hexadecimal(MessageToDict(request, use_integers_for_enums=True))).encode()
        else:
            body = request.SerializeToString()
        answer = await client.post("/v1/traces", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.content in (b"", b"{}")
        assert answer.headers["content-type"].startswith(headers["Content-Type"])


@pytest.mark.parametrize("name", ["new_v1", "new_v2"])
@pytest.mark.parametrize("headers", [PROTOBUF, JSON], ids=["protobuf", "json"])
async def test_replayed_spans_become_the_rows_and_replies_of_studio(
    client: httpx2.AsyncClient, inbox: Path, name: str, headers: dict[str, str]
) -> None:
    await send_fixture(client, name, headers)

    ours, theirs = stored(inbox), fixture(name)
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        for column in JSON_COLUMNS:
            our[column], their[column] = json.loads(our[column]), json.loads(their[column])
        assert our == {column: their[column] for column in COLUMNS}

    replies, dead, _ = read_all(inbox)
    genuine, _, _ = read_all(DATA / f"{name}.sqlite")
    assert len(replies) > 90
    assert replies == genuine
    assert dead == []
