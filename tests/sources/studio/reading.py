"""What the tests do with a reader: whole passes, and a ledger that stores as the real one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flywheel.config import IngestSettings
from flywheel.sources.studio.conversion import tell
from flywheel.sources.studio.reader import StudioReader
from flywheel.sources.studio.schema import named
from flywheel.sources.studio.step import Step
from flywheel.states import SkipReason
from flywheel.trace import Cursor, DeadRow, Mark, Reply, Selection

NOW = datetime(2026, 11, 21, 6, 0, tzinfo=UTC)
"""Later than every span of the fixtures by less than the patience with unfinished traces."""
MUCH_LATER = NOW + timedelta(days=1)


def read_all(
    path: Path,
    *,
    now: datetime = NOW,
    final: bool = True,
    settings: IngestSettings | None = None,
    selection: Selection | None = None,
) -> tuple[list[Reply], list[DeadRow], list[Step]]:
    """One pass of a fresh reader from the beginning."""
    reader = StudioReader(path, settings or IngestSettings())
    ledger = Ledger(selection or Selection())
    steps: list[Step] = []
    replies: list[Reply] = []
    try:
        for step in reader.read(Cursor(), ledger, now=now, final=final):
            steps.append(step)
            replies += ledger.store(step, reader.schema)
    finally:
        reader.close()
    return replies, list(ledger.dead.values()), steps


def by_id(replies: list[Reply]) -> dict[str, Reply]:
    found = {reply.span_id: reply for reply in replies}
    assert len(found) == len(replies), "a reply was told twice"
    return found


@dataclass
class Ledger:
    """Stores steps like the real one. `changes` has what looked different when it was told again."""

    selection: Selection = field(default_factory=Selection)
    cursor: Cursor = field(default_factory=Cursor)
    remembered: dict[str, Mark] = field(default_factory=dict)
    replies: dict[str, Reply] = field(default_factory=dict)
    dead: dict[str, DeadRow] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    tellings: int = 0

    def open_marks(self) -> Sequence[Mark]:
        return [mark for mark in self.remembered.values() if mark.is_open]

    def marks(self, trace_ids: Sequence[str]) -> Mapping[str, Mark]:
        return {trace: self.remembered[trace] for trace in trace_ids if trace in self.remembered}

    def store(self, step: Step, schema: str) -> list[Reply]:
        told: list[Reply] = []
        dead = list(step.dead)
        for trace in step.traces:
            replies, rows = tell(named(schema), trace.rows, self.selection, is_open=trace.is_open, kinds=Counter())
            told += replies
            dead += rows
        for reply in told:
            self.tellings += 1
            known = self.replies.get(reply.span_id)
            if known is not None and known.skip is not SkipReason.UNFINISHED and known != reply:
                self.changes.append(reply.span_id)
            self.replies[reply.span_id] = reply
        self.dead |= {row.span_id: row for row in dead}
        self.remembered |= {mark.trace_id: mark for mark in step.marks}
        assert (step.cursor.generation, step.cursor.rowid) >= (self.cursor.generation, self.cursor.rowid)
        self.cursor = step.cursor
        return told

    def keep(self, steps: Iterator[Step], reader: StudioReader) -> list[Step]:
        done = []
        for step in steps:
            self.store(step, reader.schema)
            done.append(step)
        return done

    def pass_(self, reader: StudioReader, *, now: datetime = NOW, final: bool = False) -> list[Step]:
        return self.keep(reader.read(self.cursor, self, now=now, final=final), reader)

    def sweep(self, reader: StudioReader, *, now: datetime = NOW, last: int | None = None) -> list[Step]:
        return self.keep(reader.sweep(self, now=now, last=last), reader)
