"""The formats for analysis, `csv` and `parquet`: a row for each reply, a column for each criterion."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, BinaryIO, Final

from flywheel.records.states import ACCEPTED, TaskState
from flywheel.training.data.formats.export_format import ExportSample, Record, Write
from flywheel.training.data.formats.parquet import parquet

FACTS: Final = (
    "conversation_id", "trace_id", "span_id", "agent_name", "model", "adapter", "source", "split", "started_at",
    "ended_at", "input_tokens", "output_tokens",
)  # fmt: skip
"""Columns from the metadata of the task line."""
COLUMNS: Final = ("task_id", *FACTS, "state", "accepted", "score", "rubric")
TEXTS: Final = ("question", "answer", "prompt")
DECIDED: Final = {
    **dict.fromkeys(ACCEPTED, True),
    TaskState.REJECTED: False,
}


def row(sample: ExportSample) -> Record:
    """A reply. Criteria are named by their rubric, so that those of two rubrics are never one column:
    `value.RUBRIC.ID` and `passed.RUBRIC.ID`."""
    line, rubric = sample.line, sample.rubric
    # The hash of the rubric, or that of a filter chain behind its mark.
    mark, short = rubric[: rubric.find(":") + 9], dict[str, Any]()
    for each in sample.results:
        short[f"value.{mark}.{each['criterion']}"] = each["value"]
        short[f"passed.{mark}.{each['criterion']}"] = each["passed"]
    return {
        "task_id": line["task_id"],
        **{name: line["metadata"][name] for name in FACTS},
        "state": sample.state.value,
        "accepted": DECIDED.get(sample.state),
        "score": sample.score,
        "rubric": rubric,
        **short,
        "question": line["question"],
        "answer": line["answer"],
        "prompt": json.dumps(line["prompt"], ensure_ascii=False),
    }


def named(columns: frozenset[str]) -> dict[str, str]:
    """The columns of a table in their order, with their names in it. If there are criteria of one rubric alone, they
    are named without it."""
    criteria = sorted(columns.difference(COLUMNS, TEXTS), key=lambda name: (name.partition(".")[2], name))
    parts = {name: name.split(".", 2) for name in criteria}
    is_one = len({rubric for _, rubric, _ in parts.values()}) == 1
    of_criteria = {name: f"{kind}.{of}" if is_one else name for name, (kind, _, of) in parts.items()}
    return {**dict(zip(COLUMNS, COLUMNS, strict=True)), **of_criteria, **dict(zip(TEXTS, TEXTS, strict=True))}


@contextlib.contextmanager
def csv_rows(file: BinaryIO, columns: frozenset[str]) -> Iterator[Write]:
    """Writes RFC 4180 in UTF-8, texts as they are. What is missing is empty."""
    names = named(columns)
    rows = csv.writer(SimpleNamespace(write=lambda text: file.write(text.encode("utf-8", "replace"))))
    rows.writerow(names.values())
    yield lambda record: rows.writerow([record.get(name) for name in names])


@contextlib.contextmanager
def parquet_rows(file: BinaryIO, columns: frozenset[str]) -> Iterator[Write]:
    """Writes the table as parquet. What is missing is null."""
    names = named(columns)

    def schema(pa: Any, _: frozenset[str]) -> Any:
        types = {
            "score": pa.float64(), "value": pa.float64(), "accepted": pa.bool_(), "passed": pa.bool_(),
            "input_tokens": pa.int64(), "output_tokens": pa.int64(),
        }  # fmt: skip
        return pa.schema([(to, types.get(name.partition(".")[0], pa.string())) for name, to in names.items()])

    with parquet(file, columns, schema=schema) as write:
        yield lambda record: write({to: record.get(name) for name, to in names.items()})
