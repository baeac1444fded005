"""A trace on its way: which rows it has so far, whether one is missing, and since when nothing more has come.

Its rows are kept as they were read; nothing in them is looked at but ids and, where it matters, when they ended. That
is asked for once a trace may be done, so that a row of a long history costs no more than its place in a table.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash
from msgspec import Struct

from flywheel.studio.schema import Row, Schema, packed
from flywheel.trace import Mark


class Growing(Struct):
    """`raw` are the rows that were read in this pass, by number; `past` id and parent of those that were let go of;
    `known` is what the ledger remembers of the trace."""

    trace_id: str
    seen_ns: int
    last_rowid: int = 0
    raw: dict[int, Row] = {}
    past: dict[int, tuple[object, object]] = {}
    past_end_ns: int = 0
    known: Mark | None = None

    def __contains__(self, rowid: int) -> bool:
        return rowid in self.raw or rowid in self.past

    @property
    def rowids(self) -> tuple[int, ...]:
        return tuple(sorted(self.past.keys() | self.raw.keys() if self.past else self.raw))

    def add(self, rows: dict[int, Row]) -> None:
        """Take in rows, by number, the last one last."""
        self.raw |= rows
        self.last_rowid = max(self.last_rowid, next(reversed(rows)))

    def is_whole(self) -> bool:
        """Whether every parent that its rows name is there."""
        # What is no text cannot name one; it costs the row when the trace is told.
        rows = self.raw.values()
        missing = {row[3] for row in rows}
        missing.difference_update([row[1] for row in rows])
        if self.past:
            missing.update([parent for _, parent in self.past.values()])
            missing.difference_update([row[1] for row in rows], [span for span, _ in self.past.values()])
        return not any(type(parent) is bytes and parent for parent in missing)

    def ended_ns(self, schema: Schema) -> int:
        """When the last of its spans ended; 0 where that cannot be read."""
        return max([self.past_end_ns, *map(schema.ended_of, {row[4] for row in self.raw.values()})])

    def quiet_ns(self, schema: Schema, now_ns: int) -> int:
        """How long nothing ended or arrived. A client's clock that is ahead must not keep a trace open."""
        return max(0, now_ns - min(self.ended_ns(schema), self.seen_ns))

    def awaits(self, at: int, generation: int) -> bool:
        """Whether rows that are remembered lie further on."""
        if self.known is None:
            return False
        if self.known.generation == generation:
            return bool(self.known.rowids) and self.known.rowids[-1] > at
        return len(self.rowids) < len(self.known.rowids)

    def let_go(self, schema: Schema) -> None:
        """Keep no contents: they can have changed when they are needed."""
        if self.raw:
            self.past_end_ns = self.ended_ns(schema)
            self.past |= {rowid: (row[1], row[3]) for rowid, row in self.raw.items()}
            self.raw = {}

    def merge(self, other: Growing) -> None:
        """Take over what another scan has found of the same trace; both have let go."""
        self.past |= other.past
        self.past_end_ns = max(self.past_end_ns, other.past_end_ns)

    def packed_rows(self) -> dict[int, bytes]:
        """The rows that were read, packed."""
        return {rowid: packed(row) for rowid, row in self.raw.items()}


def digest_of(rows: Iterable[bytes]) -> int:
    """A hash of packed rows, whatever their order: 63 bits, never 0."""
    return (sum(map(xxhash.xxh3_64_intdigest, rows)) & (2**63 - 1)) or 1


def looks_the_same(mark: Mark, known: Mark) -> bool:
    """Whether a trace was told as it is now. One that has only lost rows is: what was told stays."""
    if not known.digest:
        return False
    if mark.digest == known.digest:
        # Told as unfinished, it is told again once it is given up.
        return mark.is_open or not known.is_open
    return not known.is_open and len(mark.rowids) < len(known.rowids)
