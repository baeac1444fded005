"""Many values and many rows at once.

Rows go to the driver as it takes them: SQLAlchemy's own way makes a dictionary of parameters for each, which takes
longer than storing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from sqlalchemy import Connection, Table, bindparam, insert

T = TypeVar("T")

CHUNK = 500
"""Values in one statement: SQLite takes no more than 999 in its older builds."""


def chunks(values: Sequence[T]) -> Iterator[list[T]]:
    """The values in portions that one statement takes."""
    for start in range(0, len(values), CHUNK):
        yield list(values[start : start + CHUNK])


def insert_many(conn: Connection, table: Table, columns: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    """Insert rows, their values in the order of `columns` and as they are stored: JSON as text, no defaults."""
    if not rows:
        return
    statement = insert(table).values({name: bindparam(name) for name in columns})
    compiled = statement.compile(dialect=conn.dialect, column_keys=list(columns))
    order = compiled.positiontup
    if order is None or list(order) != list(columns):
        places = [list(columns).index(name) for name in (order or columns)]
        rows = [tuple(row[place] for place in places) for row in rows]
    conn.exec_driver_sql(str(compiled), list(rows))
