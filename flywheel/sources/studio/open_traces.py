"""Open traces: the rows read so far of each trace, whether all of its parents are there, and how long it is quiet.

A trace is known here by the numbers, ids and parents of its rows only. Rows are packed and hashed when they are read;
parsing takes ten times as long as reading and happens once a trace is complete. Nothing here touches the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import xxhash
from msgspec import Struct

from flywheel.records.request_id import recorded_in
from flywheel.records.trace import Checkpoint, DeadRow
from flywheel.sources.studio.database import Row, shown
from flywheel.sources.studio.schema import RowError, Schema, packed, text_in

FOREVER_NS: Final = 2**63
NEAR_ROWS: Final = 100
"""While more rows follow, a trace with a row this close to the end of the scan may continue."""
FAR_ROWS: Final = 5_000
"""While more rows follow, an incomplete trace is not abandoned within this many rows of its last one."""
HELD_BYTES: Final = 16 * 1024 * 1024
"""Contents kept until their traces are closed. Above it, the largest are dropped and read again when needed."""

_hash: Final = xxhash.xxh3_64_intdigest
DIGEST_BITS: Final = 2**63 - 1


class OpenTrace(Struct):
    """`ids` has span id and parent id of each row by its number. `rows` has the packed rows read in this pass, `held`
    their bytes and `hashes` the sum of their hashes. `size` is the bytes of all rows, `ends` the end times that have
    not been parsed yet, `end_ns` the latest of the others. `known` is the checkpoint that the ledger has. `marks` has
    the request ids that the rows name, and `awaits_calls` says that one of them has not been pulled."""

    trace_id: str
    seen_ns: int
    last_rowid: int = 0
    ids: dict[int, tuple[object, object]] = {}
    rows: dict[int, bytes] = {}
    held: int = 0
    size: int = 0
    hashes: int = 0
    ends: list[object] = []
    end_ns: int = 0
    known: Checkpoint | None = None
    call_references: set[str] = set()
    awaits_calls: bool = False

    def restore(self, row: Row) -> None:
        """Add the contents of a row again after they were dropped."""
        self.rows[row[0]] = data = packed(row)
        self.hashes += _hash(data)
        self.held += len(data)

    def drop_contents(self) -> None:
        """Keep no contents. They are read again when they are needed, as they may have changed."""
        self.rows = {}
        self.held = 0
        self.hashes = 0

    def is_whole(self) -> bool:
        """Whether every parent that the rows name is there."""
        missing = {parent for _, parent in self.ids.values()}
        missing.difference_update([span for span, _ in self.ids.values()])
        # A parent id that is not text makes its row dead when the trace is extracted.
        return not any(type(parent) is bytes and parent for parent in missing)

    def ended_ns(self, schema: Schema) -> int:
        """When the last span ended; 0 if that cannot be parsed."""
        if self.ends:
            self.end_ns = max(self.end_ns, *map(schema.ended_ns, self.ends))
            self.ends = []
        return self.end_ns

    def quiet_ns(self, schema: Schema, now_ns: int) -> int:
        """Time since a span ended or arrived. A client's clock that is fast does not keep a trace open."""
        return max(0, now_ns - min(self.ended_ns(schema), self.seen_ns))

    def awaits(self, at: int, generation: int) -> bool:
        """Whether the checkpoint names rows behind row `at`."""
        if self.known is None:
            return False
        if self.known.generation == generation:
            return bool(self.known.rowids) and self.known.rowids[-1] > at
        return len(self.ids) < len(self.known.rowids)

    def merge(self, other: OpenTrace) -> None:
        """Add what another scan has found of the same trace."""
        self.ids |= other.ids
        self.size += other.size
        self.ends += other.ends
        self.end_ns = max(self.end_ns, other.end_ns)
        self.call_references |= other.call_references


