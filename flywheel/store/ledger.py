"""The ledger of replies: what came out of each source, and the tasks made of it.

A batch is stored in one transaction: replies, tasks, dead letters, the checkpoints of traces, and the cursor. A known
reply whose content hash is unchanged stays as it is; `reingest` handles the others.

Two sources may show the same reply: its trace, and the calls alone. The source that is stored first keeps it. A
skipped reply of a trace keeps its calls as well, unless the trace shows nothing of it: then extraction names none.
A call that a reply does not name any more, when it is read again, is free for the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson
from msgspec.structs import replace
from sqlalchemy import (
    Connection,
    Row,
    Text,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    type_coerce,
    update,
)

from flywheel.records.states import ReplyState, SkipReason, TaskState
from flywheel.records.task import ID_OF_LINE, Batch, Entry, line_bytes, row_id, storable
from flywheel.records.trace import Checkpoint, Cursor, DeadRow
from flywheel.store.checkpoints import checkpoints_of, reopen, store_checkpoints
from flywheel.store.dead_letters import ROW, dead_letter
from flywheel.store.erasures import erased_spans, users_of, without_erased
from flywheel.store.kernel.bulk import Lookup, first_free, insert_many, rows_in
from flywheel.store.kernel.schema import replies, reply_calls, sources, tasks, verdicts
from flywheel.store.kernel.transitions import move, record, utcnow
from flywheel.store.reply_names import named, run_of
from flywheel.store.splits import Splits
from flywheel.store.task_records import TaskRecords, enriched, make_due
from flywheel.store.verdicts import PERSON
from flywheel.system.files import tidied

CALLS: Final = "calls"
"""The type of sources that are made of the calls alone."""
_CALL_COLUMNS: Final = ("request_id", "reply_id", "is_joined")
_CALL_OWNERS: Final = Lookup(
    select(
        reply_calls.c.request_id, replies.c.source_id, replies.c.trace_id, replies.c.span_id, sources.c.path
    ).select_from(reply_calls.join(replies).join(sources)),
    reply_calls.c.request_id,
)
_CALLS_OF_REPLIES: Final = Lookup(select(reply_calls), reply_calls.c.reply_id)
_MISSING_CALLS: Final = Lookup(
    select(replies.c.source_id, replies.c.trace_id)
    .select_from(reply_calls.join(replies))
    .where(~reply_calls.c.is_joined),
    reply_calls.c.request_id,
)
CHANGED: Final = "changed"
_FREE: Final = frozenset({TaskState.PENDING, TaskState.UNDECIDED, TaskState.REJECTED, TaskState.HELD})
"""States that a task can have for which nothing was paid."""
_IS_OF_ROW: Final = replies.c.span_id.like(literal_column(f"'{ID_OF_LINE}%'"))
_ROWS_OF_TASKS: Final = Lookup(
    select(
        tasks.c.key, replies.c.span_id, case((_IS_OF_ROW, null()), else_=tasks.c.payload).label("line")
    ).select_from(tasks.outerjoin(replies, replies.c.task_id == tasks.c.id)),
    tasks.c.key,
)
_INCOMPLETE_ROWS: Final = Lookup(
    select(replies.c.own_id, replies.c.span_id).where(replies.c.source_id == bindparam("source")), replies.c.own_id
)


def reingest(conn: Connection, known: Row[Any], entry: Entry, records: TaskRecords, done: Recorded) -> bool:
    """Bring a known reply up to date with its entry; whether anything about it is new."""
    state = ReplyState(known.state)
    given_up = state is ReplyState.DEAD or known.skip_reason == SkipReason.UNFINISHED
    is_released = known.skip_reason == SkipReason.RECORDED and entry.skip is not SkipReason.RECORDED
    if entry.waits:
        return False
    if known.content == entry.content and not is_released:
        _release_calls(conn, known, entry, done)
        return False
    if entry.skip is SkipReason.UNFINISHED and not given_up:
        return False
    if entry.missing and _were_found(conn, known.id, entry.missing):
        # Its calls have been pruned since: what they showed stays.
        return False
    task: int | None = known.task_id
    if task is not None and not _is_free(conn, task):
        record(conn, replies.name, [str(known.id)], state, CHANGED, "after it was judged: it stays as it was")
        _set(conn, known.id, entry)
        return True
    if state is not ReplyState.OPEN:
        why = "its agent span arrived late" if given_up else "its trace changed"
        move(conn, known.id, state, ReplyState.OPEN, "no other reply has its calls any more" if is_released else why)
    move(conn, known.id, ReplyState.OPEN, ReplyState.CLOSED)
    _set(conn, known.id, entry)
    _release_calls(conn, known, entry, done)
    now: int | None = None
    if entry.skip is not None:
        values = {"skip_reason": entry.skip.value, "detail": entry.detail[:500], "task_id": None}
        move(conn, known.id, ReplyState.CLOSED, ReplyState.SKIPPED, entry.skip, **values)
    else:
        now = records.renew(entry, task) or records.store([entry])[entry.key]
        detail = entry.detail[:500]
        move(conn, known.id, ReplyState.CLOSED, ReplyState.CONVERTED, skip_reason=None, detail=detail, task_id=now)
    has_reply = exists().where(replies.c.task_id == task)
    if task is not None and task != now and not conn.execute(select(has_reply)).scalar_one():
        make_due(conn, task)
        move(conn, task, TaskState.PENDING, TaskState.WITHDRAWN, "its reply is none any more, or another one")
    return True


def _is_free(conn: Connection, task: int) -> bool:
    """Whether nothing has been paid for a task."""
    state = conn.execute(select(tasks.c.state).where(tasks.c.id == task)).scalar_one()
    paid = exists().where(verdicts.c.task_id == task, or_(verdicts.c.calls > 0, verdicts.c.rubric_hash == PERSON))
    return state in _FREE and not conn.execute(select(paid)).scalar_one()


def _set(conn: Connection, reply: int, entry: Entry) -> None:
    names = ("content", "trace_id", "conversation_id", "agent", "started_at")
    values = {name: getattr(entry, name) for name in names}
    values["user"] = users_of(conn, [entry])[entry.user]
    conn.execute(update(replies).where(replies.c.id == reply).values(**values))


def rows_of_tasks(conn: Connection, keys: Sequence[str]) -> dict[str, set[str]]:
    """The rows of files that these tasks are, by the tasks' keys. The reply of a trace is the row that an export has
    of it."""
    found: dict[str, set[str]] = {}
    for row in _ROWS_OF_TASKS.rows(conn, keys):
        found.setdefault(row.key, set()).add(_row_of(row.key, row.line) if row.line else row.span_id)
    return found


def _row_of(key: str, text: str) -> str:
    line = orjson.loads(text)
    images, tools = (orjson.loads(line["metadata"][name]) for name in ("images_json", "tools_json"))
    return row_id(key, line["question"], line["answer"], line["init_messages"], images, tools)


def incomplete_rows(conn: Connection, source: int, own_ids: Sequence[str]) -> dict[str, str]:
    """The replies of this source without a task to which a file gives one of these ids, by the ids."""
    return {row.own_id: row.span_id for row in _INCOMPLETE_ROWS.rows(conn, own_ids, source)}


def known_spans(conn: Connection, source: int, spans: Sequence[str]) -> set[str]:
    """Those of these spans that are replies of this source."""
    return {row.span_id for row in _KNOWN.rows(conn, spans, source)}


_KNOWN: Final = Lookup(select(replies).where(replies.c.source_id == bindparam("source")), replies.c.span_id)
_REPLY_COLUMNS: Final = (
    "id", "source_id", "span_id", "trace_id", "conversation_id", "agent", "state", "skip_reason", "detail", "task_id",
    "content", "user", "started_at", "own_id", "created_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Replies of one source: `replies` is the sum of the rest."""

    replies: int
    tasks: int
    skipped: Mapping[str, int]
    dead: int
    erased: int = 0
    pending: int = 0
    """Those that wait for what completes them."""


