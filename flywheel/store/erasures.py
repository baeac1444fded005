"""Erasures: everything of a conversation, or of a user's conversations, is removed from the state and stays away.

An erased reply leaves a row that the balance counts: its source, pseudonyms of its span with its start and of its
trace, and the day on which it began. An erased task leaves an empty row. Pseudonyms are HMACs (RFC 2104, SHA-256)
with a key that is in the state alone. By them ingestion recognises what was erased, and what an erased conversation
brings later: its next call would send the whole history again.
"""

from __future__ import annotations

import hmac
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple

from msgspec.structs import replace
from sqlalchemy import (
    Connection,
    Row,
    Table,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.sqlite import insert as insert_or_ignore

from flywheel.records.erasure import ERASED
from flywheel.records.privacy import named_in
from flywheel.records.repeated_ids import RUN_ENDS_NS
from flywheel.records.states import ReplyState, SkipReason, TaskState
from flywheel.records.task import NO_CONVERSATION, Batch, Entry, conversation_key
from flywheel.records.trace import DeadRow
from flywheel.store import deduplication, placed_calls
from flywheel.store.dead_letters import ROW, TASK
from flywheel.store.kernel import schema
from flywheel.store.kernel.bulk import Lookup, chunks, rows_in
from flywheel.store.kernel.database import ERASURE_KEY, ERROR_OF, noted
from flywheel.store.kernel.schema import (
    conversations,
    dead_letters,
    embeddings,
    erased_conversations,
    erasures,
    events,
    fingerprints,
    gate_conversations,
    judge_errors,
    meta,
    replies,
    reply_calls,
    requests,
    round_samples,
    rounds,
    sources,
    tasks,
    watch_units,
)
from flywheel.store.kernel.transitions import move, record, utcnow
from flywheel.store.notices import JUDGE
from flywheel.store.reply_names import WITH_SPANS, run_of

_IS_ERASED: Final = replies.c.state == literal_column(f"'{ReplyState.ERASED.value}'")
_TOMBSTONES: Final = Lookup(
    select(replies.c.span_id, replies.c.id).where(replies.c.source_id == bindparam("source"), _IS_ERASED),
    replies.c.span_id,
)
_KNOWN: Final = Lookup(select(replies.c.span_id).where(replies.c.source_id == bindparam("source")), replies.c.span_id)
_TRACES: Final = Lookup(
    select(replies.c.trace_id, replies.c.started_at).where(_IS_ERASED).distinct(), replies.c.trace_id
)
_IS_ABOUT: Final = and_(
    dead_letters.c.kind == ROW,
    dead_letters.c.subject == replies.c.span_id,
    dead_letters.c.source_id == replies.c.source_id,
)
"""Whether a dead letter is about a reply."""
_CONVERSATIONS: Final = Lookup(select(erased_conversations.c.pseudonym), erased_conversations.c.pseudonym)
CALL: Final = "call"
"""In place of a `Kind`, of the hash of an erased call."""


class Kind(StrEnum):
    """What an id names."""

    CONVERSATION = "conversation"
    USER = "user"
    SPAN = "span"
    TRACE = "trace"
    TASK = "task"
    SERVICE = "service"
    """what one service has of a conversation (`in_service`)"""


class ErasureState(StrEnum):
    """How far an erasure got."""

    OPEN = "open"
    """nothing new is stored; files and rows are being erased"""
    ERASED = "erased"
    """no row has it any more; SQLite's files may"""
    PURGED = "purged"
    """no file has it any more"""


class Pseudonyms:
    """The pseudonyms of ids in this state, as 32 hexadecimal digits."""

    def __init__(self, conn: Connection) -> None:
        self._key = bytes.fromhex(noted(conn, ERASURE_KEY))

    def of(self, kind: Kind, text: str) -> str:
        """Empty for an id that there is not: it would make all rows without one the same."""
        if not text:
            return ""
        message = f"{kind.value}\0{text}".encode("utf-8", "surrogatepass")
        return hmac.digest(self._key, message, "sha256")[:16].hex()


def in_service(conversation: str, service: str) -> str:
    """The id of what one service has of a conversation: others may use the same id for conversations of their own."""
    return json.dumps([conversation, service])


def are_there(conn: Connection) -> bool:
    """Whether anything was ever erased."""
    return bool(conn.execute(select(exists(select(erasures.c.id)))).scalar_one())


def blocked(conn: Connection, named: Collection[str], users: Collection[str]) -> tuple[set[str], set[str]]:
    """Those of these conversations that are erased, and of these users who are blocked."""
    pseudonyms = Pseudonyms(conn)
    by_pseudonym = {pseudonyms.of(Kind.CONVERSATION, each): each for each in named}
    erased = {by_pseudonym[row.pseudonym] for row in _CONVERSATIONS.rows(conn, list(by_pseudonym))}
    refused = _blocked_users(conn)
    return erased, {user for user in users if pseudonyms.of(Kind.USER, user) in refused}


def _blocked_users(conn: Connection) -> set[str]:
    of_users = select(erasures.c.pseudonym).where(erasures.c.kind == Kind.USER.value, erasures.c.blocks)
    return set(conn.execute(of_users).scalars())


def users_of(conn: Connection, entries: Iterable[Entry | DeadRow]) -> dict[str, str]:
    """The pseudonyms of the users of some entries or dead rows, by user; empty for none."""
    users = {entry.user for entry in entries}
    if not users - {""}:
        return {"": ""}
    pseudonyms = Pseudonyms(conn)
    return {user: pseudonyms.of(Kind.USER, user) if user else "" for user in users}


class _Mark(NamedTuple):
    """By what an erased reply is recognised, as its row has it. `started_at` is the day on which it began, empty if
    that is not known."""

    span_id: str
    trace_id: str
    started_at: str


class _Marks:
    """The marks of the replies of one source."""

    def __init__(self, conn: Connection, source: int) -> None:
        kind = conn.execute(select(sources.c.type).where(sources.c.id == source)).scalar_one()
        self._pseudonyms = Pseudonyms(conn)
        self._ids_repeat = kind in WITH_SPANS

    def of(self, name: str, trace_id: str, start: str) -> _Mark:
        """The mark of the reply of this name. The name depends on what was stored before it, so that its parts and
        the start are taken where ids repeat; elsewhere the start may be that of reading."""
        start = start if self._ids_repeat else ""
        span = "\0".join((run_of(name, trace_id).span_id, trace_id, start)) if self._ids_repeat else name
        return _Mark(self._pseudonyms.of(Kind.SPAN, span), self._pseudonyms.of(Kind.TRACE, trace_id), start[:10])


def without_erased(
    conn: Connection, source: int, batch: Batch
) -> tuple[Batch, list[Entry | DeadRow], list[Entry | DeadRow]]:
    """A batch without what was erased or belongs to an erased conversation, the rows of that, and those that are new.

    They are stored as erased replies, so that each reply of the source is counted.
    """
    if not (batch.entries or batch.dead) or not are_there(conn):
        return batch, [], []
    pseudonyms, marks = Pseudonyms(conn), _Marks(conn, source)
    rows: tuple[Entry | DeadRow, ...] = (*batch.entries, *batch.dead)
    own = {row.span_id: marks.of(row.span_id, row.trace_id, _start(row)) for row in rows}
    named = {key: pseudonyms.of(*key) for row in rows for key in _keys_of(row)}
    there = erased_spans(conn, source, {row.span_id: (row.trace_id, _start(row)) for row in rows})
    going_on = placed_calls.going_on_from_erased(conn, {row.trace_id for row in rows})
    days = defaultdict[str, set[str]](set)
    for found in _TRACES.rows(conn, sorted({mark.trace_id for mark in own.values()} - {""})):
        days[found.trace_id].add(found.started_at)
    erased = {row.pseudonym for row in _CONVERSATIONS.rows(conn, list(named.values()))}
    users = users_of(conn, rows)
    refused = _blocked_users(conn)

    def is_erased(row: Entry | DeadRow) -> bool:
        mark = own[row.span_id]
        if row.span_id in there or row.trace_id in going_on:
            return True
        if any(_can_be_one_run(mark.started_at, day) for day in days[mark.trace_id]):
            return True
        return users[row.user] in refused or any(named[key] in erased for key in _keys_of(row))

    gone = {row.span_id: row for row in rows if is_erased(row)}
    if not gone:
        return batch, [], []
    # What is known under its own id is about to be erased.
    known = {row.span_id for row in _KNOWN.rows(conn, list(gone), source)}
    new = {own[span]: row for span, row in gone.items() if span not in there and span not in known}
    values = {"source_id": source, "state": ReplyState.ERASED.value, "created_at": utcnow()}
    for mark in new:
        added = insert(replies).values(**values, **mark._asdict())
        number = conn.execute(added.returning(replies.c.id)).scalar_one()
        record(conn, replies.name, [str(number)], None, ReplyState.ERASED)
    entries = tuple(entry for entry in batch.entries if entry.span_id not in gone)
    dead = tuple(row for row in batch.dead if row.span_id not in gone)
    return replace(batch, entries=entries, dead=dead), list(gone.values()), list(new.values())


def erased_spans(conn: Connection, source: int, spans: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    """Those of these replies that are erased, by name, with their numbers. `spans` has the trace and the start of
    each."""
    if not are_there(conn):
        return {}
    marks = _Marks(conn, source)
    by_mark = {
        marks.of(name, trace, at).span_id: name for name, (trace, start) in spans.items() for at in ("", start)
    }
    return {by_mark[row.span_id]: row.id for row in _TOMBSTONES.rows(conn, list(by_mark), source)}


def _start(row: Entry | DeadRow) -> str:
    """When a reply began; empty while that is not certain: its agent's own span may arrive later."""
    return "" if isinstance(row, DeadRow) or row.skip is SkipReason.UNFINISHED else row.started_at


def _can_be_one_run(day: str, other: str) -> bool:
    """Whether replies of one trace id that began on these days can be of one run (`RUN_ENDS_NS`)."""
    return "" in (day, other) or abs(date.fromisoformat(day) - date.fromisoformat(other)) <= timedelta(days=1)


def _keys_of(row: Entry | DeadRow) -> list[tuple[Kind, str]]:
    """The conversation of an entry or a dead row, and the one that an entry forks from, as they are and within its
    service."""
    own = conversation_key(row.conversation_id, row.trace_id)
    if isinstance(row, DeadRow):
        return [(Kind.CONVERSATION, own)]
    keys = dict.fromkeys((own, row.split_key))
    within = [(Kind.SERVICE, in_service(key, row.service)) for key in keys if row.service]
    return [*((Kind.CONVERSATION, key) for key in keys), *within]


@dataclass(slots=True)
class Touched:
    """What belongs to some conversations: `replies` by number, `tasks` (keys by number), ids of conversations, traces
    and spans, request ids of recorded calls, and the names of the rounds that used the tasks. Of `shared`
    conversations other services keep their part."""

    conversations: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    replies: set[int] = field(default_factory=set)
    tasks: dict[int, str] = field(default_factory=dict)
    traces: set[str] = field(default_factory=set)
    spans: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    rounds: dict[str, str] = field(default_factory=dict)
    """Directories by the name of the round."""

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the tasks: `task_id` in files."""
        return frozenset(self.tasks.values())


def conversations_of_user(conn: Connection, user: str) -> set[str]:
    """The conversations in which a user asked something, by their keys."""
    pseudonym = Pseudonyms(conn).of(Kind.USER, user)
    rows = conn.execute(select(replies.c.conversation_id, replies.c.trace_id).where(replies.c.user == pseudonym))
    return {key for row in rows if (key := conversation_key(row.conversation_id, row.trace_id))}


def named_in_letters(conn: Connection, wanted: Set[str], user: str) -> set[int]:
    """The numbers of replies that cannot be read, and whose dead letters name one of these conversations or a user
    (empty: none). What was stored without those names is found by it."""
    letters = select(replies.c.id, dead_letters.c.excerpt).join(dead_letters, _IS_ABOUT)
    found = set()
    for row in conn.execute(letters.where(dead_letters.c.excerpt != "")):
        conversations, users = named_in(row.excerpt)
        if not wanted.isdisjoint(conversations) or (user and user in users):
            found.add(row.id)
    return found


def conversations_of(conn: Connection, erasure: int) -> set[str]:
    """The conversations that an erasure is to erase, by their keys, as far as they are still there."""
    named = select(erased_conversations.c.pseudonym).where(erased_conversations.c.erasure_id == erasure)
    if not (pseudonyms := set(conn.execute(named).scalars())):
        return set()
    rows = conn.execute(
        select(replies.c.conversation_id, replies.c.trace_id)
        .where(replies.c.state != ReplyState.ERASED.value)
        .distinct()
    )
    keys = {conversation_key(row.conversation_id, row.trace_id) for row in rows}
    found = Pseudonyms(conn)
    return {key for key in keys if found.of(Kind.CONVERSATION, key) in pseudonyms}


_SERVICE: Final = func.coalesce(tasks.c.payload["metadata"]["service"].as_string(), "")
_SERVICES: Final = select(replies.c.trace_id, _SERVICE.label("service")).select_from(replies.join(tasks)).distinct()


def services_by_trace(conn: Connection, conversation: str, known: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The traces that the state has of a conversation, and the `known` ones, each with the services of its tasks
    beside those that are known. A trace without any may be of every service."""
    here = select(replies.c.trace_id).where(
        or_(replies.c.conversation_id == conversation, replies.c.trace_id == conversation), ~_IS_ERASED
    )
    found = {trace: set[str]() for trace in conn.execute(here).scalars()}
    found |= {trace: set(services) for trace, services in known.items()}
    for row in rows_in(conn, _SERVICES, replies.c.trace_id, sorted(found)):
        found[row.trace_id] |= {row.service} - {""}
    return found


def calls_of_traces(conn: Connection, traces: Collection[str]) -> set[str]:
    """The recorded calls that the replies of these traces name."""
    query = select(reply_calls.c.request_id).select_from(reply_calls.join(replies))
    return {row.request_id for row in rows_in(conn, query, replies.c.trace_id, sorted(traces))}


def within_services(conn: Connection, erasure: int) -> list[tuple[str, str]]:
    """The conversation and the service of an erasure that is known by its pseudonym alone, as far as tasks of it are
    there: after a restore."""
    wanted = conn.execute(select(erasures.c.pseudonym).where(erasures.c.id == erasure)).scalar_one()
    there = select(tasks.c.conversation_id, _SERVICE).where(tasks.c.state != TaskState.ERASED.value).distinct()
    pairs = [(str(conversation), str(service)) for conversation, service in conn.execute(there)]
    pseudonyms = Pseudonyms(conn)
    return [pair for pair in pairs if pseudonyms.of(Kind.SERVICE, in_service(*pair)) == wanted]


def touched(
    conn: Connection,
    wanted: Collection[str],
    calls: Collection[str] = (),
    traces: Collection[str] = (),
    user: str = "",
) -> Touched:
    """What the state has of these conversations, recorded calls and traces, and of rows that cannot be read and name
    them or the user.

    All replies of their traces belong to it: an agent that another one calls sees the conversation, too.
    """
    found = Touched(conversations=set(wanted), calls=set(calls), traces=set(traces))
    found.replies = named_in_letters(conn, found.conversations - NO_CONVERSATION, user)
    columns = replies.c.id, replies.c.span_id, replies.c.trace_id, replies.c.task_id
    query = select(*columns).where(replies.c.state != ReplyState.ERASED.value)
    of_calls = select(reply_calls.c.reply_id)
    seen = -1
    while seen != len(found.replies):
        seen = len(found.replies)
        ids = sorted(found.conversations - NO_CONVERSATION)
        for call in list(placed_calls.of_calls(conn, found.calls, ids, found.traces)):
            found.calls.add(call.request_id)
            found.traces.add(call.trace_id)
        by_call = {row.reply_id for row in rows_in(conn, of_calls, reply_calls.c.request_id, sorted(found.calls))}
        rows = [
            *rows_in(conn, query, replies.c.conversation_id, ids),
            *rows_in(conn, query, replies.c.trace_id, sorted((found.traces | found.conversations) - {""})),
            *rows_in(conn, query, replies.c.id, sorted(by_call | found.replies)),
            *rows_in(conn, query, replies.c.task_id, sorted(found.tasks)),
        ]
        for row in rows:
            found.replies.add(row.id)
            found.spans.add(row.span_id)
            found.traces |= {row.trace_id} - {""}
            if row.task_id is not None:
                found.tasks.setdefault(row.task_id, "")
        named = select(reply_calls.c.request_id)
        found.calls |= {row.request_id for row in rows_in(conn, named, reply_calls.c.reply_id, sorted(found.replies))}
    keys = select(tasks.c.id, tasks.c.key)
    found.tasks = {row.id: row.key for row in rows_in(conn, keys, tasks.c.id, sorted(found.tasks))}
    used = select(rounds.c.name, rounds.c.dir).join(round_samples, round_samples.c.round_id == rounds.c.id).distinct()
    found.rounds = {row.name: row.dir for row in rows_in(conn, used, round_samples.c.task_id, sorted(found.tasks))}
    return found


def others_in_traces(conn: Connection, found: Touched) -> list[dict[str, str]]:
    """What is erased with a conversation because it has the same trace ids: other conversations, and runs that named
    none. Each has `trace`, `span`, `conversation` and `started_at`."""
    columns = replies.c.id, replies.c.span_id, replies.c.trace_id, replies.c.conversation_id, replies.c.started_at
    own, rest = defaultdict[str, list[Row[Any]]](list), []
    for row in rows_in(conn, select(*columns), replies.c.id, sorted(found.replies)):
        if conversation_key(row.conversation_id, row.trace_id) in found.conversations:
            own[row.trace_id].append(row)
        else:
            rest.append(row)

    def is_other(row: Row[Any]) -> bool:
        if row.conversation_id not in NO_CONVERSATION:
            return True
        same = {run_of(each.span_id, each.trace_id).span_id for each in own[row.trace_id]}
        apart = [abs(_ns(each.started_at) - _ns(row.started_at)) for each in own[row.trace_id] if each.started_at]
        return run_of(row.span_id, row.trace_id).span_id in same or not any(time < RUN_ENDS_NS for time in apart)

    return [
        {
            "trace": row.trace_id,
            "span": run_of(row.span_id, row.trace_id).span_id,
            "conversation": row.conversation_id,
            "started_at": row.started_at,
        }
        for row in sorted(rest, key=lambda row: row.id)
        if own[row.trace_id] and row.started_at and is_other(row)
    ]


def _ns(time: str) -> int:
    return int(datetime.fromisoformat(time).timestamp()) * 10**9


def begin(conn: Connection, kind: Kind, subject: str, wanted: Collection[str], *, blocks: bool) -> int:
    """Store that a conversation, or a user with these conversations, is to be erased; the number of the erasure.

    From now on nothing of them is stored, judged or trained on.
    """
    pseudonym = Pseudonyms(conn).of(kind, subject)
    number = _open(conn, kind, pseudonym, blocks=blocks, subject=subject, finished_at=None, report=None)
    block(conn, number, wanted)
    if kind is Kind.SERVICE:
        _block(conn, number, [pseudonym])
    return number


def _open(conn: Connection, kind: str, pseudonym: str, *, blocks: bool, **values: Any) -> int:
    """Store an erasure, or open the one of this pseudonym again; its number. A user who has been blocked stays it."""
    values |= {"state": ErasureState.OPEN.value}
    row = {"subject": "", **values, "kind": str(kind), "pseudonym": pseudonym, "blocks": blocks}
    again = {**values, "blocks": erasures.c.blocks | literal(blocks)}
    added = insert_or_ignore(erasures).values(**row, created_at=utcnow())
    query = added.on_conflict_do_update(index_elements=["kind", "pseudonym"], set_=again)
    return int(conn.execute(query.returning(erasures.c.id)).scalar_one())


def has_begun(conn: Connection, kind: Kind, subject: str) -> bool:
    """Whether it is or was to be erased."""
    own = erasures.c.kind == kind.value, erasures.c.pseudonym == Pseudonyms(conn).of(kind, subject)
    return bool(conn.execute(select(exists().where(*own))).scalar_one())


def block(conn: Connection, erasure: int, wanted: Collection[str]) -> None:
    """Store nothing of these conversations any more."""
    pseudonyms = Pseudonyms(conn)
    _block(conn, erasure, [pseudonyms.of(Kind.CONVERSATION, key) for key in sorted(wanted)])


def _block(conn: Connection, erasure: int, pseudonyms: Collection[str]) -> None:
    added, own = insert_or_ignore(erased_conversations), {"erasure_id": erasure}
    if rows := [{"pseudonym": each, **own} for each in pseudonyms]:
        conn.execute(added.on_conflict_do_update(index_elements=["pseudonym"], set_=own), rows)


def take_out(conn: Connection, numbers: Collection[int]) -> None:
    """Move tasks to `erased`: nothing judges them or trains on them any more. Their texts are erased later."""
    query = select(tasks.c.id, tasks.c.state).where(tasks.c.state != TaskState.ERASED.value)
    for row in list(rows_in(conn, query, tasks.c.id, sorted(numbers))):
        move(conn, row.id, TaskState(row.state), TaskState.ERASED)


def in_states(conn: Connection, *states: ErasureState) -> Sequence[Row[Any]]:
    """The erasures in these states, the oldest first."""
    wanted = erasures.c.state.in_([state.value for state in states])
    return conn.execute(select(erasures).where(wanted).order_by(erasures.c.id)).all()


def with_id(conn: Connection, number: int) -> Row[Any]:
    return conn.execute(select(erasures).where(erasures.c.id == number)).one()


def note(conn: Connection, number: int, state: ErasureState, report: Mapping[str, Any]) -> None:
    """Note how far an erasure got, which does not say any more whom it was about."""
    finished = {"finished_at": utcnow()} if state is ErasureState.PURGED else {}
    values: dict[str, Any] = {"state": state.value, "report": report, "subject": "", **finished}
    conn.execute(update(erasures).where(erasures.c.id == number).values(**values))


def everything_erased(conn: Connection) -> list[dict[str, Any]]:
    """All erasures as they are kept beside a backup: pseudonyms of conversations and users, what is blocked, and the
    hashes of erased calls."""
    found = conn.execute(select(erased_conversations.c.pseudonym).order_by(erased_conversations.c.pseudonym))
    within = set(conn.execute(select(erasures.c.pseudonym).where(erasures.c.kind == Kind.SERVICE.value)).scalars())
    kinds = {name: Kind.SERVICE.value if name in within else Kind.CONVERSATION.value for name in found.scalars()}
    users = conn.execute(select(erasures).where(erasures.c.kind == Kind.USER.value).order_by(erasures.c.id))
    return [
        *({"kind": kind, "pseudonym": name, "blocks": True} for name, kind in kinds.items()),
        *({"kind": row.kind, "pseudonym": row.pseudonym, "blocks": row.blocks} for row in users),
        *({"kind": CALL, "pseudonym": each.hex(), "blocks": True} for each in placed_calls.refused_hashes(conn)),
    ]


def adopt(conn: Connection, given: Sequence[Mapping[str, Any]]) -> None:
    """Take over erasures that were made since a backup, as open ones. The conversations of erased users are among
    those given."""
    placed_calls.refuse_hashes(conn, {bytes.fromhex(each["pseudonym"]) for each in given if each["kind"] == CALL})
    for each in (each for each in given if each["kind"] != CALL):
        number = _open(conn, each["kind"], each["pseudonym"], blocks=bool(each["blocks"]))
        if each["kind"] in (Kind.CONVERSATION, Kind.SERVICE):
            _block(conn, number, [each["pseudonym"]])


def scrub(conn: Connection, found: Touched) -> None:
    """Erase all texts and ids of what was found from the state, and errors that could quote them; what must stay for
    the balance keeps pseudonyms."""
    pseudonyms = Pseudonyms(conn)
    if found.replies:
        _erase_errors(conn)
    take_out(conn, found.tasks)
    _empty_tasks(conn, found, pseudonyms)
    _rename_conversations(conn, found, pseudonyms)
    _empty_replies(conn, found, pseudonyms)
    names = {key: pseudonyms.of(Kind.TASK, key) for key in found.keys}
    _rename(conn, names | {span: pseudonyms.of(Kind.SPAN, span) for span in found.spans})


def _erase_errors(conn: Connection) -> None:
    """Erase errors that nothing assigns to a task, and could quote any: of the judge, of stages, of sources, and what
    notices say of them. They are counted as before, and stages and sources say theirs again when they fail again."""
    by_hour = select(judge_errors.c.hour, func.sum(judge_errors.c.count)).group_by(judge_errors.c.hour)
    rows = [{"hour": hour, "error": ERASED, "count": count} for hour, count in conn.execute(by_hour)]
    conn.execute(delete(judge_errors))
    if rows:
        conn.execute(insert(judge_errors), rows)
    of_notices, of_stages = events.c.kind.in_([JUDGE, sources.name]), meta.c.key.startswith(ERROR_OF)
    of_sources = ((sources.c.error, true()), (sources.c.warning, true()))
    for column, where in ((events.c.detail, of_notices), (meta.c.value, of_stages), *of_sources):
        conn.execute(update(column.table).where(where, column != "").values({column.name: ERASED}))


def _emptied(table: Table, *kept: str, **values: Any) -> dict[str, Any]:
    """The `values` of an erased row, and empty ones for all other columns but those that are `kept`."""
    others = [column for column in table.c if column.name not in {*kept, *values}]
    return {column.name: None if column.nullable else column.type.python_type() for column in others} | values


def _delete_parts(conn: Connection, table: Table, ids: Sequence[int]) -> None:
    """Delete what belongs to these tasks or replies: the rows of every table that refers to them, except replies, and
    what rounds used."""
    for other in reversed(schema.metadata.sorted_tables):
        of = [key.parent for key in other.foreign_keys if key.column.table is table]
        for column in of if other not in (replies, round_samples) else ():
            for some in chunks(ids):
                conn.execute(delete(other).where(column.in_(some)))


def _empty_tasks(conn: Connection, found: Touched, pseudonyms: Pseudonyms) -> None:
    ids = sorted(found.tasks)
    texts = {row.text for row in rows_in(conn, select(fingerprints.c.text), fingerprints.c.task_id, ids)}
    deduplication.free_repetitions(conn, ids)
    of_task = select(tasks.c.id, tasks.c.key, tasks.c.conversation_id)
    for row in list(rows_in(conn, of_task, tasks.c.id, ids)):
        key, own = pseudonyms.of(Kind.TASK, row.key), pseudonyms.of(Kind.CONVERSATION, row.conversation_id)
        kept = ("id", "split", "state", "created_at")
        empty = _emptied(tasks, *kept, key=key, conversation_id=own, payload={})
        conn.execute(update(tasks).where(tasks.c.id == row.id).values(empty))
    _delete_parts(conn, tasks, ids)
    is_used = exists().where(fingerprints.c.text == embeddings.c.text)
    for each in chunks(sorted(texts)):
        conn.execute(delete(embeddings).where(embeddings.c.text.in_(each), ~is_used))
    of_tasks = select(dead_letters).where(dead_letters.c.kind == TASK)
    letters = list(rows_in(conn, of_tasks, dead_letters.c.subject, sorted(found.keys)))
    _empty_letters(conn, letters, Kind.TASK, pseudonyms)
    _silence(conn, tasks, ids)


def _rename_conversations(conn: Connection, found: Touched, pseudonyms: Pseudonyms) -> None:
    """Splits stay; what a later conversation could be compared with goes."""
    renamed = found.conversations | found.traces
    for some in chunks(sorted(renamed | found.shared)):
        for table in (schema.recent_bands, schema.signature_bands):
            conn.execute(delete(table).where(table.c.key.in_(some)))
        conn.execute(update(conversations).where(conversations.c.key.in_(some)).values(words=b""))
    for column in (conversations.c.key, conversations.c.like, gate_conversations.c.conversation):
        rows = list(rows_in(conn, select(column.label("name")).distinct(), column, sorted(renamed)))
        for name in (row.name for row in rows):
            values = {column.name: pseudonyms.of(Kind.CONVERSATION, name)}
            conn.execute(update(column.table).where(column == name).values(values))


def _empty_replies(conn: Connection, found: Touched, pseudonyms: Pseudonyms) -> None:
    ids = sorted(found.replies)
    placed_calls.forget(conn, found.calls)
    for calls in chunks(sorted(found.calls)):
        own, is_counted = watch_units.c.request_id.in_(calls), watch_units.c.place.is_not(None)
        conn.execute(delete(watch_units).where(own, ~is_counted))
        # What the tests have counted stays: they hold at every moment only if no unit is taken out afterwards.
        name = func.printf("erased %d", watch_units.c.place)
        conn.execute(update(watch_units).where(own).values(unit=name, request_id=name))
    _delete_parts(conn, replies, ids)
    of_replies = select(dead_letters).join(replies, _IS_ABOUT)
    _empty_letters(conn, list(rows_in(conn, of_replies, replies.c.id, ids)), Kind.SPAN, pseudonyms)
    marks: dict[int, _Marks] = {}
    for row in list(rows_in(conn, select(replies), replies.c.id, ids)):
        of_source = marks.setdefault(row.source_id, _Marks(conn, row.source_id))
        has_start = row.state != ReplyState.DEAD and row.skip_reason != SkipReason.UNFINISHED
        mark = of_source.of(row.span_id, row.trace_id, row.started_at if has_start else "")
        move(conn, row.id, ReplyState(row.state), ReplyState.ERASED)
        empty = _emptied(replies, "id", "source_id", "state", "created_at", **mark._asdict())
        # Rows of one mark are one reply.
        conn.execute(update(replies).prefix_with("OR REPLACE").where(replies.c.id == row.id).values(empty))
    _silence(conn, replies, ids)


def _empty_letters(conn: Connection, letters: Collection[Row[Any]], of: Kind, pseudonyms: Pseudonyms) -> None:
    kept = ("id", "kind", "source_id", "state", "attempts", "created_at")
    for row in letters:
        empty = _emptied(dead_letters, *kept, subject=pseudonyms.of(of, row.subject), error=ERASED)
        conn.execute(update(dead_letters).where(dead_letters.c.id == row.id).values(empty))
    _silence(conn, dead_letters, [row.id for row in letters])


def _silence(conn: Connection, table: Table, ids: Iterable[int]) -> None:
    """Erase what events say of these rows, which may quote them."""
    subjects = [str(number) for number in ids]
    for some in chunks(subjects):
        said = events.c.kind == table.name, events.c.subject.in_(some), events.c.detail != ""
        conn.execute(update(events).where(*said).values(detail=""))


def _rename(conn: Connection, names: Mapping[str, str]) -> None:
    """Replace ids by their pseudonyms in requests of people, and erase their comments and errors."""
    for row in list(conn.execute(select(requests))):
        before = {"arguments": row.arguments, "result": row.result}
        if (said := _renamed(before, names)) != before:
            error = ERASED if row.error else ""
            conn.execute(update(requests).where(requests.c.id == row.id).values(**said, error=error))


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [_renamed(each, names) for each in value]
    if isinstance(value, dict):
        said = {names.get(name, name): _renamed(each, names) for name, each in value.items()}
        # What a person wrote about an erased reply.
        return {**said, "comment": ""} if "comment" in said and said != value else said
    return value
