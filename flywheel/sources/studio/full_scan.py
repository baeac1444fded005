"""Everything a database holds now, trace by trace, whatever was read of it before.

For comparing the ledger with its source, so nothing here shares the reader's ideas of what is new, settled or known:
first the ids of all rows are listed, then the rows of each trace fetched. Both in pages of a few milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from flywheel.sources.studio.database import Database
from flywheel.sources.studio.row import TABLE, Row, packed
from flywheel.sources.studio.scan import is_name, unnamed
from flywheel.sources.studio.table import schema_of
from flywheel.trace import DeadRow

# A page is measured by the values in the places of attributes and events, which are not wanted here.
_IDS_SQL: Final = (
    f"SELECT rowid, id, traceId, NULL, NULL, NULL, NULL, NULL FROM {TABLE} "  # noqa: S608 - a constant
    "WHERE rowid > ? ORDER BY rowid"
)
_ROWS_AT_ONCE: Final = 1_000
_FIRST_ROWS: Final = 50
_BYTES_AT_ONCE: Final = 8 * 1024 * 1024
"""Of rows as large as those of the last group were: how large the next ones are is not known before they are read."""


@dataclass(frozen=True, slots=True)
class WholeTrace:
    """All rows that a trace has, packed, by number."""

    trace_id: str
    rows: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Group:
    """Some traces, and the rows that belong to none because an id cannot be read."""

    traces: tuple[WholeTrace, ...]
    unnamed: tuple[DeadRow, ...] = ()


class Census:
    """One database, looked at once; making it opens the file. One thread at a time may use it. Raises StudioError."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path)
        self._at = 0
        self._traces: dict[bytes, array[int]] = {}
        self._unnamed: array[int] = array("q")
        self.identity = self._database.identity()
        try:
            self._schema, self.fingerprint = schema_of(self._database)
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    @property
    def schema(self) -> str:
        return self._schema.name

    def list_rows(self) -> None:
        """Note which rows each trace has; called again, it goes on behind the last one. Raises StudioError."""
        more = True
        while more:
            rows, more, _ = self._database.page(_IDS_SQL, (self._at,))
            for rowid, span_id, trace_id, *_ in rows:
                if is_name(span_id) and is_name(trace_id):
                    self._traces.setdefault(trace_id, array("q")).append(rowid)
                else:
                    self._unnamed.append(rowid)
                self._at = rowid

    def groups(self) -> Iterator[Group]:
        """Every listed trace once, in the order they began, a few at a time. Raises StudioError."""
        some: list[bytes] = []
        size = 0
        most = _FIRST_ROWS
        for trace_id, rowids in self._traces.items():
            if some and size + len(rowids) > most:
                group = Group(self._whole(some))
                read = sum(len(row) for trace in group.traces for row in trace.rows.values())
                yield group
                del group
                most = max(1, min(2 * most, _ROWS_AT_ONCE, _BYTES_AT_ONCE * size // max(read, 1)))
                some, size = [], 0
            some.append(trace_id)
            size += len(rowids)
        yield Group(self._whole(some), tuple(unnamed(self._rows(self._unnamed))))

    def again(self, trace_ids: Iterable[str]) -> Group:
        """Some traces as they are by now. Raises StudioError."""
        return Group(self._whole([trace.encode() for trace in trace_ids]))

    def id_at(self, rowid: int) -> str | None:
        """The id of the row of that number; None if there is none. Raises StudioError."""
        return self._database.id_at(rowid)

    def _whole(self, trace_ids: list[bytes]) -> tuple[WholeTrace, ...]:
        found: dict[bytes, dict[int, bytes]] = {trace_id: {} for trace_id in trace_ids}
        for row in self._rows(rowid for trace_id in trace_ids for rowid in self._traces.get(trace_id, ())):
            # The number may have been given to a row of another trace in the meantime.
            if row[2] in found:
                found[row[2]][row[0]] = packed(row)
        return tuple(WholeTrace(trace_id.decode(), rows) for trace_id, rows in found.items())

    def _rows(self, rowids: Iterable[int]) -> Iterator[Row]:
        return self._database.rows(self._schema, rowids)
