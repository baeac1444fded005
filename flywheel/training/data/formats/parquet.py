"""Writes records as parquet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

import orjson

from flywheel.errors import ExportError
from flywheel.system import own_package
from flywheel.system.files import json_line
from flywheel.training.data.formats.export_format import JsonLinesWriter, Record

ROW_GROUP = 1000
"""Rows that are written together."""


class ParquetWriter(JsonLinesWriter):
    """Writes records with the columns of a schema, which `schema` makes of pyarrow and the typed columns."""

    def __init__(
        self, file: BinaryIO, typed: frozenset[str], *, schema: Callable[[Any, frozenset[str]], Any]
    ) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet
        except ImportError as error:
            raise ExportError(
                "write parquet",
                "pyarrow is not installed",
                f"Install it: pip install {own_package.requirement('cpu')} (or [gpu]), or just: pip install pyarrow.",
            ) from error
        self._rows: list[Record] = []
        self._schema = schema(pa, typed)
        self._table = pa.Table
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema)

    def write(self, record: Record) -> None:
        # Through JSON: lone surrogates, which traces can hold, become "?" as in JSON lines.
        self._rows.append(orjson.loads(json_line(record)))
        if len(self._rows) >= ROW_GROUP:
            self._write_rows()

    def close(self) -> None:
        self._write_rows()
        self._writer.close()

    def _write_rows(self) -> None:
        if self._rows:
            self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
            self._rows = []
