"""Where conversations that begin alike are found, by bands of their MinHash signatures.

Bands are hashes, so a new one can belong anywhere, and each would change another page of a table that grows for ever.
New ones are therefore put into a small table, whose pages take many at once, and go over into the large one in one
sorted portion now and then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, Table, delete, func, insert, select

from flywheel.store import signature_filter
from flywheel.store.bulk import Lookup, insert_many, spelled
from flywheel.store.schema import conversations, openings, recent_openings

RECENT: Final = 50_000
"""Rows of the small table, at most: two megabytes."""


def _found_in(table: Table) -> Lookup:
    query = select(table.c.band, table.c.key, conversations.c.split, conversations.c.words)
    return Lookup(query.select_from(table.join(conversations)), table.c.band)


_FOUND_RECENTLY: Final = _found_in(recent_openings)
_FOUND: Final = _found_in(openings)
_COUNT: Final = spelled(select(func.count()).select_from(recent_openings))
_BANDS: Final = spelled(select(recent_openings.c.band))


def with_bands(conn: Connection, bands: Sequence[int]) -> Iterator[Row[Any]]:
    """Conversations (band, key, split, words) that have one of these bands; once for each that they have."""
    yield from _FOUND_RECENTLY.rows(conn, bands)
    yield from _FOUND.rows(conn, signature_filter.may_have(conn, bands))


def enter(conn: Connection, rows: Sequence[tuple[object, ...]]) -> None:
    """Have conversations be found: a row of band and key for each band."""
    if not rows:
        return
    insert_many(conn, recent_openings, ("band", "key"), rows)
    count = int(conn.exec_driver_sql(_COUNT).scalar_one())
    if count > RECENT:
        in_order = select(recent_openings.c.band, recent_openings.c.key).order_by(recent_openings.c.band)
        conn.execute(insert(openings).from_select(("band", "key"), in_order))
        signature_filter.add(conn, signature_filter.bands_in(conn, _BANDS), count)
        conn.execute(delete(recent_openings))