@dataclass(slots=True)
class Recorded:
    """What a batch changed. Of new replies, `repeated` share trace and span with an earlier one. `re_extracted`
    counts known replies that changed. `erased` replies are counted and not stored. `erased_traces`, of these and of
    those that were known, and `erased_calls` (request ids) are still where they came from. `reopened` are the numbers
    of sources with traces to be read again, as calls that they share were released."""

    new_tasks: int = 0
    new_replies: int = 0
    repeated: int = 0
    re_extracted: int = 0
    dead: int = 0
    erased: int = 0
    pending: int = 0
    erased_traces: set[str] = field(default_factory=set)
    erased_calls: set[str] = field(default_factory=set)
    reopened: set[int] = field(default_factory=set)
    skipped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def add(self, other: Recorded) -> None:
        self.new_tasks += other.new_tasks
        self.new_replies += other.new_replies
        self.repeated += other.repeated
        self.re_extracted += other.re_extracted
        self.dead += other.dead
        self.erased += other.erased
        self.pending += other.pending
        self.skipped += other.skipped
        self.warnings += other.warnings

    def onto(self, counts: SourceCounts) -> SourceCounts:
        """The counts after this batch, if no known reply changed."""
        skipped = Counter(counts.skipped) + self.skipped
        return SourceCounts(
            counts.replies + self.new_replies + self.dead + self.erased,
            counts.tasks + self.new_replies - self.skipped.total() - self.pending,
            dict(sorted(skipped.items())),
            counts.dead + self.dead,
            counts.erased + self.erased,
            counts.pending + self.pending,
        )


