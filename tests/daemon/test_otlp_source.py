"""Spans that agents send to the daemon become the same tasks as those that Studio keeps."""

from __future__ import annotations

from pathlib import Path

import httpx

from flywheel.config import parse
from flywheel.daemon.ingestion import Ingestion
from flywheel.store.database import Store
from tests.daemon.following import Following, exported, status, until
from tests.otlp.exporting import PROTOBUF, fixture, request_of
from tests.studio.writer import labels

LISTEN = "127.0.0.1:0"


async def test_spans_are_received_closed_and_made_into_tasks(tmp_path: Path) -> None:
    config = parse(
        {
            "state": {"dir": "state"},
            "sources": [{"type": "otlp", "listen": LISTEN}],
            "ingest": {"settle_seconds": 0},
        },
        "test",
        tmp_path,
    )
    wanted = {
        label["span_id"]
        for label in labels("new_v2")
        if label["user_visible"] and label["answer_in_span"] and label["kind"] != "interrupted"
    }
    rows = fixture("new_v2")
    async with Following(config) as following:
        url = following._sources._receivers[0].url
        async with httpx.AsyncClient() as client:
            for first in range(0, len(rows), 40):
                content = request_of(rows[first : first + 40]).SerializeToString()
                # Sent twice, as an exporter does that did not hear the answer.
                for _ in range(2):
                    answer = await client.post(url, content=content, headers=PROTOBUF)
                    assert answer.status_code == 200
        await until(lambda: wanted <= set(exported(config)), "the tasks of what was sent")
    lines = exported(config)
    assert sorted(lines) == sorted(wanted)
    (source,) = (await status(config))["sources"]
    assert (source["type"], source["condition"]) == ("otlp", "ok")


async def test_an_address_where_nothing_was_received_yet_is_no_trouble(tmp_path: Path) -> None:
    raw = {"state": {"dir": "state"}, "sources": [{"type": "otlp", "listen": LISTEN}]}
    config = parse(raw, "test", tmp_path)
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    assert await ingestion.run(final=True) == []
    await ingestion.close()
    await store.close()
