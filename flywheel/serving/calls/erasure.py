"""Erases calls from a call log, with the parts of bodies that no other call has.

Which calls use a part follows from their packed requests: the log itself notes only the last call that does. Between
any two transactions every call in the log is whole. The standard library and msgspec only, because the server uses
it.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from flywheel.serving.calls.stored_parts import runs

TABLES: Final = (
    # Ids are random, so they say nothing of a person. A call that is not in the log has no number.
    "CREATE TABLE IF NOT EXISTS erased (request_id TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS erased_number ON erased (number) WHERE number IS NOT NULL",
)


class Packed(NamedTuple):
    """A call by number, with the numbers of its request's parts as `packed` writes them."""

    number: int
    request_id: str
    request: bytes


def mark(connection: sqlite3.Connection, request_ids: Iterable[str]) -> None:
    """Note that these calls are erased, before they are: from then on `append` ignores them."""
    connection.executemany("INSERT OR IGNORE INTO erased VALUES (?, NULL)", [(each,) for each in request_ids])


def find(connection: sqlite3.Connection, request_ids: Iterable[str]) -> list[Packed]:
    """Those of the calls that are there, the oldest first."""
    query = "SELECT number, request_id, request FROM calls WHERE request_id = ?"
    rows = (connection.execute(query, (each,)).fetchone() for each in request_ids)
    return sorted(Packed(*row) for row in rows if row)


def other_users(connection: sqlite3.Connection, going: Sequence[Packed]) -> dict[int, int]:
    """The number of the last other call that has a part, 0 without one, for each part whose last call is going."""
    left = sorted(part for call in going for part in _last_used(connection, call))
    found = dict.fromkeys(left, 0)
    numbers = {call.number for call in going}
    query = "SELECT number, request FROM calls WHERE number < ? ORDER BY number DESC"
    for number, request in connection.execute(query, (max(numbers),)):
        if not left:
            break
        if number not in numbers:
            for first, last in runs(request):
                start, end = bisect_left(left, first), bisect_right(left, last)
                found.update(dict.fromkeys(left[start:end], number))
                del left[start:end]
    return found


def remove(connection: sqlite3.Connection, going: Sequence[Packed], others: Mapping[int, int]) -> int | None:
    """Remove calls, the oldest of those for which `others` was made; returns how many were there. None, with nothing
    changed, if another process has erased calls since then: `others` is to be made again.

    A newer call that has a part keeps it as it is. As the oldest go first, no other call that goes has a part of
    which a call is the last user.
    """
    freed = [(call, list(_last_used(connection, call))) for call in going if _is_there(connection, call.number)]
    parts = [part for _, own in freed for part in own]
    users = {others.get(part, -1) for part in parts} - {0}
    if not all(_is_there(connection, user) for user in users):
        return None
    for call, _ in freed:
        connection.execute("UPDATE erased SET number = ? WHERE request_id = ?", (call.number, call.request_id))
        connection.execute("DELETE FROM calls WHERE number = ?", (call.number,))
    unused = [(part,) for part in parts if not others[part]]
    connection.executemany("DELETE FROM parts WHERE part = ?", unused)
    connection.executemany("DELETE FROM part_uses WHERE part = ?", unused)
    used = [(others[part], part) for part in parts if others[part]]
    connection.executemany("UPDATE part_uses SET last_call = ? WHERE part = ?", used)
    return len(freed)


def _last_used(connection: sqlite3.Connection, call: Packed) -> Iterator[int]:
    """The parts that no later call has."""
    query = "SELECT part FROM part_uses WHERE part BETWEEN ? AND ? AND last_call = ?"
    for run in set(runs(call.request)):
        yield from (part for (part,) in connection.execute(query, (*run, call.number)))


def _is_there(connection: sqlite3.Connection, number: int) -> bool:
    return connection.execute("SELECT 1 FROM calls WHERE number = ?", (number,)).fetchone() is not None


def count_between(connection: sqlite3.Connection, after: int, before: int) -> int:
    """The number of erased calls with numbers between these two."""
    query = "SELECT count(*) FROM erased WHERE number > ? AND number < ? AND number IS NOT NULL"
    (count,) = connection.execute(query, (after, before)).fetchone()
    return int(count)
