"""Reads one Studio database from a cursor on: page by page, each page's replies together with the cursor to store.

A pass goes on where the last one of this reader ended, as long as the caller stored what it was given; else it starts
from the cursor again. The cursor stays before the first row of every open trace, so that a restart reads those anew:
replies can be told twice then, and the ledger's keys make that harmless; none is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

from flywheel.config import IngestSettings
from flywheel.studio.database import BUSY_SECONDS, Database
from flywheel.studio.schema import Row, Schema
from flywheel.studio.traces import OpenTraces
from flywheel.trace import Batch, Cursor, DeadRow, Span, SpanKind

MAX_PAGE: Final = 500
FIRST_PAGE: Final = 100
SLOW_READ_MS: Final = 20.0
"""A page that took longer to read halves the next one: Studio's commits wait for ours."""
_LOOKUP: Final = 200
_MAX_DEPTH: Final = 64


class StudioReader:
    """One source. It opens the file when it is first read; one thread at a time may use it."""

    def __init__(self, path: Path, settings: IngestSettings, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self.path = path
        self._settings = settings
        self._database = Database(path, busy_seconds=busy_seconds)
        self._schema: Schema | None = None
        self._start = Cursor()
        self._given: Cursor | None = None
        self._restart(Cursor())

    @property
    def schema(self) -> str:
        """Which generation the database was when it was last read; empty before."""
        return self._schema.name if self._schema else ""

    @property
    def identity(self) -> str:
        """Device and inode of the file when it was last read; empty before."""
        return self._start.identity

    @property
    def fingerprint(self) -> str:
        """Hash of the span table's columns when it was last read; empty before."""
        return self._start.fingerprint

    @property
    def longest_read_ms(self) -> float:
        """The longest read transaction so far."""
        return self._database.longest_read_ms

    def close(self) -> None:
        self._database.close()

    def read(self, cursor: Cursor, *, now: datetime, final: bool = False) -> Iterator[Batch]:
        """One pass to the end of the table. Raises StudioError.

        Ask for the next batch only when the last one is stored: that is how the reader knows. `final` closes whole
        traces without waiting and tells incomplete ones as unfinished.
        """
        now_ns = int(now.timestamp() * 1e9)
        self._begin(cursor)
        # Whatever interrupts this pass, the next one starts from the stored cursor.
        self._given = None
        try:
            more = True
            while more:
                rows = self._page()
                more = len(rows) == self._limit
                batch = self._batch(rows, now_ns, more, final)
                self._adapt()
                yield batch
            self._given = batch.cursor
        finally:
            self._database.rest()

    def _begin(self, cursor: Cursor) -> None:
        """Find the file and decide where to go on."""
        identity = self._database.identity()
        self._schema, fingerprint = self._database.schema()
        if (cursor.identity, cursor.fingerprint) != (identity, fingerprint):
            generation = cursor.generation + 1 if cursor.identity else cursor.generation
            cursor = Cursor(0, identity, fingerprint, generation)
        if self._given != cursor:
            self._restart(cursor)

    def _restart(self, cursor: Cursor) -> None:
        self._start = cursor
        self._at = cursor.rowid
        self._limit = FIRST_PAGE
        self._traces = OpenTraces(self._settings)
        self._kinds: Counter[str] = Counter()
        # Behind a cursor that has moved there was an agent's span.
        self._agents_seen = cursor.rowid > 0

    def _page(self) -> list[Row]:
        assert self._schema is not None
        return self._database.ask(self._schema.page_sql, (self._at, self._limit))

    def _adapt(self) -> None:
        slow = self._database.last_read_ms > SLOW_READ_MS
        self._limit = max(1, self._limit // 2) if slow else min(MAX_PAGE, self._limit * 2)

    def _batch(self, rows: list[Row], now_ns: int, more: bool, final: bool) -> Batch:
        dead = self._take(rows, now_ns)
        self._look_up_parents(now_ns, more)
        told = self._traces.close(now_ns, self._at, more=more, final=final)
        return Batch(
            cursor=self._cursor(),
            replies=told.replies,
            dead=(*dead, *told.dead),
            open_traces=len(self._traces),
            warnings=() if more else self._warnings(),
        )

    def _take(self, rows: list[Row], now_ns: int) -> list[DeadRow]:
        assert self._schema is not None
        dead: list[DeadRow] = []
        for row in rows:
            read = self._schema.read(row)
            self._at = read.rowid
            if isinstance(read, DeadRow):
                dead.append(read)
                continue
            self._kinds[read.kind.value] += 1
            self._agents_seen = self._agents_seen or read.kind is SpanKind.AGENT
            self._traces.add(read, now_ns)
        return dead

    def _look_up_parents(self, now_ns: int, more: bool) -> None:
        """A missing parent may have been told in an earlier pass, be a dead row, or lie behind this page."""
        for _ in range(_MAX_DEPTH):
            asked = self._traces.unknown_parents(now_ns, self._at, more=more)
            if not asked:
                return
            self._traces.learn(asked, (row for row in self._rows_of(list(asked)) if row.span_id in asked), self._at)

    def _rows_of(self, ids: list[str]) -> Iterator[Span | DeadRow]:
        assert self._schema is not None
        for first in range(0, len(ids), _LOOKUP):
            some = ids[first : first + _LOOKUP]
            for row in self._database.ask(self._schema.lookup_sql(len(some)), some):
                yield self._schema.read(row)

    def _cursor(self) -> Cursor:
        if not self._agents_seen:
            # A database without agents is told about at every start, never passed over in silence.
            return self._start
        return replace(self._start, rowid=self._traces.resume_after(self._at))

    def _warnings(self) -> tuple[str, ...]:
        if self._agents_seen or not self._kinds:
            return ()
        found = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        return (
            f"{self.path} holds {self._kinds.total()} spans and not one of them is an agent's ({found}): "
            "only agents' replies become tasks. Trace the agent itself, with AgentScope's own tracing.",
        )
