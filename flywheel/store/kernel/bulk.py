"""SQL for many values and many rows, and the counting of rows.

`Lookup` and `insert_many` compile their statements once and hand values to the driver as they are stored: SQLAlchemy
processes each value and each execution, which takes longer than storing a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import orjson
from sqlalchemy import (
    JSON,
    ClauseElement,
    Column,
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    Table,
    bindparam,
    func,
    select,
)
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

T = TypeVar("T")

CHUNK: Final = 500
"""Values in one statement: SQLite takes no more than 999 in its older builds."""
_DIALECT: Final = SQLiteDialect_pysqlite()


def chunks(values: Sequence[T], size: int = CHUNK) -> Iterator[list[T]]:
    """The values in portions."""
    for start in range(0, len(values), size):
        yield list(values[start : start + size])


def rows_in(
    conn: Connection, query: Select[Any], column: ColumnElement[Any], values: Sequence[object]
) -> Iterator[Any]:
    """The rows of a query that have one of these values in a column, however many values."""
    for some in chunks(values):
        yield from conn.execute(query.where(column.in_(some)))


def count_rows(conn: Connection, table: FromClause, *where: ColumnElement[bool]) -> int:
    """How many rows of a table or join meet all conditions."""
    return int(conn.execute(select(func.count()).select_from(table).where(*where)).scalar_one())


def sql_text(statement: ClauseElement) -> str:
    """The SQL of a statement, with placeholders for its values in their order."""
    return str(statement.compile(dialect=_DIALECT))


class Lookup:
    """A query, compiled once, for the rows that have one of these values in a column.

    `parameters` of `rows` are the query's own, in their order. Rows are not converted: JSON is text.
    """

    def __init__(self, query: Select[Any], column: Column[Any]) -> None:
        listed = func.json_each(bindparam("values")).table_valued("value")
        self._text = sql_text(query.where(column.in_(select(listed.c.value))))

    def rows(self, conn: Connection, values: Collection[int | str], *parameters: object) -> Iterator[Row[Any]]:
        if values:
            yield from conn.exec_driver_sql(self._text, (*parameters, orjson.dumps(list(values)).decode()))


def insert_many(
    conn: Connection,
    table: Table,
    columns: tuple[str, ...],
    rows: Sequence[tuple[object, ...]],
    *,
    replace: bool = False,
) -> None:
    """Insert rows with values in the order of `columns`, as they are stored: JSON as bytes, no defaults.

    With `replace` they take the place of rows with the same keys.
    """
    if rows:
        conn.exec_driver_sql(_insertion(table, columns, replace), list(rows))


def first_free(conn: Connection, column: Column[Any]) -> int:
    """The first free number of a table, for a writing transaction that numbers its rows itself."""
    return int(conn.execute(select(func.max(column))).scalar_one() or 0) + 1


@cache
def _insertion(table: Table, columns: tuple[str, ...], replace: bool) -> str:
    quote = _DIALECT.identifier_preparer.quote
    names = ", ".join(quote(table.c[name].name) for name in columns)
    # SQLite turns the bytes into text: a Python string would be two more copies of a long line.
    places = ", ".join("CAST(? AS TEXT)" if isinstance(table.c[name].type, JSON) else "?" for name in columns)
    return f"INSERT {'OR REPLACE ' if replace else ''}INTO {quote(table.name)} ({names}) VALUES ({places})"  # noqa: S608
