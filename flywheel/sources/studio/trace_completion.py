"""Decides whether a trace is complete, so that replies are made of it, and says when an open one will be.

An open trace is known here by the numbers, ids and parents of its rows only: their contents are read once it is
complete. Nothing here touches the database, and deciding changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from msgspec import Struct

from flywheel.records.trace import Checkpoint
from flywheel.sources.studio.schema import Schema

FOREVER_NS: Final = 2**63

CallSizes = Callable[[Collection[str]], Mapping[str, int]]
"""Looks up how many bytes recorded calls have, by request id, as far as they are there."""


class CompleteTrace(Struct, array_like=True, frozen=True):
    """A trace whose rows are to be read and extracted: the span id of each row by its number, as they were scanned.

    `known` is the checkpoint that the ledger has. `is_open` if spans are missing that may still arrive. If it
    `may_wait`, it is not extracted while a call that it names is missing.
    """

    trace_id: str
    spans: dict[int, bytes]
    generation: int = 0
    known: Checkpoint | None = None
    is_open: bool = False
    may_wait: bool = False


class OpenTrace(Struct):
    """`ids` has span id and parent id of each row by its number. `ends` are the end times that have not been parsed
    yet, `end_ns` the latest of the others. `known` is the checkpoint that the ledger has. If the trace is complete,
    but for calls that its rows name, `missing_calls` has their request ids."""

    trace_id: str
    seen_ns: int
    last_rowid: int = 0
    ids: dict[int, tuple[bytes, object]] = {}
    ends: list[object] = []
    end_ns: int = 0
    known: Checkpoint | None = None
    missing_calls: frozenset[str] = frozenset()

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
        self.ends += other.ends
        self.end_ns = max(self.end_ns, other.end_ns)


class TraceCompletion(Struct, frozen=True):
    """How long traces are waited for.

    A trace with all of its parents is complete when it has been quiet for `settle_ns`, another one is given up after
    `abandon_ns`. With `call_sizes`, it then awaits the calls that it names, until `calls_wait_ns` after its end.
    """

    schema: Schema
    settle_ns: int
    abandon_ns: int
    calls_wait_ns: int
    call_sizes: CallSizes | None = None

    def is_complete(self, trace: OpenTrace, now_ns: int, *, is_near: bool = False) -> bool:
        """Whether a trace is handed on. One without all parents is not given up while rows follow soon behind its
        last one (`is_near`)."""
        if trace.is_whole():
            is_complete = not self.settle_ns or trace.quiet_ns(self.schema, now_ns) >= self.settle_ns
        else:
            is_complete = not is_near and trace.quiet_ns(self.schema, now_ns) >= self.abandon_ns
        return is_complete and (self.has_calls(trace) or not self.may_wait(trace, now_ns))

    def may_wait(self, trace: OpenTrace, now_ns: int) -> bool:
        """Whether calls that a complete trace names may still be pulled."""
        return self.call_sizes is not None and trace.quiet_ns(self.schema, now_ns) < self.calls_wait_ns

    def has_calls(self, trace: OpenTrace) -> bool:
        """Whether the calls that were missing are there now."""
        if not trace.missing_calls or self.call_sizes is None:
            return True
        return len(self.call_sizes(trace.missing_calls)) == len(trace.missing_calls)

    def due_ns(self, trace: OpenTrace) -> int:
        """When an open trace is complete if nothing more arrives, nanoseconds since 1970."""
        if trace.missing_calls:
            wait_ns = max(self.settle_ns, self.calls_wait_ns)
        else:
            wait_ns = self.settle_ns if trace.is_whole() else self.abandon_ns
        return min(trace.ended_ns(self.schema), trace.seen_ns) + wait_ns
