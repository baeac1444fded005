"""Reads one Studio database: new rows behind the cursor (a pass), and rows that changed in place (a re-scan).

A pass reads page by page from the cursor. A trace whose rows are all there, and which has been quiet for long enough,
is closed: its rows are handed on unparsed, and `replies.extract` makes replies of them. Each batch has the cursor and
the checkpoints to store with it, so that a restart continues behind the last stored batch.

A re-scan reads rows that were read before. A trace whose digest equals that of its checkpoint is skipped; a trace
that changed, or was missed, is handed on like a new one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from flywheel.config import IngestSettings
from flywheel.records.request_id import recorded_in
from flywheel.records.task import Batch, RawTrace
from flywheel.records.trace import Checkpoint, Cursor, DeadRow
from flywheel.sources.studio.database import BUSY_SECONDS, Database, Row, shown
from flywheel.sources.studio.schema import DIGEST_BITS, Schema, hash_of, is_id, packed, schema_of, span_id_of, unnamed
from flywheel.sources.studio.trace_completion import FOREVER_NS, CallSizes, Completeness, OpenTrace, TraceCompletion

BATCH_ROWS: Final = 500
"""Rows per batch. Small batches waste per-batch overhead; a re-scan, where most traces are unchanged, reads twice as
many."""
BATCH_BYTES: Final = 4 * 1024 * 1024
CLOSED_BYTES: Final = 2 * BATCH_BYTES
"""Bytes of the traces closed in one batch, unless one is larger. Where many end together, more batches follow."""
UNCOMMITTED: Final = 8_000
"""Checkpoints remembered because they may not be stored yet. At most fourteen batches of 500 rows are read ahead,
each row may be a trace, and a checkpoint is about 400 bytes."""
NEAR_ROWS: Final = 100
"""While more rows follow, a trace with a row this close to the end of the scan may continue."""
FAR_ROWS: Final = 5_000
"""While more rows follow, an incomplete trace is not abandoned within this many rows of its last one."""
HELD_BYTES: Final = 16 * 1024 * 1024
"""Contents kept until their traces are closed. Above it, the largest are dropped and read again when needed."""

Checkpoints = Callable[[Sequence[str] | None], Mapping[str, Checkpoint]]
"""Looks up the stored checkpoints of one source, by trace id: those of some traces, or (None) of all open ones."""


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
        for name, own in by_trace.items():
            trace_id = name.decode()
            trace = self.traces.get(trace_id)
            if trace is None:
                self.traces[trace_id] = self.new[trace_id] = trace = OpenTrace(trace_id, now_ns)
            trace.seen_ns = now_ns
            self.extend(trace, own)
        return dead

    def extend(self, trace: OpenTrace, rows: Iterable[Row]) -> None:
        """Add rows to a trace, in order of their numbers. When too many bytes are held, drop the contents of the
        largest traces."""
        rowid = size = 0
        for row in rows:
            rowid = row[0]
            trace.ids[rowid] = (span_id_of(row[1], row[2]), row[3])
            trace.ends.append(row[4])
            trace.rows[rowid] = data = packed(row)
            trace.hashes += hash_of(data)
            size += len(data)
            if references := recorded_in(data):
                trace.call_references.update(references)
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
    ) -> Generator[Batch]:
        """One pass to the end of the table; no batch if nothing has changed. Raises StudioError.

        Every batch must be stored before the next pass, or `forget` be called. `final` closes whole traces at once
        and hands incomplete ones on as they are.
        """
        # Everything that earlier passes and re-scans returned has been stored.
        self._uncommitted.clear()
        now_ns = int(now.timestamp() * 1e9)
        token = self.database.change_token()
        changed = token != self._token or self._tail is None
        if not changed and not final and now_ns < self.due_ns and not self._calls_arrived():
            return
        scan = self._begin(cursor, checkpoints, now_ns) if changed or self._tail is None else self._tail
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
                yield from self._batches(scan, ready, dead, read, more=more)
                if not more:
                    break
            for trace in scan.traces.values():
                trace.drop_contents()
            self.due_ns = min(map(completion.due_ns, scan.traces.values()), default=FOREVER_NS)
            self.awaits_calls = any(trace.awaits_calls for trace in scan.traces.values())
            self._token = token
            stored = True
        finally:
            self.database.rest()
            if not stored:
                # The consumer left after the last batch, so that batch may not be stored.
                self.forget()

    def rescan(self, checkpoints: Checkpoints, *, now: datetime, last: int | None = None) -> Generator[Batch]:
        """Compare the `last` rows, or all, with their checkpoints. To be called after a pass. Raises StudioError.

        Its batches have no cursor. It ends early if a pass starts over in the meantime.
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
                _, read, more = self._next_rows(scan, checkpoints, now_ns, last=tail.at)
                yield from self._batches(scan, self._missed(scan, tail, now_ns, more=more), (), read, more=more)
            stored = True
        finally:
            self.database.rest()
            if not stored:
                self.forget()

    def _completion(self, schema: Schema) -> TraceCompletion:
        return TraceCompletion(schema, self._settle_ns, self._abandon_ns, self._calls_wait_ns, self._call_sizes)

    def _calls_arrived(self) -> bool:
        """Whether the calls of a trace that awaits them are there now."""
        if self._tail is None:
            return False
        completion = self._completion(self._tail.schema)
        return any(trace.awaits_calls and completion.has_calls(trace) for trace in self._tail.traces.values())

    def _begin(self, cursor: Cursor, checkpoints: Checkpoints, now_ns: int) -> Scan:
        """The scan to continue, from the cursor if that is still about this file, else from the beginning."""
        identity = self.database.identity()
        self.schema, fingerprint = schema_of(self.database)
        same = (cursor.identity, cursor.fingerprint) == (identity, fingerprint)
        # If another row is at the cursor now, rows were renumbered, or an older copy of the file was restored.
        if not same or (cursor.rowid and self.database.id_at(cursor.rowid) != cursor.anchor):
            generation = cursor.generation + 1 if cursor.identity else cursor.generation
            cursor = Cursor(0, identity, fingerprint, generation)
        scan = self._tail
        goes_on = scan is not None and (scan.at, self._cursor.generation) == (cursor.rowid, cursor.generation)
        self._cursor = cursor
        if scan is not None and goes_on:
            scan.schema = self.schema
            return scan
        self._uncommitted.clear()
        self._tail = scan = Scan(cursor.rowid, self.schema, cursor.anchor)
        # Traces that were open when the last process ended, or that are to be read again.
        for checkpoint in checkpoints(None).values():
            if checkpoint.generation == cursor.generation:
                trace = scan.traces[checkpoint.trace_id] = OpenTrace(checkpoint.trace_id, now_ns, known=checkpoint)
                self._add_earlier_rows(scan, trace, checkpoint)
                trace.seen_ns = trace.ended_ns(scan.schema)
        return scan

    def _next_rows(
        self, scan: Scan, checkpoints: Checkpoints, now_ns: int, last: int | None = None
    ) -> tuple[list[DeadRow], int, bool]:
        """Add the rows of a batch up to number `last`: dead rows, how many rows, and whether more follow.

        Traces that the scan meets for the first time get their checkpoints and their rows from before the scan.
        """
        dead: list[DeadRow] = []
        read = size = 0
        more = True
        most = BATCH_ROWS if last is None else 2 * BATCH_ROWS
        while more and read < most and size < BATCH_BYTES:
            rows, more, page_size = self.database.page(scan.schema.columns, scan.at)
            if last is not None and rows and rows[-1][0] > last:
                rows, more = [row for row in rows if row[0] <= last], False
            dead += scan.add(rows, now_ns)
            read += len(rows)
            size += page_size
        new, scan.new = scan.new, {}
        earlier = {trace: self._uncommitted[trace] for trace in new if trace in self._uncommitted}
        if unknown := [trace for trace in new if trace not in earlier]:
            earlier |= checkpoints(unknown)
        for trace_id, checkpoint in earlier.items():
            trace = new[trace_id]
            trace.known = checkpoint
            if checkpoint.generation == self._cursor.generation and not trace.ids.keys() >= set(checkpoint.rowids):
                self._add_earlier_rows(scan, trace, checkpoint)
        return dead, read, more

    def _add_earlier_rows(self, scan: Scan, trace: OpenTrace, checkpoint: Checkpoint) -> None:
        earlier = [rowid for rowid in checkpoint.rowids if rowid <= scan.at and rowid not in trace.ids]
        if earlier and (rows := [row for row in self._fetch(earlier, {trace.trace_id}) if is_id(row[1])]):
            scan.extend(trace, rows)

    def _fetch(self, rowids: Sequence[int], trace_ids: Collection[str]) -> Iterator[Row]:
        """Rows by number, as far as they still belong to these traces."""
        assert self.schema is not None
        names = {trace.encode() for trace in trace_ids}
        return (row for row in self.database.rows(self.schema.columns, rowids) if row[2] in names)

    def _candidates(self, scan: Scan, *, more: bool) -> Iterator[OpenTrace]:
        """Traces that may be complete, except those of which the scan has not reached all known rows."""
        for trace in scan.candidates(more=more):
            if not (more and trace.awaits(scan.at, self._cursor.generation)):
                yield trace

    def _ready(
        self, scan: Scan, completion: TraceCompletion, now_ns: int, *, more: bool, final: bool
    ) -> Iterator[tuple[OpenTrace, bool]]:
        """The traces that a pass hands on, each with whether it is still open; the others wait."""
        for trace in self._candidates(scan, more=more):
            state = completion.decide(trace, now_ns, is_near=more and scan.at - trace.last_rowid < FAR_ROWS)
            trace.awaits_calls = state is Completeness.AWAITS_CALLS
            if state is Completeness.COMPLETE:
                yield trace, False
                continue
            scan.wait(trace)
            if final and not more and not trace.is_whole():
                yield trace, True

    def _missed(self, scan: Scan, tail: Scan, now_ns: int, *, more: bool) -> Iterator[tuple[OpenTrace, bool]]:
        """The traces that a re-scan compares with their checkpoints, or hands on because no pass has met them. The
        others are left to the next pass."""
        completion = replace(self._completion(scan.schema), settle_ns=0)
        for trace in self._candidates(scan, more=more):
            is_closed = trace.known is not None or completion.decide(trace, now_ns) is Completeness.COMPLETE
            if is_closed and trace.trace_id not in tail.traces:
                yield trace, False
            else:
                tail.adopt(trace)
                self.due_ns = 0
                scan.close(trace)

    def _batches(
        self, scan: Scan, ready: Iterable[tuple[OpenTrace, bool]], dead: Sequence[DeadRow], rows: int, *, more: bool
    ) -> Iterator[Batch]:
        """Batches of the traces that are handed on."""
        chosen: list[tuple[OpenTrace, bool]] = []
        size = 0
        for trace, is_open in ready:
            chosen.append((trace, is_open))
            size += trace.size
            if self._call_sizes is not None and trace.call_references:
                size += sum(self._call_sizes(trace.call_references).values())
            if size >= CLOSED_BYTES:
                yield self._batch(scan, chosen, dead, rows, more=True)
                chosen, dead, rows, size = [], (), 0, 0
        yield self._batch(scan, chosen, dead, rows, more=more)

    def _batch(
        self, scan: Scan, chosen: Sequence[tuple[OpenTrace, bool]], dead: Sequence[DeadRow], rows: int, *, more: bool
    ) -> Batch:
        """Selects the rows of closed traces that changed since their checkpoint, and builds the new checkpoints."""
        if dropped := [trace for trace, _ in chosen if len(trace.rows) < len(trace.ids)]:
            self._restore_contents(dropped)
        traces: list[RawTrace] = []
        written: list[Checkpoint] = []
        call_references: list[str] = []
        for trace, is_open in chosen:
            stored, raw = trace.known, trace.rows
            digest = (trace.hashes & DIGEST_BITS) or 1
            rowids = tuple(sorted(raw))
            checkpoint = Checkpoint(trace.trace_id, rowids, digest, self._cursor.generation, is_open)
            trace.drop_contents()
            if raw and not _is_unchanged(checkpoint, stored):
                traces.append((raw, is_open))
                call_references += trace.call_references
            if checkpoint != stored:
                written.append(checkpoint)
            trace.known = checkpoint
            if not is_open:
                scan.close(trace)
        if scan is self._tail:
            # Traces that stay open and have new rows.
            grown, scan.grown = scan.grown, {}
            for trace in grown.values():
                stored, rowids = trace.known, tuple(sorted(trace.ids))
                if trace.trace_id in scan.traces and (
                    stored is None or not stored.is_open or stored.rowids != rowids
                ):
                    digest = stored.digest if stored else 0
                    trace.known = Checkpoint(trace.trace_id, rowids, digest, self._cursor.generation, True)
                    written.append(trace.known)
            self._cursor = replace(self._cursor, rowid=scan.at, anchor=scan.anchor)
        for checkpoint in written:
            self._uncommitted.pop(checkpoint.trace_id, None)
            self._uncommitted[checkpoint.trace_id] = checkpoint
        while len(self._uncommitted) > UNCOMMITTED:
            del self._uncommitted[next(iter(self._uncommitted))]
        return Batch(
            cursor=self._cursor if scan is self._tail else None,
            traces=tuple(traces),
            call_references=tuple(call_references),
            checkpoints=tuple(written),
            dead=tuple(dead),
            open_traces=len(self._tail.traces) if self._tail else 0,
            rows=rows,
            more=more,
        )

    def _restore_contents(self, traces: Sequence[OpenTrace]) -> None:
        """Read rows again whose contents were dropped."""
        by_id = {trace.trace_id: trace for trace in traces}
        rowids = [rowid for trace in traces for rowid in trace.ids.keys() - trace.rows.keys()]
        for row in self._fetch(rowids, by_id.keys()):
            by_id[row[2].decode()].restore(row)


def _is_unchanged(checkpoint: Checkpoint, stored: Checkpoint | None) -> bool:
    """Whether a trace was extracted as it is now. One that only lost rows counts as unchanged: its replies stay."""
    if stored is None or not stored.digest:
        return False
    if checkpoint.digest == stored.digest:
        # A trace extracted as open is extracted again once it is abandoned.
        return checkpoint.is_open or not stored.is_open
    return not stored.is_open and len(checkpoint.rowids) < len(stored.rowids)
