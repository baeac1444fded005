"""Writers of export files: JSON lines, and the parquet table that verl reads. The caller owns the file."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import orjson

from flywheel.errors import ExportError
from flywheel.system.files import json_line

Record = dict[str, Any]
ROW_GROUP = 1000
"""Rows that are written together."""


class JsonLinesWriter:
    """Writes one JSON object per line, UTF-8."""

    def __init__(self, file: BinaryIO, typed: frozenset[str]) -> None:
        self._file = file

    def write(self, record: Record) -> None:
        self._file.write(json_line(record))

    def close(self) -> None:
        """Write what is left. The file stays open."""


class VerlWriter(JsonLinesWriter):
    """Writes verl's columns as parquet.

    Messages have the fields of tool calls only if one of them has any: a template that tests whether a message has
    tool calls would take a null for one.
    """

    def __init__(self, file: BinaryIO, typed: frozenset[str]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet
        except ImportError as error:
            raise ExportError(
                "write parquet",
                "pyarrow is not installed",
                "Install it: pip install 'agentscope-flywheel[cpu]' (or [gpu]), or just: pip install pyarrow.",
            ) from error
        self._rows: list[Record] = []
        self._schema = _schema(pa, with_tools="prompt" in typed)
        self._table = pa.Table
        self._writer = pyarrow.parquet.ParquetWriter(pa.PythonFile(_KeptOpen(file), mode="w"), self._schema)

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


class _KeptOpen(io.RawIOBase):
    """A file that stays open when pyarrow closes it, and that knows its position, which a pipe does not."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._written = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        size = memoryview(data).nbytes
        self._written += size
        return size

    def tell(self) -> int:
        return self._written

    def writable(self) -> bool:
        return True


def _schema(pa: Any, *, with_tools: bool) -> Any:
    text = pa.string()
    message = [("role", text), ("content", text)]
    if with_tools:
        function = pa.struct([("name", text), ("arguments", text)])
        call = pa.struct([("id", text), ("type", text), ("function", function)])
        message += [("tool_calls", pa.list_(call)), ("tool_call_id", text), ("name", text)]
    about = ("task_id", "split", "question", "answer", "agent_name", "tools_json", "structured_json")
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct(message))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct([*((name, text) for name in about), ("score", pa.float64())])),
        ]
    )
