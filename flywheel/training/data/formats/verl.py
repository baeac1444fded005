"""The format of verl: the columns of its `RLHFDataset`, written as parquet."""

from __future__ import annotations

import io
import json
from typing import Any, BinaryIO

import orjson

from flywheel.errors import ExportError
from flywheel.records.trace import ChatMessage
from flywheel.system.files import json_line
from flywheel.training.data.formats import messages
from flywheel.training.data.formats.export_format import ExportSample, JsonLinesWriter, Record

ROW_GROUP = 1000
"""Rows that are written together."""

DATA_SOURCE = "flywheel"
"""verl chooses the reward function by this name. It has none for it, so that one must be configured."""


def verl(sample: ExportSample) -> Record:
    line = sample.line
    about = line["metadata"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [_flat(message) for message in messages.prompt(line)],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": line["answer"]},
        "extra_info": {
            "task_id": line["task_id"],
            "split": about["split"],
            "question": line["question"],
            "answer": line["answer"],
            "agent_name": about["agent_name"],
            "score": sample.score,
            "tools_json": messages.tools(line),
            "structured_json": about["structured_json"],
        },
    }


def _flat(message: ChatMessage) -> ChatMessage:
    """The message with the arguments of tool calls as JSON text: they differ by tool, and a column has one type."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {"name": call["function"]["name"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


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
