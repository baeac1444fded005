"""Decides whether a trace is complete, so that replies are made of it, and says when an open one will be.

An open trace is known here by the numbers, ids and parents of its rows only. Parsing them takes ten times as long as
reading and happens once a trace is complete. Nothing here touches the database, and deciding changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Final

from msgspec import Struct

from flywheel.records.trace import Checkpoint
from flywheel.sources.studio.database import Row
from flywheel.sources.studio.schema import Schema, hash_of, packed

FOREVER_NS: Final = 2**63

CallSizes = Callable[[Collection[str]], Mapping[str, int]]
"""Looks up how many bytes recorded calls have, by request id, as far as they are there."""


class OpenTrace(Struct):
    """`ids` has span id and parent id of each row by its number. `rows` has the packed rows read in this pass, `held`
    their bytes and `hashes` the sum of their hashes. `size` is the bytes of all rows, `ends` the end times that have
    not been parsed yet, `end_ns` the latest of the others. `known` is the checkpoint that the ledger has.
    `call_references` has the request ids that the rows name, and `awaits_calls` says that the trace is complete, but
    for one of their calls."""

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
        self.hashes += hash_of(data)
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


class Completeness(Enum):
    """What is known of an open trace."""

    COMPLETE = "complete"
    """All parents are there and it is quiet, or it was given up: it is handed on."""
    AWAITS_CALLS = "awaits calls"
    """It is complete, but for a recorded call that may still be pulled."""
    INCOMPLETE = "incomplete"
    """Spans may still arrive."""


class TraceCompletion(Struct, frozen=True):
    """How long traces are waited for.

    A trace with all of its parents is complete when it has been quiet for `settle_ns`, another one after
    `abandon_ns`. With `call_sizes`, it then awaits the calls that it names, until `calls_wait_ns` after its end.
    """

    schema: Schema
    settle_ns: int
    abandon_ns: int
    calls_wait_ns: int
    call_sizes: CallSizes | None = None

    def decide(self, trace: OpenTrace, now_ns: int, *, is_near: bool = False) -> Completeness:
        """Whether a trace is complete. One without all parents is not given up while rows follow soon behind its last
        one (`is_near`)."""
        if trace.is_whole():
            is_complete = not self.settle_ns or trace.quiet_ns(self.schema, now_ns) >= self.settle_ns
        else:
            is_complete = not is_near and trace.quiet_ns(self.schema, now_ns) >= self.abandon_ns
        if not is_complete:
            return Completeness.INCOMPLETE
        may_wait = self.call_sizes is not None and bool(trace.call_references)
        if may_wait and trace.quiet_ns(self.schema, now_ns) < self.calls_wait_ns and not self.has_calls(trace):
            return Completeness.AWAITS_CALLS
        return Completeness.COMPLETE

    def has_calls(self, trace: OpenTrace) -> bool:
        """Whether the calls that a trace names are there."""
        assert self.call_sizes is not None
        return len(self.call_sizes(trace.call_references)) == len(trace.call_references)

    def due_ns(self, trace: OpenTrace) -> int:
        """When an open trace is complete if nothing more arrives, nanoseconds since 1970."""
        if trace.awaits_calls:
            wait_ns = max(self.settle_ns, self.calls_wait_ns)
        else:
            wait_ns = self.settle_ns if trace.is_whole() else self.abandon_ns
        return min(trace.ended_ns(self.schema), trace.seen_ns) + wait_ns
