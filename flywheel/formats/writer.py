"""The files that records go to: JSON lines, and the parquet table that verl reads. The caller owns the file."""

from __future__ import annotations

from typing import Any, BinaryIO

import orjson

from flywheel.errors import ExportError
from flywheel.files import json_line
from flywheel.formats.export_format import Record

ROW_GROUP = 1000


class JsonLines:
    """One JSON object a line, UTF-8."""

    def __init__(self, file: BinaryIO, traits: frozenset[str]) -> None:
        self._file = file

    def write(self, record: Record) -> None:
        self._file.write(json_line(record))

    def close(self) -> None:
        """Nothing follows the last line."""


class VerlTable:
    """verl's columns in parquet, written in groups of rows.

    Messages get the fields of tool calls only if one has any: a template that asks whether a message *has* tool calls
    would be misled by a null.
    """

    def __init__(self, file: BinaryIO, traits: frozenset[str]) -> None:
        try:
            import pyarrow as pa  # type: ignore[import-untyped]
            import pyarrow.parquet  # type: ignore[import-untyped]
        except ImportError as error:
            raise ExportError(
                "write parquet",
                "pyarrow is not installed",
                "Install it: pip install 'agentscope-flywheel[cpu]' (or [gpu]), or just: pip install pyarrow.",
            ) from error
        self._rows: list[Record] = []
        self._schema = _schema(pa, with_tools="prompt" in traits)
        self._table = pa.Table
        # Its own handle on the file: closing the writer would close the file that was given.
        self._writer = pyarrow.parquet.ParquetWriter(pa.PythonFile(_KeptOpen(file), mode="w"), self._schema)

    def write(self, record: Record) -> None:
        # Through UTF-8 and back: lone surrogates, which traces can hold, become "?" as they do in JSON lines.
        self._rows.append(orjson.loads(json_line(record)))
        if len(self._rows) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


class _KeptOpen:
    """A file for pyarrow to write to and to close, while the one below stays open: it may be a pipe, which cannot
    tell its position."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._written = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self._file.write(data)
        size = memoryview(data).nbytes
        self._written += size
        return size

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


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
