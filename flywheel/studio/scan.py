"""One way through the span table: where it is, and the traces on that way that are not done yet.

A trace is known here by its rows' numbers, ids and parents only. Nothing is parsed: that costs ten times as much as
reading, and happens once a trace is whole. This module never touches the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from flywheel.studio.schema import Row, RowError, Schema, identifiers, packed, shown
from flywheel.trace import DeadRow, Mark

NEAR_ROWS: Final = 100
"""While more rows follow, a trace with one so close to the end may go on there."""
FAR_ROWS: Final = 5_000
"""While more rows follow, a trace is not given up within so many rows of its last one."""


@dataclass(slots=True)
class Growing:
    """A trace on the way. `rows` has id and parent of each row, `raw` the packed ones that were read in this pass,
    `known` what the ledger remembers of the trace."""

    trace_id: str
    seen_ns: int
    ended_ns: int = 0
    last_end: object = None
    last_rowid: int = 0
    rows: dict[int, tuple[str, str]] = field(default_factory=dict)
    raw: dict[int, bytes] = field(default_factory=dict)
    known: Mark | None = None

    def is_whole(self) -> bool:
        """Whether every parent that its rows name is there."""
        ids = {span_id for span_id, _ in self.rows.values()}
        return all(not parent or parent in ids for _, parent in self.rows.values())

    def quiet_ns(self, now_ns: int) -> int:
        """How long nothing ended or arrived. A client's clock that is ahead must not keep a trace open."""
        return max(0, now_ns - min(self.ended_ns, self.seen_ns))

    def awaits(self, at: int, generation: int) -> bool:
        """Whether rows that are remembered lie further on."""
        if self.known is None:
            return False
        if self.known.generation == generation:
            return bool(self.known.rowids) and self.known.rowids[-1] > at
        return len(self.rows) < len(self.known.rowids)


class Scan:
    """A way through the table, begun after row `start`."""

    def __init__(self, start: int) -> None:
        self.at = start
        self.anchor = ""
        self.growing: dict[str, Growing] = {}
        self._near: dict[str, Growing] = {}
        self._new: dict[str, Growing] = {}
        self._grown: dict[str, Growing] = {}

    def add(self, rows: Sequence[Row], schema: Schema, now_ns: int) -> list[DeadRow]:
        """Take in a page; rows whose ids cannot be read are dead at once."""
        dead: list[DeadRow] = []
        for row in rows:
            if (why := self._add(row, schema, now_ns)) is not None:
                dead.append(why)
        if rows:
            self.at = rows[-1][0]
            self.anchor = shown(rows[-1][1])
        return dead

    def _add(self, row: Row, schema: Schema, now_ns: int) -> DeadRow | None:
        rowid, span_id, trace_id, parent, ended = row[:5]
        try:
            span, trace = span_id.decode(), trace_id.decode()
            if not span or not trace:
                return _unnamed(row)
        except (AttributeError, UnicodeDecodeError):
            return _unnamed(row)
        growing = self.growing.get(trace)
        if growing is None:
            growing = self.growing[trace] = self._new[trace] = Growing(trace, now_ns)
        # What is wrong with anything else costs the row when its trace is told.
        growing.rows[rowid] = (span, parent.decode(errors="replace") if type(parent) is bytes else "")
        growing.raw[rowid] = packed(row)
        growing.seen_ns = now_ns
        if ended != growing.last_end:
            growing.last_end = ended
            growing.ended_ns = max(growing.ended_ns, schema.ended_of(ended))
        growing.last_rowid = max(growing.last_rowid, rowid)
        self._near[trace] = self._grown[trace] = growing
        return None

    def take_new(self) -> dict[str, Growing]:
        """The traces that were met for the first time since the last call."""
        new, self._new = self._new, {}
        return new

    def take_grown(self) -> list[Growing]:
        """The traces that have grown since the last call and are still growing."""
        grown, self._grown = self._grown, {}
        return [growing for trace, growing in grown.items() if trace in self.growing]

    def join(self, growing: Growing, rows: Iterable[Row], schema: Schema) -> None:
        """Add rows of an earlier part of the table to a trace."""
        for row in rows:
            self._add(row, schema, growing.seen_ns)

    def adopt(self, growing: Growing) -> None:
        """Take over a trace that another scan met."""
        mine = self.growing.setdefault(growing.trace_id, growing)
        if mine is not growing:
            mine.rows |= growing.rows
            mine.ended_ns = max(mine.ended_ns, growing.ended_ns)
        self._near[mine.trace_id] = self._grown[mine.trace_id] = mine

    def candidates(self, *, more: bool) -> Iterator[Growing]:
        """The traces that may be done: all of them at the end, else those that the scan has just left behind."""
        if not more:
            yield from list(self.growing.values())
            return
        for growing in list(self._near.values()):
            if growing.last_rowid <= self.at - NEAR_ROWS:
                yield growing
        for growing in list(self.growing.values()):
            # In the order they were met last: the first that is still near ends the look.
            if self.at - growing.last_rowid < FAR_ROWS:
                break
            yield growing

    def wait(self, growing: Growing) -> None:
        """Not done: look again when it grows or at the end. Its rows are read again then: they can have changed."""
        growing.raw.clear()
        if self._near.pop(growing.trace_id, None) is not None:
            self.growing[growing.trace_id] = self.growing.pop(growing.trace_id)

    def drop(self, growing: Growing) -> None:
        """Done."""
        self.growing.pop(growing.trace_id, None)
        self._near.pop(growing.trace_id, None)

    def rest(self) -> None:
        """The pass is over: what was read may change before the next one."""
        for growing in self.growing.values():
            growing.raw.clear()


def digest_of(rows: Iterable[bytes]) -> int:
    """A hash of packed rows, whatever their order: 63 bits, never 0."""
    return (sum(map(xxhash.xxh3_64_intdigest, rows)) & (2**63 - 1)) or 1


def _unnamed(row: Row) -> DeadRow:
    """A row whose id or trace id cannot be read. Its name must be the same when it is met again elsewhere."""
    why = ""
    try:
        identifiers(row)
    except UnicodeDecodeError:
        why = "an id is not UTF-8"
    except RowError as error:
        why = str(error)
    name = shown(row[1]) or f"unnamed-{digest_of([packed(row)]):016x}"
    return DeadRow(row[0], name, shown(row[2]), why, shown(row[5])[:500])