def source_id(conn: Connection, path: str, kind: str = "studio") -> int:
    """The number of a source, given to it when it is first seen."""
    found = _source(conn, path)
    if found is None:
        return int(conn.execute(insert(sources).values(path=path, type=kind).returning(sources.c.id)).scalar_one())
    if found.path != path:
        note_source(conn, found.id, path=path)
    return int(found.id)


def known_source(conn: Connection, path: str) -> int | None:
    """The number of a source, if it was ever read."""
    found = _source(conn, path)
    return None if found is None else int(found.id)


def _source(conn: Connection, path: str) -> Row[Any, Any] | None:
    """The number and path of a source; the stored path may contain `..` and lead to the same place."""
    wanted = select(sources.c.id, sources.c.path)
    if (found := conn.execute(wanted.where(sources.c.path == path)).one_or_none()) is not None:
        return found
    detours = conn.execute(wanted.where(sources.c.path.contains("/../")))
    return next((row for row in detours if str(tidied(Path(row.path))) == path), None)


def cursor_of(conn: Connection, source: int) -> Cursor:
    row = conn.execute(select(sources).where(sources.c.id == source)).one()
    return Cursor(row.rowid_done, row.identity, row.fingerprint, row.generation, row.anchor)


def swept_at(conn: Connection, source: int) -> str | None:
    """The time of the last full scan of a source."""
    found = conn.execute(select(sources.c.swept_at).where(sources.c.id == source)).scalar_one()
    return None if found is None else str(found)


def note_source(conn: Connection, /, source: int, **values: Any) -> None:
    """Set columns of a source: schema, condition, error, longest read, cursor. A changed condition is an event."""
    if (condition := values.get("condition")) is not None:
        before = conn.execute(select(sources.c.condition).where(sources.c.id == source)).scalar_one()
        if before != condition:
            record(conn, sources.name, [str(source)], before or None, condition, values.get("error", ""))
    conn.execute(update(sources).where(sources.c.id == source).values(**values))


def record_batch(conn: Connection, source: int, batch: Batch, *, train_ratio: float, split_seed: int) -> Recorded:
    """Store one batch in the caller's transaction."""
    batch, gone, erased = without_erased(conn, source, named(conn, source, batch))
    done = Recorded(
        erased=len(erased),
        erased_traces={row.trace_id for row in gone},
        erased_calls={call for row in erased if isinstance(row, Entry) for call in row.calls},
        warnings=list(batch.warnings),
    )
    found: Sequence[Entry] = batch.entries
    if any(entry.asked_alias or entry.follows for entry in found):
        found = enriched(conn, found)
    has_calls = any(entry.calls for entry in found)
    if has_calls:
        found = _without_recorded(conn, source, found)
    entries = {entry.span_id: entry for entry in found}
    dead = {row.span_id: row for row in batch.dead if row.span_id not in entries}
    known = {row.span_id: row for row in _KNOWN.rows(conn, [*entries, *dead], source)}
    with_task = [entry for entry in entries.values() if entry.line]
    splits = Splits(conn, with_task, train_ratio=train_ratio, seed=split_seed)
    records = TaskRecords(conn, splits)
    for span, before in known.items():
        if span in entries:
            done.re_extracted += reingest(conn, before, entries[span], records, done)
    numbers = {row.id: entries[span] for span, row in known.items() if span in entries}
    if new := [entry for span, entry in entries.items() if span not in known]:
        whole = [entry for entry in new if entry.skip is None and not entry.waits]
        first = _add_replies(conn, source, new, records.store(whole))
        numbers |= dict(enumerate(new, first))
        done.new_replies = len(new)
        done.repeated = sum(bool(run_of(entry.span_id, entry.trace_id).start) for entry in new)
        done.pending = sum(entry.waits for entry in new)
        done.skipped = Counter(entry.skip.value for entry in new if entry.skip)
    if has_calls:
        _store_calls(conn, source, numbers)
    splits.store()
    done.new_tasks = records.new
    for span, row in dead.items():
        if span not in known:
            _add_dead(conn, source, row)
            done.dead += 1
        elif known[span].state == ReplyState.DEAD:
            # Its dead letter may have been retried.
            dead_letter(conn, ROW, span, row.error, row.excerpt, source)
    store_checkpoints(conn, source, batch.checkpoints)
    if (cursor := batch.cursor) is not None:
        note_source(
            conn,
            source,
            rowid_done=cursor.rowid,
            identity=cursor.identity,
            fingerprint=cursor.fingerprint,
            generation=cursor.generation,
            anchor=cursor.anchor,
            open_traces=batch.open_traces,
        )
    return done


