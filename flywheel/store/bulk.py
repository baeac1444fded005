"""Many rows at once, as the driver takes them.

SQLAlchemy's own way makes a dictionary of parameters for each row, which takes longer than storing it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Table, bindparam, insert


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
