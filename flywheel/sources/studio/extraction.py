"""Reads the rows of complete traces and makes replies of them: in the reader's thread, or in a worker process.

At most 8 MB of rows and recorded calls are held at once, or those of one trace. A row counts only while it has the
trace and the span that the scan found at its number, as VACUUM may renumber rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from flywheel.records.request_id import recorded_in
from flywheel.records.task import Batch, RawTrace
from flywheel.records.trace import Checkpoint, ModelCall, ReplySelection
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.calls.parsing import parse
from flywheel.sources.spans.replies import extract
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.schema import Schema, digest_of, packed, span_id_of
from flywheel.sources.studio.trace_completion import CompleteTrace

MAX_BYTES: Final = 8 * 1024 * 1024


class Extraction(Struct, array_like=True, frozen=True):
    """What the first `count` of some traces brought. It is 0 if a row is not where it was scanned.

    `batch` has their replies, dead rows and changed checkpoints. `missing` has, by trace, the request ids of the
    calls that are not there, for traces that were not extracted without them: their checkpoints say that they are
    open.
    """

    batch: Batch
    count: int = 0
    missing: dict[str, list[str]] = {}
    longest_read_ms: float = 0.0


class TraceExtractor:
    """Extracts traces of one database, which `source` names. One thread at a time may use it."""

    def __init__(
        self, database: Database, schema: Schema, selection: ReplySelection, source: str, calls: CallLog | None = None
    ) -> None:
        self.schema: Final = schema
        self.database = database
        self._selection = selection
        self._source = source
        self._calls = calls
        self._most = 1_000_000
        """Traces to begin with: twice as many as fitted the last time."""

    def extract(self, traces: Sequence[CompleteTrace]) -> Extraction:
        """Extract as many of the first traces as fit. Raises StudioError and CallLogError."""
        some = traces[: self._most]
        while (rows := self._rows_of(some)) is None:
            some = some[: len(some) // 2]
        self._most = 2 * len(some) if len(some) < len(traces) else max(self._most, 2 * len(some))
        if any(len(own) < len(trace.spans) for own, trace in zip(rows, some, strict=True)):
            return Extraction(Batch(None), longest_read_ms=self.database.longest_read_ms)
        raw: list[RawTrace] = []
        checkpoints: list[Checkpoint] = []
        missing: dict[str, list[str]] = {}
        named: set[str] = set()
        for trace, own in zip(some, rows, strict=True):
            known = trace.known
            checkpoint = Checkpoint(
                trace.trace_id, tuple(trace.spans), digest_of(own.values()), trace.generation, trace.is_open
            )
            if own and not _is_unchanged(checkpoint, known):
                calls = self._named_in(own)
                if trace.may_wait and (absent := sorted(calls - self._sizes(calls).keys())):
                    missing[trace.trace_id] = absent
                    checkpoint = replace(checkpoint, digest=known.digest if known else 0, is_open=True)
                else:
                    raw.append((own, trace.is_open))
                    named |= calls
            if checkpoint != known:
                checkpoints.append(checkpoint)
        batch = extract(raw, self.schema, self._selection, self._source, self._calls_of(named))
        batch = replace(batch, checkpoints=tuple(checkpoints))
        return Extraction(batch, len(some), missing, longest_read_ms=self.database.longest_read_ms)

    def _rows_of(self, traces: Sequence[CompleteTrace]) -> list[dict[int, bytes]] | None:
        """The packed rows of each trace by number, as far as they are where they were scanned; None if those of
        several traces are too large, together with the calls that they name."""
        places = {rowid: place for place, trace in enumerate(traces) for rowid in trace.spans}
        names = [trace.trace_id.encode() for trace in traces]
        found: list[dict[int, bytes]] = [{} for _ in traces]
        size = 0
        for row in self.database.rows(self.schema.columns, places):
            rowid = row[0]
            place = places[rowid]
            if row[2] == names[place] and span_id_of(row[1], row[2]) == traces[place].spans[rowid]:
                found[place][rowid] = data = packed(row)
                size += len(data)
                if size > MAX_BYTES and len(traces) > 1:
                    return None
        size += sum(self._sizes(set().union(*map(self._named_in, found))).values())
        return found if size <= MAX_BYTES or len(traces) == 1 else None

    def _named_in(self, rows: Mapping[int, bytes]) -> set[str]:
        """The calls that rows name; none without a call log."""
        return {call for data in rows.values() for call in recorded_in(data)} if self._calls is not None else set()

    def _sizes(self, calls: Collection[str]) -> Mapping[str, int]:
        if not calls or self._calls is None or not self._calls.path.exists():
            return {}
        return self._calls.sizes(calls)

    def _calls_of(self, calls: Collection[str]) -> dict[str, ModelCall]:
        if not calls or self._calls is None or not self._calls.path.exists():
            return {}
        return {request_id: parse(call) for request_id, call in self._calls.find(calls).items()}


def _is_unchanged(checkpoint: Checkpoint, stored: Checkpoint | None) -> bool:
    """Whether a trace was extracted as it is now. One that only lost rows counts as unchanged: its replies stay."""
    if stored is None or not stored.digest:
        return False
    if checkpoint.digest == stored.digest:
        # A trace extracted as open is extracted again once it is abandoned.
        return checkpoint.is_open or not stored.is_open
    return not stored.is_open and len(checkpoint.rowids) < len(stored.rowids)