def _add_replies(conn: Connection, source: int, new: Sequence[Entry], task_numbers: Mapping[str, int]) -> int:
    """Store replies that were not known, numbered from the result on; `task_numbers` are those of their tasks, by
    key."""
    first = first_free(conn, replies.c.id)
    now = utcnow()
    users = users_of(conn, new)
    by_end: dict[tuple[ReplyState, SkipReason | None], list[str]] = {}
    rows: list[tuple[object, ...]] = []
    for number, entry in enumerate(new, first):
        skip = entry.skip
        has_task = skip is None and not entry.waits
        state = ReplyState.SKIPPED if skip else ReplyState.CONVERTED if has_task else ReplyState.OPEN
        rows.append(
            (
                number,
                source,
                entry.span_id,
                entry.trace_id,
                entry.conversation_id,
                entry.agent,
                state.value,
                skip.value if skip else None,
                entry.detail[:500],
                task_numbers[entry.key] if has_task else None,
                entry.content,
                users[entry.user],
                entry.started_at,
                None if has_task else entry.own_id or None,
                now,
            )
        )
        by_end.setdefault((state, skip), []).append(str(number))
    insert_many(conn, replies, _REPLY_COLUMNS, rows)
    for (state, reason), numbers in by_end.items():
        before = None if state is ReplyState.OPEN else ReplyState.CLOSED
        record(conn, replies.name, numbers, before, state, reason or "")
    return first


def _add_dead(conn: Connection, source: int, row: DeadRow) -> None:
    conn.execute(
        insert(replies).values(
            source_id=source,
            span_id=row.span_id,
            trace_id=row.trace_id,
            conversation_id=storable(row.conversation_id),
            user=users_of(conn, [row])[row.user],
            state=ReplyState.DEAD.value,
            detail=storable(row.error)[:500],
            created_at=utcnow(),
        )
    )
    dead_letter(conn, ROW, row.span_id, row.error, row.excerpt, source)


_WAITING: Final = Lookup(
    select(replies.c.id, replies.c.span_id).where(
        replies.c.source_id == bindparam("source"),
        or_(replies.c.state == literal_column(f"'{ReplyState.OPEN.value}'"), replies.c.own_id.is_not(None)),
    ),
    replies.c.span_id,
)
_OF_TRACES: Final = Lookup(
    select(replies.c.span_id, replies.c.trace_id).where(replies.c.source_id == bindparam("source")),
    replies.c.trace_id,
)


def complete(conn: Connection, source: int, spans: Mapping[str, str]) -> None:
    """Give replies that wait (keys) the spans of what completes them (values), unless these are replies already."""
    waiting = list(_WAITING.rows(conn, list(spans), source))
    known = known_spans(conn, source, [spans[row.span_id] for row in waiting])
    for row in waiting:
        if spans[row.span_id] not in known:
            values = {"span_id": spans[row.span_id], "own_id": None}
            conn.execute(update(replies).where(replies.c.id == row.id).values(**values))
        else:
            why = "what it waited for was stored as a reply of its own"
            move(
                conn, row.id, ReplyState.OPEN, ReplyState.SKIPPED, SkipReason.RECORDED,
                skip_reason=SkipReason.RECORDED.value, detail=why,
            )  # fmt: skip


