"""Recorded calls without traces: which call continues which, and the replies that they are.

A call continues an earlier one if its messages begin with that call's messages and its answer. Without a question
behind them it is a part of the same reply, with one it begins a reply in the same conversation. Two that continue the
same call are a fork: the second begins a conversation of its own, in the split of the first. So does a call of
another model, and one with a context that the client has compressed, which is recognised by ids of tool calls.

Each call is placed once, in the order in which the calls began. Of its messages only keyed hashes are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from sqlalchemy import Connection, Row, delete, func, insert, not_, select, update
from sqlalchemy.dialects.sqlite import insert as insert_or_ignore

from flywheel.records.trace import CallOutline, PlacedCall
from flywheel.store.kernel.bulk import Lookup, chunks, rows_in
from flywheel.store.kernel.database import ERASURE_KEY, noted
from flywheel.store.kernel.schema import call_hashes, erased_answers, placed_calls

EARLY_NS: Final = 1_000_000_000
"""A call may begin this much before the end of the call that it continues, as that is recorded: clients go on when
they have seen the end of an answer, and servers have clocks of their own."""
_HASH_BYTES: Final = 16
_PLACED: Final = Lookup(
    select(placed_calls.c.request_id, placed_calls.c.trace_id, placed_calls.c.is_erased), placed_calls.c.request_id
)
_ERASED: Final = Lookup(select(placed_calls.c.trace_id).where(placed_calls.c.is_erased), placed_calls.c.trace_id)
_WITH_HASHES: Final = call_hashes.join(placed_calls)
_waiting: Final = placed_calls.alias("waiting")
_WAITING: Final = select(_waiting.c.trace_id).where(_waiting.c.due_ns.is_not(None))


def place(conn: Connection, calls: Iterable[CallOutline], *, idle_ns: int, wait_ns: int) -> None:
    """Place those of these calls that are not placed yet, in this order.

    A call continues one that ended within `idle_ns` before it. A reply is due `wait_ns` after its answer, or
    `idle_ns` after its last call without one.
    """
    outlines = {call.request_id: call for call in calls}
    placed = list(_PLACED.rows(conn, list(outlines)))
    for row in placed:
        del outlines[row.request_id]
    # A call log that was removed was pulled again.
    hand_on(conn, [row.trace_id for row in placed if row.is_erased], due_ns=0)
    hashed = _keyed(conn)
    for call in outlines.values():
        _place(conn, call, hashed, idle_ns, wait_ns)


def _keyed(conn: Connection) -> Callable[[bytes], bytes]:
    """The hash that is stored of one: without the key of this state, nobody can compute it from a text."""
    key = bytes.fromhex(noted(conn, ERASURE_KEY))
    return lambda value: blake2b(value, key=key, digest_size=_HASH_BYTES).digest()


def _place(conn: Connection, call: CallOutline, hashed: Callable[[bytes], bytes], idle_ns: int, wait_ns: int) -> None:
    beginnings = {hashed(value): number for number, value in call.beginnings}
    is_erased = next(rows_in(conn, select(erased_answers), erased_answers.c.hash, list(beginnings)), None) is not None
    earlier = _continued(conn, call, beginnings, idle_ns)
    trace, conversation, ended_ns = call.trace_id, call.conversation, call.ended_ns
    root = earlier.root if earlier is not None else _newest_root(conn, map(hashed, call.tool_ids)) or conversation
    if earlier is not None and (earlier.model != call.model or earlier.is_erased != is_erased):
        # Another agent, with an alias of its own, goes on: its reply is one of its own, in the same split.
        earlier = None
    if earlier is not None and (call.is_skipped or not earlier.is_continued):
        conversation = earlier.conversation
    if earlier is not None and not (call.is_skipped or earlier.is_continued):
        own = placed_calls.c.trace_id == earlier.trace_id
        conn.execute(update(placed_calls).where(placed_calls.c.number == earlier.number).values(is_continued=True))
        if call.last_question <= beginnings[earlier.hash]:
            trace = earlier.trace_id
            before = select(func.max(placed_calls.c.ended_ns)).where(own)
            ended_ns = max(ended_ns, conn.execute(before).scalar_one())
            conn.execute(update(placed_calls).where(own).values(due_ns=None))
        elif not earlier.is_answered:
            conn.execute(update(placed_calls).where(own).values(due_ns=0))
    added = insert(placed_calls).values(
        request_id=call.request_id,
        trace_id=trace,
        conversation=conversation,
        root=root,
        model=call.model,
        started_ns=call.started_ns,
        ended_ns=call.ended_ns,
        placed_ns=time.time_ns(),
        is_answered=call.is_answered,
        is_continued=False,
        is_erased=is_erased,
        due_ns=0 if is_erased else ended_ns + (wait_ns if call.is_answered else idle_ns),
    )
    number = conn.execute(added.returning(placed_calls.c.number)).scalar_one()
    ends = set(map(hashed, call.ends))
    if is_erased:
        refuse_hashes(conn, ends)
    if rows := [{"hash": each, "number": number} for each in {*ends, *map(hashed, call.own_tool_ids)}]:
        conn.execute(insert(call_hashes), rows)


def _continued(conn: Connection, call: CallOutline, beginnings: Mapping[bytes, int], idle_ns: int) -> Row[Any] | None:
    """The call that this one continues, with the hash by which it is known: of those with the most messages, one that
    had ended, then one that nothing continues yet, and of these the newest."""
    since, until = call.started_ns - idle_ns, call.started_ns + EARLY_NS
    query = select(call_hashes.c.hash, placed_calls).select_from(_WITH_HASHES)
    rows = rows_in(
        conn, query.where(placed_calls.c.ended_ns.between(since, until)), call_hashes.c.hash, list(beginnings)
    )

    def rank(row: Row[Any]) -> tuple[int, bool, bool, int]:
        return beginnings[row.hash], row.ended_ns <= call.started_ns, not row.is_continued, row.ended_ns

    return max(rows, key=rank, default=None)


def _newest_root(conn: Connection, tool_ids: Iterable[bytes]) -> str:
    """The root of the newest call that asked for one of these tool calls; empty if there is none."""
    query = select(placed_calls.c.ended_ns, placed_calls.c.root).select_from(_WITH_HASHES)
    newest = max(map(tuple, rows_in(conn, query, call_hashes.c.hash, list(tool_ids))), default=None)
    return newest[1] if newest is not None else ""


def due(conn: Connection, now_ns: int, limit: int) -> list[list[PlacedCall]]:
    """The calls of some of the replies that are due, the oldest first; none if none is left."""
    traces = select(placed_calls.c.trace_id).where(placed_calls.c.due_ns <= now_ns).group_by(placed_calls.c.trace_id)
    oldest = traces.order_by(func.min(placed_calls.c.due_ns)).limit(limit)
    return _replies(conn, list(conn.execute(oldest).scalars()))


def next_due_ns(conn: Connection) -> int | None:
    """When the next reply is due; None if none is waiting."""
    waits = placed_calls.c.due_ns.is_not(None)
    found: int | None = conn.execute(select(func.min(placed_calls.c.due_ns)).where(waits)).scalar_one()
    return found


def count_waiting(conn: Connection) -> int:
    """How many replies are not due yet."""
    return len(set(conn.execute(_WAITING).scalars()))


def handed_on(conn: Connection, after: int, limit: int) -> tuple[int, list[list[PlacedCall]]]:
    """The replies of the next calls with numbers above `after` that were handed on, at most `limit` calls, and the
    number of the last of these; 0 if there are none. Portions may share a reply."""
    wanted = select(placed_calls.c.number, placed_calls.c.trace_id).where(
        placed_calls.c.number > after, placed_calls.c.trace_id.not_in(_WAITING)
    )
    rows = conn.execute(wanted.order_by(placed_calls.c.number).limit(limit)).all()
    return (rows[-1].number if rows else 0), _replies(conn, list(dict.fromkeys(row.trace_id for row in rows)))


def _replies(conn: Connection, traces: Sequence[str]) -> list[list[PlacedCall]]:
    """The calls of each of these traces, in order."""
    found: dict[str, list[PlacedCall]] = {trace: [] for trace in traces}
    columns = (placed_calls.c[name] for name in PlacedCall.__struct_fields__)
    query = select(*columns).order_by(placed_calls.c.number)
    for row in rows_in(conn, query, placed_calls.c.trace_id, traces):
        found[row.trace_id].append(PlacedCall(*row))
    return list(found.values())


def hand_on(conn: Connection, traces: Collection[str], due_ns: int | None = None) -> int:
    """Note that the replies with these trace ids were handed on, or when they are due again; of how many calls they
    are."""
    own = (update(placed_calls).where(placed_calls.c.trace_id.in_(some)) for some in chunks(list(traces)))
    return sum(conn.execute(each.values(due_ns=due_ns)).rowcount for each in own)


def prune(conn: Connection, before_ns: int) -> None:
    """Forget what was placed before `before_ns`: no later call can continue it, and its reply is kept only until it
    was handed on."""
    old = placed_calls.c.placed_ns < before_ns
    growing = select(_waiting.c.trace_id).where(_waiting.c.placed_ns >= before_ns)
    conn.execute(delete(call_hashes).where(call_hashes.c.number.in_(select(placed_calls.c.number).where(old))))
    kept = placed_calls.c.trace_id.in_(_WAITING), placed_calls.c.trace_id.in_(growing)
    conn.execute(delete(placed_calls).where(old, *map(not_, kept)))


def of_calls(
    conn: Connection, request_ids: Collection[str], conversations: Collection[str], traces: Collection[str]
) -> Iterator[Row[Any]]:
    """The placed calls with one of these request ids, conversations or trace ids; some more than once."""
    yield from rows_in(conn, select(placed_calls), placed_calls.c.request_id, sorted(request_ids))
    yield from rows_in(conn, select(placed_calls), placed_calls.c.conversation, sorted(conversations))
    yield from rows_in(conn, select(placed_calls), placed_calls.c.trace_id, sorted(traces))


def going_on_from_erased(conn: Connection, traces: Collection[str]) -> set[str]:
    """Those of these traces whose calls go on from erased ones."""
    return {row.trace_id for row in _ERASED.rows(conn, traces)}


def refuse(conn: Connection, calls: Iterable[CallOutline], request_ids: Collection[str]) -> set[str]:
    """Have nothing stored that goes on from the calls with these ids, which are about to be erased, and hand on none
    of their replies; the conversations of these. `calls` are those that are in the call log, placed or not."""
    hashed = _keyed(conn)
    query = select(call_hashes.c.hash).select_from(_WITH_HASHES)
    # With those of ids of tool calls, which no beginning is equal to.
    placed = {row.hash for row in rows_in(conn, query, placed_calls.c.request_id, sorted(request_ids))}
    refuse_hashes(conn, placed | {hashed(end) for call in calls for end in call.ends})
    rows = list(of_calls(conn, request_ids, (), ()))
    hand_on(conn, {row.trace_id for row in rows})
    return {row.conversation for row in rows}


def refuse_hashes(conn: Connection, hashes: Collection[bytes]) -> None:
    """Have nothing stored that goes on from calls with these hashes."""
    if hashes:
        rows = [{"hash": each} for each in sorted(hashes)]
        conn.execute(insert_or_ignore(erased_answers).on_conflict_do_nothing(), rows)


def refused_hashes(conn: Connection) -> list[bytes]:
    """The hashes of erased calls."""
    return list(conn.execute(select(erased_answers.c.hash).order_by(erased_answers.c.hash)).scalars())


def forget(conn: Connection, request_ids: Collection[str]) -> None:
    """Remove what is stored of erased calls; what is refused stays."""
    for some in chunks(sorted(request_ids)):
        own = placed_calls.c.request_id.in_(some)
        conn.execute(delete(call_hashes).where(call_hashes.c.number.in_(select(placed_calls.c.number).where(own))))
        conn.execute(delete(placed_calls).where(own))
