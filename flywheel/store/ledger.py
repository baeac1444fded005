"""The ledger of replies: what came out of each source, and the tasks made of it.

A batch is stored in one transaction: replies, tasks, dead letters, what is remembered of traces, and the cursor. A
reply that is known already changes nothing if it looks as it did; what happens otherwise is `retelling`'s matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Row, Text, bindparam, func, insert, select, type_coerce, update

from flywheel.batch import Batch, Entry, line_bytes, storable
from flywheel.files import tidied
from flywheel.states import ReplyState, SkipReason, Split, TaskState
from flywheel.store import enrichment
from flywheel.store.bulk import Lookup, first_free, insert_many
from flywheel.store.checkpoints import remember
from flywheel.store.dead_letters import ROW, dead_letter
from flywheel.store.enrichment import completed
from flywheel.store.reingestion import renewed, retell
from flywheel.store.schema import replies, sources, tasks
from flywheel.store.splits import Sides
from flywheel.store.transitions import record, utcnow
from flywheel.trace import Cursor, DeadRow

_KNOWN: Final = Lookup(select(replies).where(replies.c.source_id == bindparam("source")), replies.c.span_id)
_TASKS: Final = Lookup(select(tasks.c.key, tasks.c.id, tasks.c.state), tasks.c.key)


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What the ledger holds of one source: `replies` is the sum of the rest."""

    replies: int
    tasks: int
    skipped: Mapping[str, int]
    dead: int


