"""The span table of a file: of which generation it is, and whether its rows can be read in order.

What is anything else is told with what was expected and found; the source waits in error.
"""

from __future__ import annotations

from collections.abc import Sequence

from flywheel.errors import StudioError
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.faults import fault
from flywheel.sources.studio.row import TABLE, shown
from flywheel.sources.studio.schema import GENERATIONS, Schema, fingerprint, recognise

_NUMBERS = "rowid"
_OWN = f"Point the source at Studio's own database, with the {TABLE} that Studio made."


def schema_of(database: Database) -> tuple[Schema, str]:
    """Which generation a file is, and its fingerprint. Raises StudioError for one that is not Studio's."""
    path = database.path
    columns = [
        (name.decode(), kind.decode())
        for name, kind in database.ask("SELECT name, type FROM pragma_table_info(?)", (TABLE,))
    ]
    names = [name for name, _ in columns]
    if not columns:
        raise _other_tables(database)
    schema = recognise(names)
    if schema is None:
        expected = " or ".join(" and ".join(sorted(known.marks)) for known in GENERATIONS)
        raise fault(
            path,
            f"its {TABLE} is of no known generation (fingerprint {fingerprint(columns)}): expected the columns "
            f"{expected}, found {', '.join(names)}",
            "Use a Studio from 1.0.5 to 1.0.9, or report this version.",
            "unknown schema",
        )
    if lacking := [column for column in schema.columns if column not in names]:
        raise fault(
            path,
            f"its {TABLE} ({schema.name}, fingerprint {fingerprint(columns)}) lacks the columns {', '.join(lacking)}",
            "Let Studio finish its migration, or restore the database from a backup.",
            "unknown schema",
        )
    if why := _unnumbered(database, names):
        raise fault(path, f"its {TABLE} {why}", _OWN, "unknown schema")
    return schema, fingerprint(columns)


def _other_tables(database: Database) -> StudioError:
    tables = [name.decode() for (name,) in database.ask("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = f"it holds {', '.join(sorted(tables)[:8])}" if tables else "it holds no table"
    return fault(
        database.path,
        f"it is a SQLite database but not Studio's: there is no {TABLE} ({found})",
        "Point the source at Studio's own database, usually ~/AgentScope-Studio/database.sqlite.",
        "not Studio's",
    )


def _unnumbered(database: Database, names: Sequence[str]) -> str:
    """Why rows cannot be read in the order of their numbers, from 1 on; empty if they can."""
    if _NUMBERS in (name.lower() for name in names):
        return f"has a column of the name {_NUMBERS}, which hides the rows' own numbers"
    for kind, sql in database.ask("SELECT type, sql FROM sqlite_master WHERE lower(name) = ?", (TABLE,)):
        if kind != b"table":
            return f"is a {shown(kind)}: its rows have no numbers"
        if b"WITHOUT ROWID" in sql.upper().rpartition(b")")[2]:
            return "is a table WITHOUT ROWID: its rows have no numbers"
    first = database.first_rowid()
    return f"has rows with numbers below 1 (the first is {first})" if first is not None and first < 1 else ""
