"""Notices: what `notify` tells of, found in the events of the state, in their order.

An event that happens twice, as a source that fails again after it had recovered, is two notices.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, func, select

from flywheel.config.notices import NoticeType, NotifySettings
from flywheel.records.states import DeadLetterState, DeploymentState, RoundState, WatchState
from flywheel.store.deployments import rollback_cause
from flywheel.store.kernel import database
from flywheel.store.kernel.schema import dead_letters, deployments, events, meta, rounds, sources, watches
from flywheel.store.kernel.transitions import record

JUDGE: Final = "judge"
"""The kind of events about judging."""
WORKS: Final = "ok"
POSITION: Final = "notices of "
"""Beginning of the keys of notes with the positions of entries of `notify`."""
QUIET_CONDITIONS: Final = frozenset({"ok", "busy", ""})
"""Conditions of sources that nobody has to do something about."""
_TYPES: Final = {
    (rounds.name, RoundState.PASSED.value): NoticeType.PASSED,
    (rounds.name, RoundState.PROMOTED.value): NoticeType.PROMOTED,
    (rounds.name, RoundState.REJECTED.value): NoticeType.REJECTED,
    (deployments.name, DeploymentState.ACTIVE.value): NoticeType.ROLLED_BACK,
    (dead_letters.name, DeadLetterState.OPEN.value): NoticeType.DEAD_LETTERS,
    (watches.name, WatchState.NOT_SHOWN.value): NoticeType.WATCH_INCONCLUSIVE,
    (watches.name, NoticeType.WATCH_INCONCLUSIVE.value): NoticeType.WATCH_INCONCLUSIVE,
    (JUDGE, NoticeType.JUDGE_FAILING.value): NoticeType.JUDGE_FAILING,
    (JUDGE, NoticeType.BUDGET_SPENT.value): NoticeType.BUDGET_SPENT,
}
"""Types by kind and new state of an event. Events of sources are another case."""


@dataclass(frozen=True, slots=True)
class Notice:
    """`id` is the number of its event, `subject` names what it is about, `page` is the path of the page on which a
    person can decide about it, empty if there is nothing to decide."""

    id: int
    at: str
    type: NoticeType
    subject: str
    text: str
    page: str = ""


def newest_event(conn: Connection) -> int:
    """The number of the newest event; 0 without any."""
    return int(conn.execute(select(func.max(events.c.id))).scalar_one() or 0)


def after(
    conn: Connection, number: int, wanted: Collection[NoticeType], limit: int, most: int | None = None
) -> tuple[list[Notice], int]:
    """The notices among the next `limit` events after this one, or the first `most` of them, and the number of the
    last of these events."""
    rows = conn.execute(select(events).where(events.c.id > number).order_by(events.c.id).limit(limit)).all()
    found = ((row, kind) for row in rows if (kind := _type_of(row)) in wanted and kind is not None)
    made = (notice for row, kind in found if (notice := _notice(conn, row, kind)) is not None)
    return list(itertools.islice(made, most)), rows[-1].id if rows else number


def keys_of(entry: NotifySettings) -> list[str]:
    """The keys under which an entry's position may be noted, first the one that is used. A URL may be a secret."""
    known_by = [f"name {entry.name}", entry.way] if entry.name is not None else [entry.way]
    return [f"{POSITION}{hashlib.sha256(each.encode()).hexdigest()[:16]}" for each in known_by]


def keep(conn: Connection, entry: NotifySettings, position: int) -> None:
    """Note how far an entry was told, and of what, so that what it misses can be counted when it is removed."""
    database.note(conn, keys_of(entry)[0], f"{position} {' '.join(entry.on)}")