@dataclass(slots=True)
class Recorded:
    """What one batch changed."""

    new_tasks: int = 0
    new_replies: int = 0
    retold: int = 0
    dead: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def add(self, other: Recorded) -> None:
        self.new_tasks += other.new_tasks
        self.new_replies += other.new_replies
        self.retold += other.retold
        self.dead += other.dead
        self.skipped += other.skipped
        self.warnings += other.warnings

    def onto(self, counts: SourceCounts) -> SourceCounts:
        """The counts after this batch, in which nothing that was known has changed."""
        skipped = Counter(counts.skipped) + self.skipped
        return SourceCounts(
            counts.replies + self.new_replies + self.dead,
            counts.tasks + self.new_replies - self.skipped.total(),
            dict(sorted(skipped.items())),
            counts.dead + self.dead,
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
    """Its number and path: this one, or one that was noted with `..` and leads there."""
    wanted = select(sources.c.id, sources.c.path)
    if (found := conn.execute(wanted.where(sources.c.path == path)).one_or_none()) is not None:
        return found
    detours = conn.execute(wanted.where(sources.c.path.contains("/../")))
    return next((row for row in detours if str(tidied(Path(row.path))) == path), None)


def cursor_of(conn: Connection, source: int) -> Cursor:
    row = conn.execute(select(sources).where(sources.c.id == source)).one()
    return Cursor(row.rowid_done, row.identity, row.fingerprint, row.generation, row.anchor)


def swept_at(conn: Connection, source: int) -> str | None:
    """When the whole source was last compared with the ledger."""
    found = conn.execute(select(sources.c.swept_at).where(sources.c.id == source)).scalar_one()
    return None if found is None else str(found)


def note_source(conn: Connection, /, source: int, **values: Any) -> None:
    """Write what is known of a source besides its cursor: schema, condition, error, longest read."""
    conn.execute(update(sources).where(sources.c.id == source).values(**values))


def record_batch(conn: Connection, source: int, batch: Batch, *, train_ratio: float, split_seed: int) -> Recorded:
    """Store one batch in the caller's transaction."""
    done = Recorded(warnings=list(batch.warnings))
    told = {entry.span_id: entry for entry in completed(conn, batch.entries)}
    asked = [*told, *(row.span_id for row in batch.dead)]
    known = {row.span_id: row for row in _KNOWN.rows(conn, asked, source)}
    sides = Sides(conn, list(told.values()), train_ratio=train_ratio, seed=split_seed)
    for span, before in known.items():
        if span in told:
            done.retold += retell(
                conn,
                before,
                told[span],
                line=partial(_line_of_known, conn, sides),
                make=lambda entry: _record_tasks(conn, [entry], sides, done)[entry.key],
            )
    new = [entry for span, entry in told.items() if span not in known] if known else list(told.values())
    _record_replies(conn, source, new, sides, done)
    sides.store()
    for row in {row.span_id: row for row in batch.dead}.values():
        if row.span_id in told:
            continue
        if row.span_id not in known:
            _record_dead(conn, source, row, done)
        elif known[row.span_id].state == ReplyState.DEAD:
            # Its letter may have been retried.
            dead_letter(conn, ROW, row.span_id, row.error, row.excerpt, source)
    remember(conn, source, batch.checkpoints)
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


def _record_replies(conn: Connection, source: int, new: Sequence[Entry], sides: Sides, done: Recorded) -> None:
    """Replies that were not known: all at once, however many."""
    if not new:
        return
    made = _record_tasks(conn, [entry for entry in new if entry.skip is None], sides, done)
    now = utcnow()
    number = first_free(conn, replies.c.id)
    by_skip: dict[SkipReason | None, list[str]] = {}
    rows: list[tuple[object, ...]] = []
    for entry in new:
        rows.append(
            (
                number,
                source,
                entry.span_id,
                entry.trace_id,
                entry.conversation_id,
                entry.agent,
                _end(entry.skip).value,
                entry.skip.value if entry.skip else None,
                entry.detail[:500],
                None if entry.skip else made[entry.key],
                entry.content,
                now,
            )
        )
        by_skip.setdefault(entry.skip, []).append(str(number))
        number += 1
    insert_many(conn, replies, _REPLY_COLUMNS, rows)
    for skip, some in by_skip.items():
        record(conn, replies.name, some, ReplyState.CLOSED, _end(skip), skip or "")
        if skip:
            done.skipped[skip.value] += len(some)
    done.new_replies += len(new)


_REPLY_COLUMNS: Final = (
    "id", "source_id", "span_id", "trace_id", "conversation_id", "agent", "state", "skip_reason", "detail", "task_id",
    "content", "created_at",
)  # fmt: skip


def _end(skip: SkipReason | None) -> ReplyState:
    return ReplyState.SKIPPED if skip else ReplyState.CONVERTED


def _record_tasks(conn: Connection, new: Sequence[Entry], sides: Sides, done: Recorded) -> dict[str, int]:
    """The tasks of these entries by key; the same reply seen through another source (a copy) has one already."""
    wanted = {entry.key: entry for entry in new}
    made: dict[str, int] = {}
    for row in _TASKS.rows(conn, list(wanted)):
        made[row.key] = row.id
        if row.state == TaskState.WITHDRAWN:
            # None told it any more; now one does again.
            renewed(conn, None, wanted[row.key], partial(_line_of_known, conn, sides))
    lacking = [entry for key, entry in wanted.items() if key not in made]
    if not lacking:
        return made
    now = utcnow()
    number = first_free(conn, tasks.c.id)
    # One by one in the order they began: a later turn of a conversation is shown the earlier ones.
    linked = sorted((entry for entry in lacking if entry.linked), key=lambda entry: entry.started_at)
    plain = [entry for entry in lacking if not entry.linked]
    fresh: dict[str, int] = {}
    for some in (plain, *([entry] for entry in linked)):
        rows: list[tuple[object, ...]] = []
        for entry in some:
            side = sides.of(entry)
            earlier = _earlier(conn, entry)
            fresh[entry.key] = number
            rows.append(
                (
                    number,
                    entry.key,
                    entry.conversation_id,
                    entry.agent,
                    entry.adapter,
                    entry.started_at,
                    side.value,
                    TaskState.PENDING.value,
                    entry.excluded,
                    entry.model,
                    entry.beginning if side is Split.HELD_OUT and not earlier else None,
                    enrichment.line(entry, side, earlier),
                    now,
                )
            )
            number += 1
        insert_many(conn, tasks, _TASK_COLUMNS, rows)
    record(conn, tasks.name, map(str, fresh.values()), None, TaskState.PENDING)
    done.new_tasks += len(fresh)
    return made | fresh


_TASK_COLUMNS: Final = (
    "id", "key", "conversation_id", "agent", "adapter", "started_at", "split", "state", "excluded", "model",
    "beginning", "payload", "created_at",
)  # fmt: skip


def _earlier(conn: Connection, entry: Entry) -> list[tuple[str, str]]:
    """The turns before a reply that its own spans do not show."""
    return enrichment.before(conn, entry) if entry.linked else []


def _line_of_known(conn: Connection, sides: Sides, entry: Entry, side: Split) -> bytes:
    """The task as it is exported that is on a side already: its conversation goes there too, if that is a new one."""
    sides.keep(entry, side)
    return enrichment.line(entry, side, _earlier(conn, entry))


def _record_dead(conn: Connection, source: int, row: DeadRow, done: Recorded) -> None:
    conn.execute(
        insert(replies).values(
            source_id=source,
            span_id=row.span_id,
            trace_id=row.trace_id,
            state=ReplyState.DEAD.value,
            detail=storable(row.error)[:500],
            created_at=utcnow(),
        )
    )
    dead_letter(conn, ROW, row.span_id, row.error, row.excerpt, source)
    done.dead += 1


def all_sources(conn: Connection) -> list[dict[str, Any]]:
    """Every source that was ever read, as its row."""
    return [dict(row) for row in conn.execute(select(sources).order_by(sources.c.id)).mappings()]


def counts_of(conn: Connection, source: int) -> SourceCounts:
    """The counts of one source."""
    return counts_by_source(conn, source).get(source, SourceCounts(0, 0, {}, 0))


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
            found.total(), found[ReplyState.CONVERTED], dict(skipped.get(number, ())), found[ReplyState.DEAD]
        )
        for number, found in states.items()
    }


def rewrite_lines(conn: Connection, lines: Mapping[int, Mapping[str, Any]]) -> None:
    """Replace the lines of tasks, by the tasks' numbers, as filters do that redact personal data."""
    for task, line in lines.items():
        text = line_bytes(dict(line)).decode()
        conn.execute(update(tasks).where(tasks.c.id == task).values(payload=type_coerce(text, Text)))
