"""Writes new replies into a database as Studio does: a transaction per export, beside whoever reads."""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Final

from benchmarks.databases import Database, insert_sql
from benchmarks.templates import Row, Talk, Truth, short_id

BUSY_SECONDS: Final = 5.0
"""How long Studio waits for a reader."""


class Writer:
    """One connection that adds usual dialogues, each in a conversation of its own."""

    def __init__(self, database: Database, *, seed: int, plain: bool = False) -> None:
        self._talk = Talk(database.schema, plain=plain, special=False)
        self._rng = random.Random(seed)
        self._connection = sqlite3.connect(database.path, timeout=BUSY_SECONDS, isolation_level=None)
        self._runs = len(self._connection.execute("PRAGMA table_info(run_table)").fetchall())

    def close(self) -> None:
        self._connection.close()

    def prepare(self, spans: int) -> tuple[list[Row], list[str], Truth]:
        """The rows of whole dialogues with `spans` spans, their conversations, and what they tell."""
        drawn = self._talk.draw(self._rng, spans)
        runs = [short_id(self._rng) for _ in drawn]
        now = int(time.time())
        rows = [
            row
            for dialogue, run in zip(drawn, runs, strict=True)
            for row in dialogue.fill(self._rng, now, None if dialogue.source == "new_v2" else run)
        ]
        return rows, runs, sum((dialogue.truth for dialogue in drawn), Truth())

    def commit(self, rows: list[Row], runs: list[str]) -> None:
        """One transaction."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(
            insert_sql("run_table", self._runs), ((run, "benchmark", run, moment, "", 1, "done") for run in runs)
        )
        self._connection.executemany(insert_sql("span_table", len(rows[0])), rows)
        self._connection.execute("COMMIT")


def copy(database: Database, folder: Path, name: str) -> Database:
    """A copy that may be written to."""
    path = folder / f"{name}.sqlite"
    shutil.copyfile(database.path, path)
    return Database(path, database.schema, database.truth)
