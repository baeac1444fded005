"""Names of replies within a source, for clients whose span ids repeat.

A reply has the id of its span as its name. Where a reply of another trace has that name already, the trace follows
(`SPAN@TRACE`). Of replies that share trace and span, the first one that is stored, in whatever source, keeps the name
and the task id; the start of another one follows (`SPAN@TRACE@START`), and is in its task id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import orjson
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, func, literal, or_, select

from flywheel.records.repeated_ids import SAME_START_NS
from flywheel.records.states import ReplyState, SkipReason
from flywheel.records.task import Batch, Entry, line_bytes, task_id
from flywheel.records.trace import DeadRow
from flywheel.store.kernel.bulk import Lookup
from flywheel.store.kernel.schema import replies, sources

_MARK: Final = "@"
_SAME: Final = timedelta(microseconds=SAME_START_NS // 1000)
_LATE: Final = timedelta(minutes=15)
"""How far the first span below an agent's may be from the start of the agent's own span, which arrives later."""
WITH_SPANS: Final = frozenset({"studio", "otlp"})
"""Types of sources whose ids are those of clients."""
_OF_TRACES: Final = Lookup(
    select(*(replies.c[name] for name in ("source_id", "span_id", "trace_id", "state", "skip_reason", "started_at"))),
    replies.c.trace_id,
)
_HOLDERS: Final = Lookup(
    select(replies.c.span_id, replies.c.trace_id).where(replies.c.source_id == bindparam("source")), replies.c.span_id
)


class Run(NamedTuple):
    """What tells a reply from others: its span, and its start if it is not the first one of trace and span."""

    span_id: str
    start: str = ""


def run_of(name: str, trace_id: str) -> Run:
    """What the name of a reply of this trace says."""
    span, mark, start = name.partition(f"{_MARK}{trace_id}")
    if not (span and mark and trace_id) or start[:1] not in ("", _MARK):
        return Run(name)
    return Run(span, start[1:])


def names_of_span(span_id: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """The conditions that the name of a reply is the id of a span, or begins with it. Each can use the index."""
    begins = func.instr(replies.c.span_id, literal(span_id + _MARK).concat(replies.c.trace_id)) == 1
    after, before = span_id + _MARK, span_id + chr(ord(_MARK) + 1)
    return replies.c.span_id == span_id, and_(replies.c.span_id.between(after, before), begins)


def is_of_span(span_id: str) -> ColumnElement[bool]:
    """The condition that a reply is of the span with this id, in whatever trace and run."""
    return or_(*names_of_span(span_id))


def with_repeated_starts(conn: Connection, source: int) -> int:
    """How many replies of a source share trace and span with one that was stored before, but not its start."""
    query = select(replies.c.span_id, replies.c.trace_id).where(
        replies.c.source_id == source, replies.c.span_id.like(f"%{_MARK}%{_MARK}%")
    )
    return sum(bool(run_of(row.span_id, row.trace_id).start) for row in conn.execute(query))


def named(conn: Connection, source: int, batch: Batch) -> Batch:
    """A batch with the names of its replies and dead rows in place of their spans' ids."""
    kind = conn.execute(select(sources.c.type).where(sources.c.id == source)).scalar_one()
    if kind not in WITH_SPANS or not (batch.entries or batch.dead):
        return batch
    rows: list[Entry | DeadRow] = [*batch.entries, *(row for row in batch.dead if row.trace_id)]
    known: defaultdict[tuple[str, str], list[Row[Any]]] = defaultdict(list)
    for found in _OF_TRACES.rows(conn, list({row.trace_id for row in rows})):
        known[found.trace_id, run_of(found.span_id, found.trace_id).span_id].append(found)
    holders = {
        found.span_id: str(found.trace_id)
        for found in _HOLDERS.rows(conn, list({row.span_id for row in rows}), source)
    }
    own: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in batch.entries:
        own[entry.trace_id, entry.span_id].append(entry)
    starts: dict[int, str] = {}
    for of, some in own.items():
        if len(some) > 1 or of in known:
            starts |= _starts_of(some, known.get(of, ()))

    def name(trace_id: str, span_id: str, start: str) -> str:
        for found in known.get((trace_id, span_id), ()):
            if found.source_id == source and run_of(found.span_id, trace_id).start == start:
                return str(found.span_id)
        if start:
            return f"{span_id}{_MARK}{trace_id}{_MARK}{start}"
        is_free = holders.setdefault(span_id, trace_id) == trace_id
        return span_id if is_free else f"{span_id}{_MARK}{trace_id}"

    entries = []
    for entry in batch.entries:
        start = starts.get(id(entry), "")
        given = name(entry.trace_id, entry.span_id, start)
        entries.append(entry if given == entry.span_id else _named(entry, given, start))
    dead = [replace(row, span_id=name(row.trace_id, row.span_id, "")) if row.trace_id else row for row in batch.dead]
    return replace(batch, entries=tuple(entries), dead=tuple(dead))


def _named(entry: Entry, name: str, start: str) -> Entry:
    if not start:
        return replace(entry, span_id=name)
    key = task_id(entry.trace_id, entry.span_id, start)
    line = line_bytes({**orjson.loads(entry.line), "task_id": key}) if entry.line else b""
    return replace(entry, span_id=name, key=key, line=line)


def _starts_of(entries: Sequence[Entry], known: Iterable[Row[Any]]) -> dict[int, str]:
    """The `start` of the run of each entry of one trace and span, by the entry's `id()`. Each is of another run.

    Equal starts decide first. Then an entry may be a reply that was unfinished, or could not be read, or the rest of
    one whose own span is gone. Otherwise it is another run.
    """
    runs: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    for row in known:
        runs[run_of(row.span_id, row.trace_id).start].append(row)
    left = dict(runs)
    found: dict[int, str] = {}
    ordered = sorted(entries, key=lambda entry: entry.started_at)
    for is_alike in (_is_equal, _may_be_equal):
        for entry in ordered:
            if id(entry) not in found:
                start = _nearest(
                    entry, {start: [row for row in rows if is_alike(entry, row)] for start, rows in left.items()}
                )
                if start is not None:
                    found[id(entry)] = start
                    del left[start]
    for entry in ordered:
        if id(entry) not in found:
            is_first = "" not in runs and "" not in found.values()
            found[id(entry)] = "" if is_first else entry.started_at
    return found


def _nearest(entry: Entry, runs: Mapping[str, Sequence[Row[Any]]]) -> str | None:
    """The run with the row whose start is nearest to that of the entry."""
    apart = {start: min(_apart(entry, row) for row in rows) for start, rows in runs.items() if rows}
    return min(apart, key=apart.__getitem__, default=None)


def _apart(entry: Entry, row: Row[Any]) -> timedelta:
    """How far the starts of an entry and a known reply are apart; nothing, if that of the reply is not known."""
    if not row.started_at:
        return timedelta()
    return abs(datetime.fromisoformat(entry.started_at) - datetime.fromisoformat(row.started_at))


def _is_equal(entry: Entry, row: Row[Any]) -> bool:
    return bool(row.started_at) and _apart(entry, row) < _SAME


def _may_be_equal(entry: Entry, row: Row[Any]) -> bool:
    if not row.started_at or row.state == ReplyState.DEAD:
        return True
    is_unfinished = SkipReason.UNFINISHED in (entry.skip, row.skip_reason)
    return is_unfinished and _apart(entry, row) < _LATE
