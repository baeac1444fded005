"""Many values and many rows at once, in statements whose text is made once.

Values go to the driver as it takes them, and rows come back as it gives them: SQLAlchemy's own way makes objects for
each, and looks at a statement anew whenever it is run, which takes longer than storing a row. Names come from the
schema here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from sqlalchemy import (
    JSON,
    ClauseElement,
    Column,
    ColumnElement,
    Connection,
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
_HOLE: Final = "__[POSTCOMPILE_wanted]"


def chunks(values: Sequence[T]) -> Iterator[list[T]]:
    """The values in portions that one statement takes."""
    for start in range(0, len(values), CHUNK):
        yield list(values[start : start + CHUNK])


def rows_in(
    conn: Connection, query: Select[Any], column: ColumnElement[Any], values: Sequence[object]
) -> Iterator[Any]:
    """The rows of a query that have one of these values in a column, however many values."""
    for some in chunks(values):
        yield from conn.execute(query.where(column.in_(some)))


def sql_text(statement: ClauseElement) -> str:
    """A statement as the driver takes it, with places for its values in the order they are written."""
    return str(statement.compile(dialect=_DIALECT))


class Lookup:
    """A query for the rows that have one of some values in a column, however many values.

    What is given with them takes the places of the query's own parameters, in their order.
    """

    def __init__(self, query: Select[Any], column: Column[Any]) -> None:
        wanted = column.in_(bindparam("wanted", expanding=True))
        self._text = sql_text(query.where(wanted))
        assert self._text.count(_HOLE) == 1

    def rows(self, conn: Connection, values: Sequence[object], *given: object) -> Iterator[Row[Any]]:
        for some in chunks(values):
            # Filled up to one of a few lengths, so that the driver meets the same few texts again and again.
            lacking = (1 << (len(some) - 1).bit_length()) - len(some)
            filled = (*given, *some, *some[-1:] * lacking)
            places = ", ".join("?" * (len(some) + lacking))
            yield from conn.exec_driver_sql(self._text.replace(_HOLE, places), filled)


def insert_many(
    conn: Connection,
    table: Table,
    columns: tuple[str, ...],
    rows: Sequence[tuple[object, ...]],
    *,
    replace: bool = False,
) -> None:
    """Insert rows, their values in the order of `columns` and as they are stored: JSON as its bytes, no defaults.

    They `replace` those with the same keys.
    """
    if rows:
        conn.exec_driver_sql(_insertion(table, columns, replace), list(rows))


def first_free(conn: Connection, column: Column[Any]) -> int:
    """The first of the numbers that a writing transaction may give away itself: nobody else writes meanwhile."""
    return int(conn.exec_driver_sql(_highest(column)).scalar_one() or 0) + 1


@cache
def _insertion(table: Table, columns: tuple[str, ...], replace: bool) -> str:
    quote = _DIALECT.identifier_preparer.quote
    names = ", ".join(quote(table.c[name].name) for name in columns)
    # The bytes become text within SQLite: as a Python string a long one would be made twice more.
    places = ", ".join("CAST(? AS TEXT)" if isinstance(table.c[name].type, JSON) else "?" for name in columns)
    return f"INSERT {'OR REPLACE ' if replace else ''}INTO {quote(table.name)} ({names}) VALUES ({places})"  # noqa: S608


@cache
def _highest(column: Column[Any]) -> str:
    return sql_text(select(func.max(column)))
