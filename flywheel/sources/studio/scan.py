"""One way through the span table: where it is, and the traces on that way that are not done yet.

A trace is known here by its rows' numbers, ids and parents only. Nothing is parsed: that costs ten times as much as
reading, and happens once a trace is whole. This module never touches the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from flywheel.sources.studio.open_traces import Growing, digest_of
from flywheel.sources.studio.row import Row, RowError, identifiers, packed, shown
from flywheel.sources.studio.schema import Schema
from flywheel.trace import DeadRow

FOREVER_NS: Final = 2**63
NEAR_ROWS: Final = 100
"""While more rows follow, a trace with one so close to the end may go on there."""
FAR_ROWS: Final = 5_000
"""While more rows follow, a trace is not given up within so many rows of its last one."""
HELD_BYTES: Final = 16 * 1024 * 1024
"""Of rows that are kept until their traces are done. Beyond it those of the largest are read again then."""


class Scan:
    """A way through the table, begun after row `start`."""

    def __init__(self, start: int, schema: Schema) -> None:
        self.at = start
        self.anchor = ""
        self.schema = schema
        self.growing: dict[str, Growing] = {}
        self._near: dict[str, Growing] = {}
        self._new: dict[str, Growing] = {}
        self._grown: dict[str, Growing] = {}
        self._held = 0

    def add(self, rows: Sequence[Row], now_ns: int) -> list[DeadRow]:
        """Take in a page; rows whose ids cannot be read are dead at once."""
        if not rows:
            return []
        self.at = rows[-1][0]
        self.anchor = shown(rows[-1][1])
        dead: list[DeadRow] = []
        traces = _by_trace(rows)
        if not (_are_plain([row[1] for row in rows]) and _are_plain(traces)):
            dead = unnamed(rows)
            buried = {row.rowid for row in dead}
            traces = _by_trace(row for row in rows if row[0] not in buried)
        for name, found in traces.items():
            trace = name.decode()
            growing = self.growing.get(trace)
            if growing is None:
                growing = Growing(trace, now_ns)
                self.growing[trace] = self._new[trace] = growing
            # What is wrong with anything else costs the row when its trace is told.
            growing.add(found)
            growing.seen_ns = now_ns
            self._hold(growing)
        return dead

    def take_new(self) -> dict[str, Growing]:
        """The traces that were met for the first time since the last call."""
        new, self._new = self._new, {}
        return new

    def take_grown(self) -> list[Growing]:
        """The traces that have grown since the last call and are still growing."""
        grown, self._grown = self._grown, {}
        return [growing for trace, growing in grown.items() if trace in self.growing]

    def join(self, growing: Growing, rows: Iterable[Row]) -> None:
        """Add rows of an earlier part of the table, which are its, to a trace of this scan."""
        if found := [row for row in rows if is_name(row[1])]:
            growing.add(found)
            self._hold(growing)

    def adopt(self, growing: Growing) -> None:
        """Take over a trace that another scan met."""
        mine = self.growing.setdefault(growing.trace_id, growing)
        if mine is not growing:
            mine.merge(growing)
        mine.let_go()
        self._near[mine.trace_id] = self._grown[mine.trace_id] = mine

    def _hold(self, growing: Growing) -> None:
        """A trace has grown: keep what was read of it as long as there is room for it."""
        self._near[growing.trace_id] = self._grown[growing.trace_id] = growing
        self._held += growing.held
        if self._held > HELD_BYTES:
            # About so much: what was let go of since, and what has grown more than once, is counted still.
            held = sorted(self._near.values(), key=lambda one: one.held)
            self._held = sum(one.held for one in held)
            while self._held > HELD_BYTES // 2:
                largest = held.pop()
                self._held -= largest.held
                largest.let_go()

    def candidates(self, *, more: bool) -> Iterator[Growing]:
        """The traces that may be done: all of them at the end, else those that the scan has just left behind."""
        if not more:
            yield from list(self.growing.values())
            return
        left = {name: growing for name, growing in self._near.items() if growing.last_rowid <= self.at - NEAR_ROWS}
        yield from left.values()
        for name, growing in list(self.growing.items()):
            # In the order they were met last: the first that is still near ends the look.
            if self.at - growing.last_rowid < FAR_ROWS:
                break
            if name not in left:  # where numbers are missing a trace is left behind and far away at once
                yield growing

    def wait(self, growing: Growing) -> None:
        """Not done: look again when it grows or at the end. Its rows are read again then: they can have changed."""
        growing.let_go()
        if self._near.pop(growing.trace_id, None) is not None:
            self.growing[growing.trace_id] = self.growing.pop(growing.trace_id)

    def drop(self, growing: Growing) -> None:
        """Done."""
        self.growing.pop(growing.trace_id, None)
        self._near.pop(growing.trace_id, None)

    def next_due(self, settle_ns: int, abandon_ns: int) -> int:
        """When a trace that is waited for is done if nothing more comes, nanoseconds since 1970."""
        return min(
            (
                min(growing.ended_ns(self.schema), growing.seen_ns)
                + (settle_ns if growing.is_whole() else abandon_ns)
                for growing in self.growing.values()
            ),
            default=FOREVER_NS,
        )

    def rest(self) -> None:
        """The pass is over: what was read may change before the next one."""
        for growing in self.growing.values():
            growing.let_go()


def is_name(value: object) -> bool:
    """Whether a value can be an id: a text that is not empty."""
    if not isinstance(value, bytes) or not value:
        return False
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def unnamed(rows: Iterable[Row]) -> list[DeadRow]:
    """The rows whose id or trace id cannot be read, as dead ones."""
    return [_unnamed(row) for row in rows if not (is_name(row[1]) and is_name(row[2]))]


def _by_trace(rows: Iterable[Row]) -> dict[Any, list[Row]]:
    found: defaultdict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        found[row[2]].append(row)
    return found


def _are_plain(values: Collection[Any]) -> bool:
    """Whether all values are names in ASCII, as nearly all are; found out without looking at each."""
    try:
        return all(values) and b"".join(values).isascii()
    except TypeError:
        return False


def _unnamed(row: Row) -> DeadRow:
    """Its name must be the same when it is met again elsewhere."""
    why = ""
    try:
        identifiers(row)
    except UnicodeDecodeError:
        why = "an id is not UTF-8"
    except RowError as error:
        why = str(error)
    name = shown(row[1]) or f"unnamed-{digest_of([packed(row)]):016x}"
    return DeadRow(row[0], name, shown(row[2]), why, shown(row[5])[:500])
