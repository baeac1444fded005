"""Finds the complete traces of one Studio database: in new rows behind the cursor (a pass), and in those that were
read before (a re-scan).

Only ids, parents and end times are read here. A trace whose rows are all there, and which has been quiet for long
enough, is handed on with the numbers of its rows: `extraction` reads them and makes replies of them. Each step has
the cursor and the checkpoints of open traces to store with these replies, so that a restart continues behind the last
step that was stored.

A re-scan hands on the traces that were read before, and those that were missed. Extraction compares their digests
with their checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from flywheel.config.ingest import IngestSettings
from flywheel.records.trace import Checkpoint, Cursor, DeadRow
from flywheel.sources.studio.database import BUSY_SECONDS, Database, Row, shown
from flywheel.sources.studio.schema import Schema, is_id, schema_of, span_id_of, unnamed
from flywheel.sources.studio.trace_completion import (
    FOREVER_NS,
    CallSizes,
    CompleteTrace,
    OpenTrace,
    TraceCompletion,
)

BATCH_ROWS: Final = 500
"""Rows per step. Small steps waste per-batch overhead; a re-scan, where most traces are unchanged, reads twice as
many."""
COMPLETE_ROWS: Final = 500
"""Rows of the traces that a step hands on, unless one has more. Where many end together, more steps follow."""
UNCOMMITTED: Final = 9_000
"""Checkpoints remembered because they may not be stored yet. At most seventeen steps of 500 rows are read ahead,
each row may be a trace, and a checkpoint is about 400 bytes."""
NEAR_ROWS: Final = 100
"""While more rows follow, a trace with a row this close to the end of the scan may continue."""
FAR_ROWS: Final = 5_000
"""While more rows follow, an incomplete trace is not abandoned within this many rows of its last one."""

Checkpoints = Callable[[Sequence[str] | None], Mapping[str, Checkpoint]]
"""Looks up the stored checkpoints of one source, by trace id: those of some traces, or (None) of all open ones."""


class Step(Struct, frozen=True):
    """What some rows of a scan brought: complete traces, the checkpoints of those that stay open, and rows without
    ids. The cursor is None while more traces follow that the same rows completed. `rows` is the number of rows read,
    `more` whether steps follow."""

    cursor: Cursor | None
    traces: tuple[CompleteTrace, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    dead: tuple[DeadRow, ...] = ()
    open_traces: int = 0
    rows: int = 0
    more: bool = False


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

    def add(self, rows: Sequence[Row], now_ns: int) -> list[int]:
        """Add a page; returns the numbers of the rows whose ids cannot be read."""
        if not rows:
            return []
        self.at = rows[-1][0]
        self.anchor = shown(rows[-1][1])
        try:
            ids = {row[2] for row in rows} | {row[1] for row in rows}
            # Nearly all pages have ASCII ids only, which one check proves.
            are_ids = all(ids) and b"".join(ids).isascii()
        except TypeError:
            are_ids = False
        bad = set() if are_ids else {row[0] for row in rows if not (is_id(row[1]) and is_id(row[2]))}
        by_trace: defaultdict[Any, list[Row]] = defaultdict(list)
        for row in rows:
            if row[0] not in bad:
                by_trace[row[2]].append(row)
        for name, own in by_trace.items():
            trace_id = name.decode()
            trace = self.traces.get(trace_id)
            if trace is None:
                self.traces[trace_id] = self.new[trace_id] = trace = OpenTrace(trace_id, now_ns)
            trace.seen_ns = now_ns
            self.extend(trace, own)
        return sorted(bad)

    def extend(self, trace: OpenTrace, rows: Iterable[Row]) -> None:
        """Add rows to a trace, in order of their numbers."""
        for row in rows:
            trace.ids[row[0]] = (span_id_of(row[1], row[2]), row[3])
            trace.ends.append(row[4])
            trace.last_rowid = max(trace.last_rowid, row[0])
        # These may name other calls.
        trace.missing_calls = frozenset()
        self._near[trace.trace_id] = self.grown[trace.trace_id] = trace

    def adopt(self, trace: OpenTrace) -> None:
        """Take over a trace that another scan met."""
        mine = self.traces.setdefault(trace.trace_id, trace)
        if mine is not trace:
            mine.merge(trace)
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
        if self._near.pop(trace.trace_id, None) is not None:
            self.traces[trace.trace_id] = self.traces.pop(trace.trace_id)

    def close(self, trace: OpenTrace) -> None:
        """The trace is no longer open on this scan."""
        self.traces.pop(trace.trace_id, None)
        self._near.pop(trace.trace_id, None)


class StudioReader:
    """One source. The file is opened when it is first read; one thread at a time may use a reader.

    With `call_sizes`, a trace is kept open until the calls that it names are there, or `ingest.calls_wait_seconds`
    have passed since its end.
    """

    def __init__(
        self,
        path: Path,
        settings: IngestSettings,
        *,
        copies: Path | None = None,
        busy_seconds: float = BUSY_SECONDS,
        call_sizes: CallSizes | None = None,
    ) -> None:
        self.path = path
        self.database = Database(path, copies=copies, busy_seconds=busy_seconds)
        self.schema: Schema | None = None
        """The generation of the database when it was last read."""
        self.due_ns = FOREVER_NS
        """When the first open trace can be closed if nothing more arrives, nanoseconds since 1970."""
        self._settle_ns = int(settings.settle_seconds * 1e9)
        self._abandon_ns = int(settings.abandon_seconds * 1e9)
        self._call_sizes = call_sizes
        self._calls_wait_ns = int(settings.calls_wait_seconds * 1e9)
        self._cursor = Cursor()
        self._tail: Scan | None = None
        self._token: object = None
        self._uncommitted: dict[str, Checkpoint] = {}
        self.awaits_calls = False
        """Whether the last pass found a trace that is complete, but for a call that has not been pulled."""

    def close(self) -> None:
        self.database.close()
        self.forget()

    def forget(self) -> None:
        """Discard uncommitted state; the next read resumes from the stored cursor."""
        self._tail = None
        self._token = None
        self._uncommitted.clear()

    def read(
        self, cursor: Cursor, checkpoints: Checkpoints, *, now: datetime, final: bool = False
    ) -> Generator[Step]:
        """One pass to the end of the table; no step if nothing has changed. Raises StudioError.

        What every step brought must be stored, and `note` told of it, before the generator is asked for what follows
        the last one. Else `forget` must be called. `final` hands on whole traces at once and incomplete ones as they
        are.
        """
        # Everything that earlier passes and re-scans returned has been stored.
        self._uncommitted.clear()
        now_ns = int(now.timestamp() * 1e9)
        token = self.database.change_token()
        changed = token != self._token or self._tail is None
        if not changed and not final and now_ns < self.due_ns and not self._calls_arrived():
            return
        scan = self._begin(cursor, checkpoints) if changed or self._tail is None else self._tail
        # Opening the file can change the token.
        token = self.database.change_token() if changed else token
        self._token = None
        completion = self._completion(scan.schema)
        deciding = replace(completion, settle_ns=0) if final else completion
        more = changed
        stored = False
        try:
            while True:
                dead, read, more = self._next_rows(scan, checkpoints, now_ns) if more else ([], 0, False)
                ready = self._ready(scan, deciding, now_ns, more=more, final=final)
                yield from self._steps(scan, ready, dead, read, more=more)
                if not more:
                    break
            self.due_ns = min(map(completion.due_ns, scan.traces.values()), default=FOREVER_NS)
            self.awaits_calls = any(trace.missing_calls for trace in scan.traces.values())
            self._token = token
            stored = True
        finally:
            self.database.rest()
            if not stored:
                # The consumer left after the last step, so that step may not be stored.
                self.forget()

    def rescan(self, checkpoints: Checkpoints, *, now: datetime, last: int | None = None) -> Generator[Step]:
        """Hand on the traces of the `last` rows, or of all. To be called after a pass. Raises StudioError.

        Its steps have no cursor. It ends early if a pass starts over in the meantime.
        """
        tail = self._tail
        if tail is None:
            return
        now_ns = int(now.timestamp() * 1e9)
        scan = Scan(0 if last is None else max(0, tail.at - last), tail.schema)
        stored = False
        try:
            more = True
            while more and self._tail is tail:
                # What passes and earlier steps brought has been stored.
                self._uncommitted.clear()
                _, read, more = self._next_rows(scan, checkpoints, now_ns, last=tail.at)
                yield from self._steps(scan, self._missed(scan, tail, now_ns, more=more), (), read, more=more)
            stored = True
        finally:
            self.database.rest()
            if not stored:
                self.forget()

    def belongs(self, cursor: Cursor) -> bool:
        """Whether a cursor is about the file of the last pass as it is now. Raises StudioError."""
        if (cursor.identity, cursor.fingerprint) != (self._cursor.identity, self._cursor.fingerprint):
            return False
        # If another row is there now, rows were renumbered, or an older copy of the file was restored.
        return not cursor.rowid or self.database.id_at(cursor.rowid) == cursor.anchor

    def note(self, checkpoints: Iterable[Checkpoint], missing: Mapping[str, Sequence[str]]) -> None:
        """Note the checkpoints of traces that were handed on, and which calls are `missing` of traces that were not
        extracted without them: these are open again."""
        for checkpoint in checkpoints:
            if self._tail is None or not checkpoint.is_open:
                continue
            if (trace := self._tail.traces.get(checkpoint.trace_id)) is not None:
                trace.known = checkpoint
            elif checkpoint.trace_id in missing:
                trace = self._reopen(self._tail, checkpoint)
                trace.missing_calls = frozenset(missing[checkpoint.trace_id])

    def _completion(self, schema: Schema) -> TraceCompletion:
        return TraceCompletion(schema, self._settle_ns, self._abandon_ns, self._calls_wait_ns, self._call_sizes)

    def _calls_arrived(self) -> bool:
        """Whether the calls of a trace that awaits them are there now."""
        if self._tail is None:
            return False
        completion = self._completion(self._tail.schema)
        return any(trace.missing_calls and completion.has_calls(trace) for trace in self._tail.traces.values())

    def _begin(self, cursor: Cursor, checkpoints: Checkpoints) -> Scan:
        """The scan to continue, from the cursor if that is still about this file, else from the beginning."""
        identity = self.database.identity()
        self.schema, fingerprint = schema_of(self.database)
        scan, generation = self._tail, self._cursor.generation
        self._cursor = replace(self._cursor, identity=identity, fingerprint=fingerprint)
        if not self.belongs(cursor):
            cursor = Cursor(0, identity, fingerprint, cursor.generation + bool(cursor.identity))
        goes_on = scan is not None and (scan.at, generation) == (cursor.rowid, cursor.generation)
        self._cursor = cursor
        if scan is not None and goes_on:
            scan.schema = self.schema
            return scan
        self._uncommitted.clear()
        self._tail = scan = Scan(cursor.rowid, self.schema, cursor.anchor)
        # Traces that were open when the last process ended, or that are to be read again.
        for checkpoint in checkpoints(None).values():
            if checkpoint.generation == cursor.generation:
                self._reopen(scan, checkpoint)
        return scan

    def _reopen(self, scan: Scan, checkpoint: Checkpoint) -> OpenTrace:
        """A trace that is open by its checkpoint."""
        trace = scan.traces[checkpoint.trace_id] = OpenTrace(checkpoint.trace_id, 0, known=checkpoint)
        self._add_earlier_rows(scan, trace, checkpoint)
        trace.seen_ns = trace.ended_ns(scan.schema)
        return trace

    def _next_rows(
        self, scan: Scan, checkpoints: Checkpoints, now_ns: int, last: int | None = None
    ) -> tuple[list[DeadRow], int, bool]:
        """Add the rows of a step up to number `last`: rows without ids, how many rows, and whether more follow.

        Traces that the scan meets for the first time get their checkpoints and their rows from before the scan.
        """
        bad: list[int] = []
        read = 0
        more = True
        most = BATCH_ROWS if last is None else 2 * BATCH_ROWS
        while more and read < most:
            rows, more, _ = self.database.page(scan.schema.id_columns, scan.at)
            if last is not None and rows and rows[-1][0] > last:
                rows, more = [row for row in rows if row[0] <= last], False
            bad += scan.add(rows, now_ns)
            read += len(rows)
        new, scan.new = scan.new, {}
        earlier = {trace: self._uncommitted[trace] for trace in new if trace in self._uncommitted}
        if unknown := [trace for trace in new if trace not in earlier]:
            earlier |= checkpoints(unknown)
        for trace_id, checkpoint in earlier.items():
            trace = new[trace_id]
            trace.known = checkpoint
            if checkpoint.generation == self._cursor.generation and not trace.ids.keys() >= set(checkpoint.rowids):
                self._add_earlier_rows(scan, trace, checkpoint)
        return unnamed(self.database.rows(scan.schema.columns, bad)), read, more

    def _add_earlier_rows(self, scan: Scan, trace: OpenTrace, checkpoint: Checkpoint) -> None:
        earlier = [rowid for rowid in checkpoint.rowids if rowid <= scan.at and rowid not in trace.ids]
        name = trace.trace_id.encode()
        found = self.database.rows(scan.schema.id_columns, earlier)
        # The number may belong to a row of another trace by now.
        if rows := [row for row in found if row[2] == name and is_id(row[1])]:
            scan.extend(trace, rows)

    def _candidates(self, scan: Scan, *, more: bool) -> Iterator[OpenTrace]:
        """Traces that may be complete, except those of which the scan has not reached all known rows."""
        for trace in scan.candidates(more=more):
            if not (more and trace.awaits(scan.at, self._cursor.generation)):
                yield trace

    def _ready(
        self, scan: Scan, completion: TraceCompletion, now_ns: int, *, more: bool, final: bool
    ) -> Iterator[CompleteTrace]:
        """The traces that a pass hands on; the others wait."""
        for trace in self._candidates(scan, more=more):
            if completion.is_complete(trace, now_ns, is_near=more and scan.at - trace.last_rowid < FAR_ROWS):
                # Missing calls are there now, or no server records any.
                may_wait = not trace.missing_calls and completion.may_wait(trace, now_ns)
                yield self._handing_on(scan, trace, may_wait=may_wait)
                continue
            scan.wait(trace)
            if final and not more and not trace.is_whole():
                yield self._handing_on(scan, trace, is_open=True)

    def _missed(self, scan: Scan, tail: Scan, now_ns: int, *, more: bool) -> Iterator[CompleteTrace]:
        """The traces that a re-scan hands on: known ones, and those that no pass has met. The others are left to the
        next pass."""
        completion = replace(self._completion(scan.schema), settle_ns=0)
        for trace in self._candidates(scan, more=more):
            is_closed = trace.known is not None or (
                completion.is_complete(trace, now_ns) and not completion.may_wait(trace, now_ns)
            )
            if is_closed and trace.trace_id not in tail.traces:
                yield self._handing_on(scan, trace)
            else:
                tail.adopt(trace)
                self.due_ns = 0
                scan.close(trace)

    def _handing_on(
        self, scan: Scan, trace: OpenTrace, *, is_open: bool = False, may_wait: bool = False
    ) -> CompleteTrace:
        """A trace to be extracted, which is no longer open on the scan, unless it `is_open`."""
        spans = {rowid: span for rowid, (span, _) in sorted(trace.ids.items())}
        complete = CompleteTrace(trace.trace_id, spans, self._cursor.generation, trace.known, is_open, may_wait)
        if not is_open:
            # Its digest is not known yet.
            self._remember(Checkpoint(trace.trace_id, tuple(spans), 0, self._cursor.generation))
            scan.close(trace)
        return complete

    def _steps(
        self, scan: Scan, ready: Iterable[CompleteTrace], dead: Sequence[DeadRow], rows: int, *, more: bool
    ) -> Iterator[Step]:
        """Steps of the traces that are handed on. Only the last one has the cursor."""
        chosen: list[CompleteTrace] = []
        size = 0
        for complete in ready:
            if chosen and size + len(complete.spans) > COMPLETE_ROWS:
                yield Step(None, tuple(chosen), more=True)
                chosen, size = [], 0
            chosen.append(complete)
            size += len(complete.spans)
        if scan is not self._tail:
            yield Step(None, tuple(chosen), rows=rows, more=more)
            return
        # Traces that stay open and have new rows.
        grown, scan.grown = scan.grown, {}
        written: list[Checkpoint] = []
        for trace in grown.values():
            stored, rowids = trace.known, tuple(sorted(trace.ids))
            if trace.trace_id in scan.traces and (stored is None or not stored.is_open or stored.rowids != rowids):
                digest = stored.digest if stored else 0
                trace.known = Checkpoint(trace.trace_id, rowids, digest, self._cursor.generation, True)
                self._remember(trace.known)
                written.append(trace.known)
        self._cursor = replace(self._cursor, rowid=scan.at, anchor=scan.anchor)
        yield Step(self._cursor, tuple(chosen), tuple(written), tuple(dead), len(scan.traces), rows=rows, more=more)

    def _remember(self, checkpoint: Checkpoint) -> None:
        self._uncommitted.pop(checkpoint.trace_id, None)
        self._uncommitted[checkpoint.trace_id] = checkpoint
        while len(self._uncommitted) > UNCOMMITTED:
            del self._uncommitted[next(iter(self._uncommitted))]
