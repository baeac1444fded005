"""How a state database gets to the present schema, step by step. A database from a newer Flywheel is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from sqlalchemy import Connection, inspect, select

from flywheel.errors import StoreError
from flywheel.store.schema import SCHEMA_VERSION, meta, metadata

VERSION_KEY: Final = "schema_version"


def _create(conn: Connection) -> None:
    metadata.create_all(conn)


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = MappingProxyType({1: _create})
"""What leads to each version from the one before."""


def version_of(conn: Connection) -> int:
    """The schema version; 0 of an empty database."""
    if not inspect(conn).has_table("meta"):
        return 0
    value = conn.execute(select(meta.c.value).where(meta.c.key == VERSION_KEY)).scalar_one_or_none()
    return int(value) if value is not None else 0


def migrate(conn: Connection) -> None:
    """Bring the database to the present schema; each step and its number commit together."""
    found = version_of(conn)
    if found > SCHEMA_VERSION:
        raise StoreError(
            "open the state database",
            f"its schema is version {found}, this Flywheel knows versions up to {SCHEMA_VERSION}",
            "Upgrade Flywheel, or point state.dir at another directory.",
        )
    for version in range(found + 1, SCHEMA_VERSION + 1):
        MIGRATIONS[version](conn)
        conn.execute(meta.delete().where(meta.c.key == VERSION_KEY))
        conn.execute(meta.insert().values(key=VERSION_KEY, value=str(version)))
