"""A trace on its way: which rows it has so far, whether one is missing, and since when nothing more has come.

Rows are packed and hashed as soon as they are read, while they are at hand; nothing in them is looked at but their
ids. When they ended is asked for where it matters only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash
from msgspec import Struct

from flywheel.sources.studio.row import Row, packed
from flywheel.sources.studio.schema import Schema
from flywheel.trace import Mark

hash_of: Final = xxhash.xxh3_64_intdigest


class Growing(Struct):
    """`ids` has id and parent of each row by its number, `raw` the packed rows that were read in this pass, `held`
    their bytes and `hashes` the sum of their hashes, `size` the bytes of all rows, `ends` when those ended whose end
    was not looked at yet; `known` is what the ledger remembers of the trace."""

    trace_id: str
    seen_ns: int
    last_rowid: int = 0
    ids: dict[int, tuple[object, object]] = {}
    raw: dict[int, bytes] = {}
    held: int = 0
    size: int = 0
    hashes: int = 0
    ends: list[object] = []
    end_ns: int = 0
    known: Mark | None = None

    @property
    def rowids(self) -> tuple[int, ...]:
        return tuple(sorted(self.ids))

    def add(self, rows: Iterable[Row]) -> None:
        """Take in rows in their order."""
        rowid = size = 0
        for row in rows:
            rowid = row[0]
            self.ids[rowid] = (row[1], row[3])
            self.ends.append(row[4])
            self.raw[rowid] = data = packed(row)
            self.hashes += hash_of(data)
            size += len(data)
        self.held += size
        self.size += size
        self.last_rowid = max(self.last_rowid, rowid)

    def add_again(self, row: Row) -> None:
        """Take in a row whose contents were let go of."""
        self.raw[row[0]] = data = packed(row)
        self.hashes += hash_of(data)
        self.held += len(data)

    @property
    def digest(self) -> int:
        return _digest(self.hashes)

    def let_go(self) -> None:
        """Keep no contents: they can have changed when they are needed."""
        self.raw = {}
        self.held = 0
        self.hashes = 0

    def is_whole(self) -> bool:
        """Whether every parent that its rows name is there."""
        missing = {parent for _, parent in self.ids.values()}
        missing.difference_update([span for span, _ in self.ids.values()])
        # What is no text cannot name one; it costs the row when the trace is told.
        return not any(type(parent) is bytes and parent for parent in missing)

    def ended_ns(self, schema: Schema) -> int:
        """When the last of its spans ended; 0 where that cannot be read."""
        if self.ends:
            self.end_ns = max(self.end_ns, *map(schema.ended_of, self.ends))
            self.ends = []
        return self.end_ns

    def quiet_ns(self, schema: Schema, now_ns: int) -> int:
        """How long nothing ended or arrived. A client's clock that is ahead must not keep a trace open."""
        return max(0, now_ns - min(self.ended_ns(schema), self.seen_ns))

    def awaits(self, at: int, generation: int) -> bool:
        """Whether rows that are remembered lie further on."""
        if self.known is None:
            return False
        if self.known.generation == generation:
            return bool(self.known.rowids) and self.known.rowids[-1] > at
        return len(self.ids) < len(self.known.rowids)

    def merge(self, other: Growing) -> None:
        """Take over what another scan has found of the same trace."""
        self.ids |= other.ids
        self.size += other.size
        self.ends += other.ends
        self.end_ns = max(self.end_ns, other.end_ns)


def digest_of(rows: Iterable[bytes]) -> int:
    """A hash of packed rows, whatever their order: 63 bits, never 0."""
    return _digest(sum(map(hash_of, rows)))


def _digest(hashes: int) -> int:
    return (hashes & (2**63 - 1)) or 1


def looks_the_same(mark: Mark, known: Mark) -> bool:
    """Whether a trace was told as it is now. One that has only lost rows is: what was told stays."""
    if not known.digest:
        return False
    if mark.digest == known.digest:
        # Told as unfinished, it is told again once it is given up.
        return mark.is_open or not known.is_open
    return not known.is_open and len(mark.rowids) < len(known.rowids)