class Scan:
    """A scan of the span table that begins behind row `start`, and the traces that are open on it."""

    def __init__(self, start: int, schema: Schema, anchor: str = "") -> None:
        self.at = start
        self.anchor = anchor
        self.schema = schema
        self.traces: dict[str, OpenTrace] = {}
        self.new: dict[str, OpenTrace] = {}
        """Traces met for the first time, whose checkpoints have not been looked up."""
        self.grown: dict[str, OpenTrace] = {}
        """Traces with new rows, whose checkpoints have not been written."""
        self._near: dict[str, OpenTrace] = {}
        self._held = 0

    def add(self, rows: Sequence[Row], now_ns: int) -> list[DeadRow]:
        """Add a page; returns the rows whose ids cannot be read."""
        if not rows:
            return []
        self.at = rows[-1][0]
        self.anchor = shown(rows[-1][1])
        try:
            ids = {row[2] for row in rows} | {row[1] for row in rows}
            # Nearly all pages have ASCII ids only, which one check proves.
            dead = [] if all(ids) and b"".join(ids).isascii() else unnamed(rows)
        except TypeError:
            dead = unnamed(rows)
        excluded = {row.rowid for row in dead}
        by_trace: defaultdict[Any, list[Row]] = defaultdict(list)
        for row in rows:
            if not excluded or row[0] not in excluded:
                by_trace[row[2]].append(row)
        for name, found in by_trace.items():
            trace_id = name.decode()
            trace = self.traces.get(trace_id)
            if trace is None:
                self.traces[trace_id] = self.new[trace_id] = trace = OpenTrace(trace_id, now_ns)
            trace.seen_ns = now_ns
            self.extend(trace, found)
        return dead

    def extend(self, trace: OpenTrace, rows: Iterable[Row]) -> None:
        """Add rows to a trace, in order of their numbers. When too many bytes are held, drop the contents of the
        largest traces."""
        rowid = size = 0
        for row in rows:
            rowid = row[0]
            trace.ids[rowid] = (row[1], row[3])
            trace.ends.append(row[4])
            trace.rows[rowid] = data = packed(row)
            trace.hashes += _hash(data)
            size += len(data)
            if found := recorded_in(data):
                trace.call_references.update(found)
        trace.held += size
        trace.size += size
        trace.last_rowid = max(trace.last_rowid, rowid)
        self._near[trace.trace_id] = self.grown[trace.trace_id] = trace
        self._held += trace.held
        if self._held > HELD_BYTES:
            # An estimate: contents dropped since, and traces that have grown more than once, are still counted.
            held = sorted(self._near.values(), key=lambda one: one.held)
            self._held = sum(one.held for one in held)
            while self._held > HELD_BYTES // 2:
                largest = held.pop()
                self._held -= largest.held
                largest.drop_contents()

    def adopt(self, trace: OpenTrace) -> None:
        """Take over a trace that another scan met."""
        mine = self.traces.setdefault(trace.trace_id, trace)
        if mine is not trace:
            mine.merge(trace)
        mine.drop_contents()
        self._near[mine.trace_id] = self.grown[mine.trace_id] = mine

    def candidates(self, *, more: bool) -> Iterator[OpenTrace]:
        """Traces that may be complete: all of them at the end, else those that the scan has just left behind."""
        if not more:
            yield from list(self.traces.values())
            return
        left = {name: trace for name, trace in self._near.items() if trace.last_rowid <= self.at - NEAR_ROWS}
        yield from left.values()
        for name, trace in list(self.traces.items()):
            # In the order in which they were last met: the first one that is near ends the search.
            if self.at - trace.last_rowid < FAR_ROWS:
                break
            if name not in left:  # across a gap in the numbers a trace becomes near and far at once
                yield trace

    def wait(self, trace: OpenTrace) -> None:
        """Keep a trace open. It becomes a candidate again when it grows, or at the end."""
        trace.drop_contents()
        if self._near.pop(trace.trace_id, None) is not None:
            self.traces[trace.trace_id] = self.traces.pop(trace.trace_id)

    def close(self, trace: OpenTrace) -> None:
        """The trace is no longer open on this scan."""
        self.traces.pop(trace.trace_id, None)
        self._near.pop(trace.trace_id, None)

    def next_due(self, settle_ns: int, abandon_ns: int, calls_wait_ns: int) -> int:
        """When the first open trace can be closed if nothing more arrives, nanoseconds since 1970."""

        def patience_ns(trace: OpenTrace) -> int:
            if trace.awaits_calls:
                return max(settle_ns, calls_wait_ns)
            return settle_ns if trace.is_whole() else abandon_ns

        return min(
            (min(trace.ended_ns(self.schema), trace.seen_ns) + patience_ns(trace) for trace in self.traces.values()),
            default=FOREVER_NS,
        )


def digest_of(rows: Iterable[bytes]) -> int:
    """A hash of packed rows in any order: 63 bits, never 0."""
    return (sum(map(_hash, rows)) & DIGEST_BITS) or 1


def is_id(value: object) -> bool:
    """Whether a value can be an id: a text that is not empty."""
    try:
        return bool(text_in(value, "id", required=True))
    except (RowError, UnicodeDecodeError):
        return False


def unnamed(rows: Iterable[Row]) -> list[DeadRow]:
    """The rows whose span id or trace id cannot be read, as dead rows."""
    found: list[DeadRow] = []
    for row in rows:
        try:
            text_in(row[1], "id", required=True)
            text_in(row[2], "traceId", required=True)
        except (RowError, UnicodeDecodeError) as error:
            why = str(error) if isinstance(error, RowError) else "an id is not UTF-8"
            # The same row gets the same name in every scan.
            name = shown(row[1]) or f"unnamed-{digest_of([packed(row)]):016x}"
            found.append(DeadRow(row[0], name, shown(row[2]), why, shown(row[5])[:500]))
    return found
