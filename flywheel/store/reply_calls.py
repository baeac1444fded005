"""The recorded calls of each reply: which reply they belong to, and which of them were not found in the call log yet.

Two sources may show the same reply: its trace, and the calls alone. The source that is stored first keeps it. A
skipped reply of a trace keeps its calls as well, unless the trace shows nothing of it: then extraction names none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace
from sqlalchemy import Connection, Row, select

from flywheel.records.batch import Entry
from flywheel.records.states import SkipReason
from flywheel.store.checkpoints import reopen
from flywheel.store.kernel.bulk import Lookup, insert_many
from flywheel.store.kernel.schema import replies, reply_calls, sources

CALLS: Final = "calls"
"""The type of sources that are made of the calls alone."""
_COLUMNS: Final = ("request_id", "reply_id", "is_joined")
_OWNERS: Final = Lookup(
    select(
        reply_calls.c.request_id, replies.c.source_id, replies.c.trace_id, replies.c.span_id, sources.c.path
    ).select_from(reply_calls.join(replies).join(sources)),
    reply_calls.c.request_id,
)
_OF_REPLIES: Final = Lookup(select(reply_calls), reply_calls.c.reply_id)
_MISSING: Final = Lookup(
    select(replies.c.source_id, replies.c.trace_id)
    .select_from(reply_calls.join(replies))
    .where(~reply_calls.c.is_joined),
    reply_calls.c.request_id,
)


def without_recorded(conn: Connection, source: int, entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries; those whose calls belong to a reply of another source are skipped."""
    request_ids = list(dict.fromkeys(call for entry in entries for call in entry.calls))
    if not request_ids:
        return entries
    owners: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    for row in _OWNERS.rows(conn, request_ids):
        if row.source_id != source:
            owners[row.request_id].append(row)
    return [_unless_recorded(entry, owners) for entry in entries] if owners else entries


def _unless_recorded(entry: Entry, owners: Mapping[str, Sequence[Row[Any]]]) -> Entry:
    for owner in (row for call in entry.calls for row in owners.get(call, ())):
        # A copy of the same trace is the same reply.
        if (owner.trace_id, owner.span_id) != (entry.trace_id, entry.span_id) and entry.skip is None:
            return replace(
                entry,
                skip=SkipReason.RECORDED,
                detail=f"reply {owner.span_id} of {owner.path} has the same model calls",
                line=b"",
                beginning=0,
                words=(),
                bands=(),
                excluded="",
                calls=(),
                missing=(),
            )
    return entry


def store(conn: Connection, source: int, entries: Mapping[int, Entry]) -> None:
    """Store the calls of replies, by the replies' numbers. A call that was found once stays found.

    What the calls alone show of a reply that becomes no task is no claim: a trace may show more.
    """
    if not any(entry.calls for entry in entries.values()):
        return
    kind = conn.execute(select(sources.c.type).where(sources.c.id == source)).scalar_one()
    kept = {number: entry for number, entry in entries.items() if entry.calls and not (entry.skip and kind == CALLS)}
    found = {(row.request_id, row.reply_id) for row in _OF_REPLIES.rows(conn, list(kept)) if row.is_joined}
    rows: list[tuple[object, ...]] = [
        (call, number, call not in entry.missing or (call, number) in found)
        for number, entry in kept.items()
        for call in entry.calls
    ]
    insert_many(conn, reply_calls, _COLUMNS, rows, replace=True)


def were_found(conn: Connection, reply: int, request_ids: Collection[str]) -> bool:
    """Whether a reply was extracted with one of these calls, which have been pruned since."""
    rows = _OF_REPLIES.rows(conn, [reply])
    return any(row.is_joined and row.request_id in request_ids for row in rows)


def missing(conn: Connection, since: datetime) -> list[str]:
    """The calls that were not found, of replies that were stored after `since`."""
    query = select(reply_calls.c.request_id).select_from(reply_calls.join(replies))
    wanted = query.where(~reply_calls.c.is_joined, replies.c.created_at >= since.isoformat(timespec="milliseconds"))
    return list(dict.fromkeys(conn.execute(wanted).scalars()))


def lack(conn: Connection, request_ids: Sequence[str]) -> bool:
    """Whether a reply lacked one of these calls."""
    return next(_MISSING.rows(conn, request_ids), None) is not None


def reopen_for(conn: Connection, request_ids: Sequence[str]) -> dict[int, int]:
    """Have the traces read again whose replies lacked one of these calls; how many, by source."""
    traces: defaultdict[int, set[str]] = defaultdict(set)
    for row in _MISSING.rows(conn, request_ids):
        traces[row.source_id].add(row.trace_id)
    return {source: reopen(conn, source, sorted(found)) for source, found in traces.items()}


def found_by_reply(conn: Connection, numbers: Sequence[int]) -> dict[int, set[str]]:
    """The calls that were found, by the numbers of their replies."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for row in _OF_REPLIES.rows(conn, numbers):
        if row.is_joined:
            found[row.reply_id].add(row.request_id)
    return found
