"""Writes records as parquet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import orjson

from flywheel.errors import ExportError
from flywheel.system import own_package
from flywheel.system.files import json_line
from flywheel.training.data.formats.export_format import Record, Write

ROW_GROUP = 1000
"""Rows that are written together."""


@contextlib.contextmanager
def parquet(
    file: BinaryIO, typed: frozenset[str], *, schema: Callable[[Any, frozenset[str]], Any]
) -> Iterator[Write]:
    """Writes records with the columns of a schema, which `schema` makes of pyarrow and the typed columns."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        raise ExportError(
            "write parquet",
            "pyarrow is not installed",
            f"Install it: pip install {own_package.requirement('cpu')} (or [gpu]), or just: pip install pyarrow.",
        ) from error
    columns = schema(pa, typed)
    rows: list[Record] = []

    def write_rows() -> None:
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=columns))
            rows.clear()

    def write(record: Record) -> None:
        # Through JSON: lone surrogates, which traces can hold, become "?" as in JSON lines.
        rows.append(orjson.loads(json_line(record)))
        if len(rows) >= ROW_GROUP:
            write_rows()

    with ParquetWriter(file, columns) as writer:
        yield write
        write_rows()