def joined_otherwise(conn: Connection, source: int, spans: Mapping[str, str]) -> set[str]:
    """Those of these spans that are replies already, complete and of another trace than the one given (empty: any),
    or that are the trace of another reply."""
    found = {
        row.span_id
        for row in _KNOWN.rows(conn, list(spans), source)
        if row.state == ReplyState.CONVERTED and row.trace_id != spans[row.span_id]
    }
    waiting = [span for span, trace in spans.items() if not trace]
    return found | {row.trace_id for row in _OF_TRACES.rows(conn, waiting, source) if row.span_id != row.trace_id}


def all_sources(conn: Connection) -> Sequence[Row[Any]]:
    """Every source that was ever read, as its row."""
    return conn.execute(select(sources).order_by(sources.c.id)).all()


def counts_by_source(conn: Connection, source: int | None = None) -> dict[int, SourceCounts]:
    """The counts of every source that has replies, or of one `source`."""
    states: dict[int, Counter[str]] = {}
    skipped: dict[int, Counter[str]] = {}
    columns = (replies.c.source_id, replies.c.state, replies.c.skip_reason)
    query = select(*columns, func.count()).group_by(*columns).order_by(*columns)
    for number, state, reason, count in conn.execute(
        query if source is None else query.where(replies.c.source_id == source)
    ):
        states.setdefault(number, Counter())[state] += count
        if state == ReplyState.SKIPPED:
            skipped.setdefault(number, Counter())[str(reason)] += count
    return {
        number: SourceCounts(
            found.total(),
            found[ReplyState.CONVERTED],
            dict(skipped.get(number, ())),
            found[ReplyState.DEAD],
            found[ReplyState.ERASED],
            found[ReplyState.OPEN],
        )
        for number, found in states.items()
    }


def most_frequent_detail(conn: Connection, source: int) -> str:
    """What is said most often of the skipped replies of a source; empty if nothing is said twice."""
    own = replies.c.source_id == source, replies.c.state == ReplyState.SKIPPED.value
    found = select(replies.c.detail).where(*own).group_by(replies.c.detail).having(func.count() > 1)
    return str(conn.execute(found.order_by(func.count().desc(), replies.c.detail).limit(1)).scalar() or "")


def rewrite_lines(conn: Connection, lines: Mapping[int, Mapping[str, Any]]) -> None:
    """Replace the lines of tasks, by the tasks' numbers, as filters do that redact personal data."""
    for task, line in lines.items():
        text = line_bytes(dict(line)).decode()
        conn.execute(update(tasks).where(tasks.c.id == task).values(payload=type_coerce(text, Text)))


