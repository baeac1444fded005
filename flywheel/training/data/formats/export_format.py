"""What a format of `flywheel export` is: how task lines become records, and which writer stores them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO

from flywheel.records.states import TaskState
from flywheel.system.files import json_line

Record = dict[str, Any]

_TEXT_MESSAGE = frozenset({"role", "content"})
"""The keys of a message that is only text."""


class FormatName(StrEnum):
    AGENTJET = "agentjet"
    TRINITY = "trinity"
    TRL_GRPO = "trl-grpo"
    TRL_SFT = "trl-sft"
    TRL_DPO = "trl-dpo"
    VERL = "verl"
    CSV = "csv"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class ExportSample:
    """A task line with its verdict."""

    line: dict[str, Any]
    state: TaskState
    score: float | None
    """0…1, None without a verdict."""
    results: Sequence[Mapping[str, Any]] = ()
    """Those of the criteria (`CriterionResult`)."""
    rubric: str = ""
    """Its hash, empty without a verdict."""


Write = Callable[[Record], object]


@contextlib.contextmanager
def json_lines(file: BinaryIO, typed: frozenset[str]) -> Iterator[Write]:
    """Writes one JSON object per line, UTF-8."""
    yield lambda record: file.write(json_line(record))


class LeftOut(Exception):  # noqa: N818 - not an error: the format has no place for this task
    """A task that a format cannot hold. The text is the reason, in one clause."""


@dataclass(frozen=True, slots=True)
class Format:
    """One export format."""

    name: FormatName
    suffix: str
    record: Callable[..., Record]
    """Converts one sample or, if `paired`, the better and the worse of two replies to one prompt. Raises LeftOut."""
    writer: Callable[[BinaryIO, frozenset[str]], contextlib.AbstractContextManager[Write]]
    """Takes the file and the typed columns of all records that will be written. When it ends, the file has all of
    them and stays open."""
    paired: bool = False
    is_table: bool = False
    """One row for each reply, in their order, for analysis and not for training."""

    def columns(self, record: Record) -> frozenset[str]:
        """What the writer must know of a record."""
        return frozenset(record) if self.is_table else typed_columns(record)


def typed_columns(record: Record) -> frozenset[str]:
    """The columns of a record whose type a reader cannot infer from records with fewer values.

    Readers infer the types of a JSONL file from its beginning (`datasets`: the first 10 MB). After a column of nulls,
    or of messages with text only, a number or a tool call would be an error.
    """
    return frozenset(name for name, value in record.items() if _has_own_type(value))


def _has_own_type(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict) and "role" in item and item.keys() != _TEXT_MESSAGE for item in value)
    return isinstance(value, float)
