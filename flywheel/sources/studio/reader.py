"""Reads one Studio database: what is new since the cursor, and what was changed in place.

Reading is a scan from the cursor on, page by page. A trace whose rows are all there, and which has been quiet for
long enough, is handed out with its rows as they are; what it means is found out elsewhere (`conversion`). Each step
comes with the cursor and the marks to store with it, so that a restart goes on where the last stored step ended.

A sweep is a second scan, over rows that were seen before. A trace that looks as it did when it was told is passed
over by its digest; one that was changed, or was missed, is handed out like a new one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from flywheel.config import IngestSettings
from flywheel.sources.studio.database import BUSY_SECONDS, Database
from flywheel.sources.studio.extraction import Teller
from flywheel.sources.studio.open_traces import Growing
from flywheel.sources.studio.row import Row
from flywheel.sources.studio.scan import FAR_ROWS, FOREVER_NS, Scan
from flywheel.sources.studio.schema import Schema
from flywheel.sources.studio.step import Memory, Step
from flywheel.sources.studio.table import schema_of
from flywheel.sources.studio.uncommitted import FreshMarks
from flywheel.trace import Cursor, DeadRow, Mark

STEP_ROWS: Final = 500
STEP_BYTES: Final = 4 * 1024 * 1024
"""Pages are put together to steps of about so much, twice as many where nearly all were told: handing one on costs as
much for few traces as for many."""
TOLD_BYTES: Final = 2 * STEP_BYTES
"""Of the traces in one step, a larger one alone: where many end together, steps follow without reading more."""


class StudioReader:
    """One source. It opens the file when it is first read; one thread at a time may use it."""

    def __init__(self, path: Path, settings: IngestSettings, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self.path = path
        self._settle_ns = int(settings.settle_seconds * 1e9)
        self._abandon_ns = int(settings.abandon_seconds * 1e9)
        self._database = Database(path, busy_seconds=busy_seconds)
        self._schema: Schema | None = None
        self._cursor = Cursor()
        self._tail: Scan | None = None
        self._token: object = None
        self.due_ns = FOREVER_NS
        """When a trace that is waited for is done if nothing more comes, nanoseconds since 1970."""
        self._fresh = FreshMarks()
        self._teller = Teller(self._fetch, self._fresh)

    @property
    def schema(self) -> str:
        """Which generation the database was when it was last read; empty before."""
        return self._schema.name if self._schema else ""

    @property
    def longest_read_ms(self) -> float:
        """The longest read transaction so far."""
        return self._database.longest_read_ms

    def close(self) -> None:
        self._database.close()
        self.forget()

    def forget(self) -> None:
        """What was handed out was not stored: the next pass begins at the cursor it is given."""
        self._tail = None
        self._token = None
        self._fresh.clear()

    def rows_in_all(self) -> int:
        """The number of the last row, which is about how many there are. Raises StudioError."""
        return self._database.last_rowid()

    def read(self, cursor: Cursor, memory: Memory, *, now: datetime, final: bool = False) -> Generator[Step]:
        """What is new, to the end of the table; nothing at all where nothing has changed. Raises StudioError.

        Each step must be stored before the pass after this one, or `forget` be called. `final` closes whole traces
        without waiting and tells incomplete ones as they are.
        """
        now_ns = int(now.timestamp() * 1e9)
        token = self._database.change_token()
        changed = token != self._token or self._tail is None
        if not changed and not final and now_ns < self.due_ns:
            return
        if changed:
            self._begin(cursor, memory, now_ns)
            # Opening the file can be what made the token differ.
            token = self._database.change_token()
        self._token = None
        scan = self._tail
        assert scan is not None and self._schema is not None
        stored = False
        try:
            more = changed
            while True:
                dead: list[DeadRow] = []
                read = 0
                if more:
                    dead, read, more = self._pages(scan, now_ns)
                self._recall(scan, memory)
                yield from self._steps(scan, dead, read, now_ns, more=more, final=final)
                if not more:
                    break
            scan.rest()
            self.due_ns = scan.next_due(self._settle_ns, self._abandon_ns)
            self._token = token
            stored = True
        finally:
            self._database.rest()
            if not stored:
                # The last step was not asked to be followed by another: it may not have been stored.
                self.forget()

    def sweep(self, memory: Memory, *, now: datetime, last: int | None = None) -> Generator[Step]:
        """Compare what was read before with what is there now: the `last` rows, or all. Raises StudioError.

        It ends early when a pass has started over in the meantime. To be called after a pass has ended.
        """
        tail = self._tail
        if tail is None or self._schema is None:
            return
        now_ns = int(now.timestamp() * 1e9)
        scan = Scan(0 if last is None else max(0, tail.at - last), self._schema)
        stored = False
        try:
            more = True
            while more and self._tail is tail:
                _, read, more = self._pages(scan, now_ns, last=tail.at)
                self._recall(scan, memory)
                yield from self._swept(scan, tail, read, now_ns, more=more)
            stored = True
        finally:
            self._database.rest()
            if not stored:
                self.forget()

    def _pages(self, scan: Scan, now_ns: int, last: int | None = None) -> tuple[list[DeadRow], int, bool]:
        """Take in the rows of a step, none behind `last`: which are dead, how many, whether there are more."""
        dead: list[DeadRow] = []
        read = size = 0
        more = True
        most = STEP_ROWS if last is None else 2 * STEP_ROWS
        while more and read < most and size < STEP_BYTES:
            rows, more, bytes_read = self._database.page(scan.schema.page_sql, (scan.at,))
            if last is not None and rows and rows[-1][0] > last:
                rows, more = [row for row in rows if row[0] <= last], False
            dead += scan.add(rows, now_ns)
            read += len(rows)
            size += bytes_read
        return dead, read, more

    def _begin(self, cursor: Cursor, memory: Memory, now_ns: int) -> None:
        """Find the file and decide where to go on."""
        identity = self._database.identity()
        self._schema, fingerprint = schema_of(self._database)
        same = (cursor.identity, cursor.fingerprint) == (identity, fingerprint)
        if not same or not self._holds(cursor):
            generation = cursor.generation + 1 if cursor.identity else cursor.generation
            cursor = Cursor(0, identity, fingerprint, generation)
        here = (
            self._tail is not None and self._tail.at == cursor.rowid and self._cursor.generation == cursor.generation
        )
        self._cursor = cursor
        if self._tail is not None and here:
            self._tail.schema = self._schema
        else:
            self._fresh.clear()
            self._tail = Scan(cursor.rowid, self._schema)
            self._tail.anchor = cursor.anchor
            self._reopen(self._tail, memory, now_ns)

    def _holds(self, cursor: Cursor) -> bool:
        """Whether the last row that was read is still where it was; else rows were renumbered or put back."""
        return not cursor.rowid or self._database.id_at(cursor.rowid) == cursor.anchor

    def _reopen(self, scan: Scan, memory: Memory, now_ns: int) -> None:
        """Pick up the traces that were open when an earlier process ended, or that are to be looked at again."""
        for mark in memory.open_marks():
            if mark.generation == self._cursor.generation:
                growing = Growing(mark.trace_id, now_ns, known=mark)
                scan.growing[mark.trace_id] = growing
                self._join(scan, growing, mark)
                growing.seen_ns = growing.ended_ns(scan.schema)

    def _fetch(self, rowids: Iterable[int], traces: set[str]) -> Iterator[Row]:
        """Rows by number, those of other traces left out."""
        assert self._schema is not None
        names = {trace.encode() for trace in traces}
        return (row for row in self._database.rows(self._schema, rowids) if row[2] in names)

    def _recall(self, scan: Scan, memory: Memory) -> None:
        """What is remembered of the traces that this scan has just met, and their rows from before it."""
        new = scan.take_new()
        marks = {trace: mark for trace in new if (mark := self._fresh.get(trace)) is not None}
        if asked := [trace for trace in new if trace not in marks]:
            marks |= memory.marks(asked)
        for trace, mark in marks.items():
            growing = new[trace]
            growing.known = mark
            if mark.generation == self._cursor.generation:
                self._join(scan, growing, mark)

    def _join(self, scan: Scan, growing: Growing, mark: Mark) -> None:
        """Add the rows of a trace that are remembered from before this scan."""
        behind = [rowid for rowid in mark.rowids if rowid <= scan.at and rowid not in growing.ids]
        scan.join(growing, self._fetch(behind, {mark.trace_id}))

    def _steps(
        self, scan: Scan, dead: Sequence[DeadRow], rows: int, now_ns: int, *, more: bool, final: bool
    ) -> Iterator[Step]:
        """What is done by now. What a step has no room for is marked as waited for, until the next one tells it."""
        done: list[Growing] = []
        partial: list[Growing] = []
        size = 0
        settle_ns = 0 if final else self._settle_ns
        for growing in scan.candidates(more=more):
            if more and growing.awaits(scan.at, self._cursor.generation):
                continue
            if growing.is_whole():
                is_done = not settle_ns or growing.quiet_ns(scan.schema, now_ns) >= settle_ns
            else:
                far = not more or scan.at - growing.last_rowid >= FAR_ROWS
                is_done = far and growing.quiet_ns(scan.schema, now_ns) >= self._abandon_ns
                if not is_done and final and not more:
                    partial.append(growing)
                    size += growing.size
            if is_done:
                done.append(growing)
                size += growing.size
            else:
                scan.wait(growing)
            if size >= TOLD_BYTES:
                yield self._step(scan, done, partial, dead, rows, more=True)
                done, partial, dead, rows, size = [], [], (), 0, 0
        yield self._step(scan, done, partial, dead, rows, more=more)

    def _step(
        self,
        scan: Scan,
        done: Sequence[Growing],
        partial: Sequence[Growing],
        dead: Sequence[DeadRow],
        rows: int,
        *,
        more: bool,
    ) -> Step:
        traces, marks = self._teller.tell(scan, done, partial, self._cursor.generation)
        waiting = self._teller.newly_open(scan, self._cursor.generation)
        self._cursor = replace(self._cursor, rowid=scan.at, anchor=scan.anchor)
        return Step(self._cursor, traces, (*marks, *waiting), tuple(dead), len(scan.growing), rows, more)

    def _swept(self, scan: Scan, tail: Scan, rows: int, now_ns: int, *, more: bool) -> Iterator[Step]:
        done: list[Growing] = []
        size = 0
        for growing in scan.candidates(more=more):
            if more and growing.awaits(scan.at, self._cursor.generation):
                continue
            if growing.trace_id in tail.growing or not self._is_told(scan, growing, now_ns):
                # The pass waits for this one.
                tail.adopt(growing)
                self.due_ns = 0
                scan.drop(growing)
            else:
                done.append(growing)
                size += growing.size
            if size >= TOLD_BYTES:
                traces, marks = self._teller.tell(scan, done, (), self._cursor.generation)
                yield Step(self._cursor, traces, marks, (), len(tail.growing), rows, True)
                done, rows, size = [], 0, 0
        traces, marks = self._teller.tell(scan, done, (), self._cursor.generation)
        yield Step(self._cursor, traces, marks, (), len(tail.growing), rows, more)

    def _is_told(self, scan: Scan, growing: Growing, now_ns: int) -> bool:
        return (
            growing.known is not None
            or growing.is_whole()
            or growing.quiet_ns(scan.schema, now_ns) >= self._abandon_ns
        )