def _without_recorded(conn: Connection, source: int, entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries; those whose calls belong to a reply of another source are skipped."""
    request_ids = list(dict.fromkeys(call for entry in entries for call in entry.calls))
    if not request_ids:
        return entries
    owners: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    for row in _CALL_OWNERS.rows(conn, request_ids):
        if row.source_id != source:
            owners[row.request_id].append(row)
    return [_unless_recorded(entry, owners) for entry in entries] if owners else entries


def _unless_recorded(entry: Entry, owners: Mapping[str, Sequence[Row[Any]]]) -> Entry:
    for owner in (row for call in entry.calls for row in owners.get(call, ())):
        # A copy of the same trace is the same reply.
        is_copy = owner.trace_id == entry.trace_id and run_of(owner.span_id, owner.trace_id) == run_of(
            entry.span_id, entry.trace_id
        )
        if not is_copy and entry.skip is None:
            return replace(
                entry,
                skip=SkipReason.RECORDED,
                detail=_recorded_in(owner.span_id, owner.path),
                line=b"",
                excluded="",
                calls=(),
                missing=(),
            )
    return entry


def _recorded_in(span_id: str, path: str) -> str:
    return f"reply {span_id} of {path} has the same model calls"


def _release_calls(conn: Connection, known: Row[Any], entry: Entry, done: Recorded) -> None:
    """Give up a reply's claims on calls that it does not name any more, and have the traces read again whose replies
    were skipped for its sake."""
    if entry.skip is SkipReason.RECORDED:
        return  # It names them still: they belong to a reply of another source.
    claimed = [row.request_id for row in _CALLS_OF_REPLIES.rows(conn, [known.id])]
    if not (released := [call for call in claimed if call not in entry.calls]):
        return
    own = reply_calls.c.reply_id == known.id
    conn.execute(delete(reply_calls).where(own, reply_calls.c.request_id.in_(released)))
    path = conn.execute(select(sources.c.path).where(sources.c.id == known.source_id)).scalar_one()
    skipped = select(replies.c.source_id, replies.c.trace_id).where(
        replies.c.skip_reason == SkipReason.RECORDED.value,
        replies.c.detail == _recorded_in(known.span_id, path)[:500],
    )
    for source, trace_id in conn.execute(skipped).all():
        if reopen(conn, source, [trace_id]):
            done.reopened.add(source)


def _store_calls(conn: Connection, source: int, entries: Mapping[int, Entry]) -> None:
    """Store the calls of replies, by the replies' numbers. A call that was found once stays found.

    What the calls alone show of a reply that becomes no task is no claim: a trace may show more.
    """
    if not any(entry.calls for entry in entries.values()):
        return
    kind = conn.execute(select(sources.c.type).where(sources.c.id == source)).scalar_one()
    kept = {number: entry for number, entry in entries.items() if entry.calls and not (entry.skip and kind == CALLS)}
    found = {(row.request_id, row.reply_id) for row in _CALLS_OF_REPLIES.rows(conn, list(kept)) if row.is_joined}
    rows: list[tuple[object, ...]] = [
        (call, number, call not in entry.missing or (call, number) in found)
        for number, entry in kept.items()
        for call in entry.calls
    ]
    insert_many(conn, reply_calls, _CALL_COLUMNS, rows, replace=True)


def _were_found(conn: Connection, reply: int, request_ids: Collection[str]) -> bool:
    """Whether a reply was extracted with one of these calls, which have been pruned since."""
    rows = _CALLS_OF_REPLIES.rows(conn, [reply])
    return any(row.is_joined and row.request_id in request_ids for row in rows)


def missing_calls(conn: Connection, since: datetime) -> list[str]:
    """The calls that were not found, of replies that were stored after `since`."""
    query = select(reply_calls.c.request_id).select_from(reply_calls.join(replies))
    wanted = query.where(~reply_calls.c.is_joined, replies.c.created_at >= since.isoformat(timespec="milliseconds"))
    return list(dict.fromkeys(conn.execute(wanted).scalars()))


def lack_calls(conn: Connection, request_ids: Sequence[str]) -> bool:
    """Whether a reply lacked one of these calls."""
    return next(_MISSING_CALLS.rows(conn, request_ids), None) is not None


def reopen_for_calls(conn: Connection, request_ids: Sequence[str]) -> dict[int, int]:
    """Have the traces read again whose replies lacked one of these calls; how many, by source."""
    traces: defaultdict[int, set[str]] = defaultdict(set)
    for row in _MISSING_CALLS.rows(conn, request_ids):
        traces[row.source_id].add(row.trace_id)
    return {source: reopen(conn, source, sorted(found)) for source, found in traces.items()}


def found_calls(conn: Connection, numbers: Sequence[int]) -> dict[int, set[str]]:
    """The calls that were found, by the numbers of their replies."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for row in _CALLS_OF_REPLIES.rows(conn, numbers):
        if row.is_joined:
            found[row.reply_id].add(row.request_id)
    return found


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply in the ledger; `content` is its content hash, None of one that is dead or erased."""

    number: int
    state: ReplyState
    content: int | None


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """What the ledger holds of some traces of a source at one moment."""

    cursor: Cursor
    checkpoints: Mapping[str, Checkpoint]
    replies: Mapping[str, StoredReply]


def snapshot(
    conn: Connection, source: int, trace_ids: Sequence[str], spans: Mapping[str, tuple[str, str]]
) -> LedgerSnapshot:
    """What is held of these traces, and of replies by name; `spans` has the trace and the start of each."""
    query = select(replies.c.span_id, replies.c.id, replies.c.state, replies.c.content)
    rows = rows_in(conn, query.where(replies.c.source_id == source), replies.c.span_id, list(spans))
    found = {row.span_id: StoredReply(row.id, ReplyState(row.state), row.content) for row in rows}
    erased = erased_spans(conn, source, spans)
    found |= {span: StoredReply(number, ReplyState.ERASED, None) for span, number in erased.items()}
    return LedgerSnapshot(cursor_of(conn, source), checkpoints_of(conn, source, trace_ids), found)


def reply_numbers(conn: Connection, source: int) -> set[int]:
    """The numbers of the replies of a source; not of erased ones, which may be gone from it."""
    there = replies.c.source_id == source, replies.c.state != ReplyState.ERASED.value
    return set(conn.execute(select(replies.c.id).where(*there)).scalars())