def resume(conn: Connection, entries: Sequence[NotifySettings]) -> int:
    """Note the position of each entry; returns how many notices are dropped that waited for entries which are gone.

    A new entry is not told of what happened before. One without a name that replaces exactly one other, as after a
    correction of its URL, goes on where that one was.
    """
    found = conn.execute(select(meta).where(meta.c.key.startswith(POSITION))).all()
    noted = {row.key: (int(row.value.split()[0]), row.value.split()[1:]) for row in found}
    gone = noted.keys() - {key for entry in entries for key in keys_of(entry)}
    new = [entry for entry in entries if not noted.keys() & set(keys_of(entry))]
    start = newest_event(conn)
    if len(gone) == len(new) == 1 and new[0].name is None:
        start = noted[gone.pop()][0]
    dropped = 0
    for key in gone:
        position, types = noted[key]
        wanted = [NoticeType(each) for each in types] or list(NoticeType)
        while (page := after(conn, position, wanted, 2_000))[1] != position:
            dropped, position = dropped + len(page[0]), page[1]
    for key in noted:
        database.note(conn, key, "")
    for entry in entries:
        keep(conn, entry, next((noted[key][0] for key in keys_of(entry) if key in noted), start))
    return dropped


def note_judge(conn: Connection, error: str, *, spent: bool = False) -> None:
    """Note why judging does not go on, if it does not. A change is an event."""
    _note_change(conn, JUDGE, error, spent=spent)
    database.note(conn, database.JUDGE_NOTE, error)


def note_pause(conn: Connection, name: str, why: str, *, spent: bool) -> None:
    """Note why the round of this name waits for its judge, if it does. A change is an event."""
    _note_change(conn, name, why, spent=spent)


def note_watch(conn: Connection, watch: Row[Any], kind: str, text: str) -> None:
    """Note once why a watch may not find out anything."""
    own = events.c.kind == watches.name, events.c.subject == str(watch.id), events.c.old == kind
    if conn.execute(select(events.c.id).where(*own).limit(1)).scalar_one_or_none() is None:
        record(conn, watches.name, [str(watch.id)], kind, NoticeType.WATCH_INCONCLUSIVE, text)


def _note_change(conn: Connection, subject: str, error: str, *, spent: bool) -> None:
    state = WORKS if not error else NoticeType.BUDGET_SPENT if spent else NoticeType.JUDGE_FAILING
    last = select(events.c.new).where(events.c.kind == JUDGE, events.c.subject == subject)
    before = conn.execute(last.order_by(events.c.id.desc()).limit(1)).scalar_one_or_none() or WORKS
    if before != state:
        record(conn, JUDGE, [subject], before, state, error)


def _type_of(event: Row[Any]) -> NoticeType | None:
    if event.kind == sources.name:
        return None if event.new in QUIET_CONDITIONS else NoticeType.SOURCE_ERROR
    return _TYPES.get((event.kind, event.new))


def _notice(conn: Connection, event: Row[Any], kind: NoticeType) -> Notice | None:
    """None for what is none: a swap that was no rollback."""

    def row_of(*columns: Any) -> Sequence[Any]:
        table = columns[0].table
        return conn.execute(select(*columns).where(table.c.id == int(event.subject))).one()

    detail, page = f": {event.detail}" if event.detail else "", ""
    if event.kind == JUDGE:
        subject = event.subject
        text = f"judging is stopped{detail}" if subject == JUDGE else f"{subject} is paused{detail}"
    elif event.kind == rounds.name:
        subject, reason, target = row_of(rounds.c.name, rounds.c.reason, rounds.c.target)
        of = f" of {target}" if target else ""
        text = f"{subject}{of} is {kind}{f': {reason}' if reason else ''}"
        if kind is NoticeType.PASSED:
            text = f"{subject}{of} passed the gate and {event.detail} ({reason})"
            page = f"/rounds/{subject}"
    elif event.kind == deployments.name:
        alias, adapter, reason = row_of(deployments.c.alias, deployments.c.adapter, deployments.c.reason)
        if (why := rollback_cause(reason)) is None:
            return None
        subject, text = alias, f"{alias} was rolled back to {adapter or 'the base model'}{why}"
    elif event.kind == watches.name:
        alias, adapter = row_of(watches.c.alias, watches.c.adapter)
        subject, text = alias, f"the watch of {adapter or 'the base model'} as {alias} cannot decide{detail}"
    elif event.kind == dead_letters.name:
        unit, subject, error = row_of(dead_letters.c.kind, dead_letters.c.subject, dead_letters.c.error)
        text = f"the {unit} {subject} could not be processed: {error}"
    else:
        [subject] = row_of(sources.c.path)
        text = f"the source {subject} is {event.new}{detail}"
    return Notice(event.id, event.at, kind, subject, text, page)
