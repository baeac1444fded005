"""Reads everything a database holds now, trace by trace, for comparing the ledger with its source.

It shares none of the reader's decisions about what is new, closed or known. The ids of all rows are listed first,
then the rows of each trace are read, both in pages of a few milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from flywheel.records.trace import DeadRow
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.schema import is_id, packed, schema_of, unnamed

_ID_COLUMNS: Final = ("id", "traceId", "NULL", "NULL", "NULL", "NULL", "NULL")
"""In place of the columns that a page is measured by, NULL."""
_ROWS_AT_ONCE: Final = 1_000
_FIRST_ROWS: Final = 50
_BYTES_AT_ONCE: Final = 8 * 1024 * 1024
"""An estimate from the rows of the last group, as the size of rows is not known before they are read."""


class TraceGroup(NamedTuple):
    """The packed rows of some traces, by trace id and row number, and rows whose ids cannot be read."""

    traces: dict[str, dict[int, bytes]]
    unnamed: list[DeadRow]


class AuditReader:
    """A scan of one database; creating it opens the file. One thread at a time may use it. Raises StudioError."""

    def __init__(self, path: Path, copies: Path | None = None) -> None:
        """`copies` is that of `Database`."""
        self.database = Database(path, copies=copies)
        self._at = 0
        self._traces: dict[bytes, array[int]] = {}
        self._unnamed: array[int] = array("q")
        self.identity = self.database.identity()
        try:
            self.schema, self.fingerprint = schema_of(self.database)
        except BaseException:
            self.database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.database.close()

    def list_rows(self) -> None:
        """List the rows of each trace. A second call continues behind the last row. Raises StudioError."""
        more = True
        while more:
            rows, more, _ = self.database.page(_ID_COLUMNS, self._at)
            for rowid, span_id, trace_id, *_ in rows:
                if is_id(span_id) and is_id(trace_id):
                    self._traces.setdefault(trace_id, array("q")).append(rowid)
                else:
                    self._unnamed.append(rowid)
                self._at = rowid

    def groups(self) -> Iterator[TraceGroup]:
        """Every listed trace once, in the order in which they began, a few at a time. Raises StudioError."""
        some: list[bytes] = []
        size = 0
        most = _FIRST_ROWS
        for trace_id, rowids in self._traces.items():
            if some and size + len(rowids) > most:
                group = TraceGroup(self._rows_of(some), [])
                read = sum(len(row) for rows in group.traces.values() for row in rows.values())
                yield group
                del group
                most = max(1, min(2 * most, _ROWS_AT_ONCE, _BYTES_AT_ONCE * size // max(read, 1)))
                some, size = [], 0
            some.append(trace_id)
            size += len(rowids)
        yield TraceGroup(self._rows_of(some), unnamed(self.database.rows(self.schema.columns, self._unnamed)))

    def again(self, trace_ids: Iterable[str]) -> TraceGroup:
        """Some traces as they are now. Raises StudioError."""
        return TraceGroup(self._rows_of([trace.encode() for trace in trace_ids]), [])

    def _rows_of(self, trace_ids: list[bytes]) -> dict[str, dict[int, bytes]]:
        by_trace: dict[bytes, dict[int, bytes]] = {trace_id: {} for trace_id in trace_ids}
        rowids = (rowid for trace_id in trace_ids for rowid in self._traces.get(trace_id, ()))
        for row in self.database.rows(self.schema.columns, rowids):
            # The number may belong to a row of another trace by now.
            if row[2] in by_trace:
                by_trace[row[2]][row[0]] = packed(row)
        return {trace_id.decode(): rows for trace_id, rows in by_trace.items() if rows}
