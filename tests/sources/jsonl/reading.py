"""Reading a file of lines as ingestion does: each batch's cursor is stored with what it brought."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flywheel.records.task import Batch, Entry
from flywheel.records.trace import Cursor, DeadRow
from flywheel.sources.jsonl.reader import JsonlReader


@dataclass
class Stored:
    """What came out of a file so far, in the order it came."""

    path: Path
    cursor: Cursor = field(default_factory=Cursor)
    entries: list[Entry] = field(default_factory=list)
    dead: list[DeadRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def take(self, batch: Batch) -> None:
        self.cursor = batch.cursor or self.cursor
        self.entries += batch.entries
        self.dead += batch.dead
        self.warnings += batch.warnings

    def read(self, reader: JsonlReader | None = None, *, final: bool = False) -> list[str]:
        """One pass by `reader`, or by one of its own; the questions that were new."""
        before = len(self.entries)
        own = reader or JsonlReader(self.path)
        try:
            for batch in own.read(self.cursor, final=final):
                self.take(batch)
        finally:
            if reader is None:
                own.close()
        return [question(entry) for entry in self.entries[before:]]


def question(entry: Entry) -> str:
    return str(json.loads(entry.line)["main_query"])


def line(number: int, **values: Any) -> bytes:
    task = {"question": f"What is {number} plus 1?", "answer": str(number + 1), **values}
    return json.dumps(task).encode() + b"\n"


def asked(*numbers: int) -> list[str]:
    return [f"What is {number} plus 1?" for number in numbers]
