"""Erased calls of a call log, which never come back, and the later calls that send their messages again.

The standard library and msgspec only, because the server uses it.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from flywheel.serving.calls.stored_parts import LISTS, body_of, contents_of, hash_of, numbers_of, runs, split

TABLES: Final = (
    # Ids are random, so they say nothing of a person. A call that was not in the log has no number.
    "CREATE TABLE IF NOT EXISTS erased (request_id TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS erased_number ON erased (number) WHERE number IS NOT NULL",
)


def mark(connection: sqlite3.Connection, request_ids: Iterable[str]) -> None:
    """Note that these calls are erased, in the transaction that removes them: from then on `append` ignores them."""
    statement = (
        "INSERT INTO erased SELECT ?1, (SELECT number FROM calls WHERE request_id = ?1) WHERE true "
        "ON CONFLICT (request_id) DO UPDATE SET number = coalesce(excluded.number, number)"
    )
    connection.executemany(statement, [(each,) for each in request_ids])


def count_between(connection: sqlite3.Connection, after: int, before: int) -> int:
    """The number of erased calls with numbers between these two."""
    query = "SELECT count(*) FROM erased WHERE number > ? AND number < ? AND number IS NOT NULL"
    return int(connection.execute(query, (after, before)).fetchone()[0])


def resending(connection: sqlite3.Connection, calls: Iterable[tuple[int, str, bytes]]) -> dict[str, list[str]]:
    """The request ids of later calls whose messages begin with all messages of a call, by that call's request id.
    `calls` have number, request id and packed request.

    A later call is read if it has the part of the last message, or one part alone: its body was not split.
    """
    histories: list[tuple[int, str, list[Any], set[int]]] = []
    for number, request_id, request in calls:
        parts, contents = contents_of(connection, request)
        body = b"".join(contents[part] for part in parts)
        if messages := _messages_of(body):
            own = split(body)
            # As the call itself has it, and as later ones do: requests of format 1 have white space in their parts.
            last = {*parts[own.messages][-1:]}
            last |= {*numbers_of(connection, [hash_of(part) for part in own.parts[own.messages][-1:]]).values()}
            histories.append((number, request_id, messages, last))
    found: dict[str, list[str]] = defaultdict(list)
    query = "SELECT number, request_id, request FROM calls WHERE number > ? ORDER BY number"
    for later, later_id, request in connection.execute(query, (min((each[0] for each in histories), default=0),)):
        ranges = runs(request)
        is_whole = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        resent = [
            (request_id, messages)
            for number, request_id, messages, ends in histories
            if number < later and (is_whole or any(first <= end <= last for end in ends for first, last in ranges))
        ]
        sent = _messages_of(body_of(connection, request)) if resent else []
        for request_id, messages in resent:
            if sent[: len(messages)] == messages:
                found[request_id].append(later_id)
    return dict(found)


def _messages_of(body: bytes) -> list[Any]:
    try:
        request = json.loads(body, parse_constant=str)
    except (ValueError, RecursionError):
        return []
    values = [request.get(key) for key in LISTS] if isinstance(request, dict) else []
    return next((each for each in values if isinstance(each, list)), [])
