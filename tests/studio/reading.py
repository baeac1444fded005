"""What the tests do with a reader: whole passes, and a ledger that stores as the real one does."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flywheel.config import IngestSettings
from flywheel.states import SkipReason
from flywheel.studio.reader import StudioReader
from flywheel.trace import Batch, Cursor, DeadRow, Reply

NOW = datetime(2026, 11, 21, 6, 0, tzinfo=UTC)
"""Later than every span of the fixtures by less than the patience with unfinished traces."""
MUCH_LATER = NOW + timedelta(days=1)


def read_all(
    path: Path, *, now: datetime = NOW, final: bool = True, settings: IngestSettings | None = None
) -> tuple[list[Reply], list[DeadRow], list[Batch]]:
    """One pass of a fresh reader from the beginning."""
    reader = StudioReader(path, settings or IngestSettings())
    try:
        batches = list(reader.read(Cursor(), now=now, final=final))
    finally:
        reader.close()
    return [r for b in batches for r in b.replies], [d for b in batches for d in b.dead], batches


def by_id(replies: list[Reply]) -> dict[str, Reply]:
    found = {reply.span_id: reply for reply in replies}
    assert len(found) == len(replies), "a reply was told twice"
    return found


@dataclass
class Ledger:
    """Stores batches like the real one: the first telling of a reply stays, only an unfinished one is replaced."""

    cursor: Cursor = field(default_factory=Cursor)
    replies: dict[str, Reply] = field(default_factory=dict)
    dead: dict[str, DeadRow] = field(default_factory=dict)
    tellings: int = 0

    def store(self, batch: Batch) -> None:
        for reply in batch.replies:
            self.tellings += 1
            known = self.replies.get(reply.span_id)
            if known is not None and known.skip is not SkipReason.UNFINISHED:
                assert reply == known, "a reply looked different when it was read again"
            self.replies[reply.span_id] = reply
        for row in batch.dead:
            self.dead[row.span_id] = row
        assert (batch.cursor.generation, batch.cursor.rowid) >= (self.cursor.generation, self.cursor.rowid)
        self.cursor = batch.cursor

    def pass_(self, reader: StudioReader, *, now: datetime = NOW, final: bool = False) -> None:
        for batch in reader.read(self.cursor, now=now, final=final):
            self.store(batch)
