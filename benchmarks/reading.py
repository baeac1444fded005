"""The two sides that are compared: a bare loop over the rows, and Flywheel. Each runs in a process of its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

Begin = Callable[[], None]


def floor(begin: Begin, path: Path) -> int:
    """Fetch the rows and columns that Flywheel reads and parse their attributes: the least that any reader does.

    One statement over the whole table, which nobody should do beside a live server. Returns the number of rows.
    """
    import orjson

    from flywheel.sources.studio.schema import SCHEMAS

    begin()
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    names = [row[1] for row in database.execute("PRAGMA table_info(span_table)")]
    # The generator copies Studio's own tables.
    schema = next(schema for schema in SCHEMAS.values() if schema.own_columns <= set(names))
    columns = schema.columns
    database.text_factory = bytes
    place = columns.index("attributes") + 1
    rows = 0
    select = f"SELECT rowid, {', '.join(columns)} FROM span_table ORDER BY rowid"  # noqa: S608 - constants
    for row in database.execute(select):
        orjson.loads(row[place])
        rows += 1
    database.close()
    return rows


def cold(begin: Begin, path: Path, folder: Path) -> int:
    """Flywheel's reading alone: rows to whole replies, as the ledger is given them, but nothing is stored.

    Returns the number of replies and dead rows.
    """
    from flywheel.config.file import parse
    from flywheel.records.trace import Cursor
    from flywheel.sources.studio_connector import StudioConnector
    from flywheel.store.kernel.database import Store

    async def run() -> int:
        config = parse({"state": {"dir": "state"}, "sources": [{"path": str(path)}]}, "the benchmark's", folder)
        # A ledger that remembers nothing is asked whether it knows the traces.
        store = await Store.open(config.state_dir)
        begin()
        connector = StudioConnector(path, config, store)
        try:
            return sum(
                [len(batch.entries) + len(batch.dead) async for batch in connector.read(1, Cursor(), final=True)]
            )
        finally:
            await connector.close()
            await store.close()

    return asyncio.run(run())


def ingest(begin: Begin, path: Path, folder: Path) -> dict[str, Any]:
    """Everything that `flywheel ingest` does: replies into the ledger, tasks into the state and their file.

    With a `folder` that it has filled before, it is a second pass. Returns the source's report.
    """
    from flywheel.config.file import parse
    from flywheel.sources.ingestion import Ingestion
    from flywheel.store.kernel.database import Store
    from flywheel.system.process import tune_process

    async def run() -> dict[str, Any]:
        config = parse({"state": {"dir": "state"}, "sources": [{"path": str(path)}]}, "the benchmark's", folder)
        begin()
        tune_process()
        store = await Store.open(config.state_dir)
        ingestion = Ingestion(store, config)
        try:
            (report,) = await ingestion.run(final=True)
        finally:
            await ingestion.close()
            await store.close()
        return report.as_json()

    return asyncio.run(run())
