"""What a format is: how tasks become records of a file that another program trains on.

Knows no store and no file: a task comes as its line, a record goes as plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO, Protocol

from flywheel.states import TaskState

Record = dict[str, Any]

PLAIN = frozenset({"role", "content"})
"""The keys of a message that is only text."""


class FormatName(StrEnum):
    AGENTJET = "agentjet"
    TRINITY = "trinity"
    TRL_GRPO = "trl-grpo"
    TRL_SFT = "trl-sft"
    TRL_DPO = "trl-dpo"
    VERL = "verl"


@dataclass(frozen=True, slots=True)
class Sample:
    """A task line with what the judge made of it; `score` is 0…1, or None without a verdict."""

    line: dict[str, Any]
    state: TaskState
    score: float | None


class LeftOut(Exception):  # noqa: N818 - not an error: the format has no place for this task
    """A task that a format cannot carry. Its text is the reason, in one clause."""


class Sink(Protocol):
    """Where records go, one after the other; `close` ends the file's content but leaves the file open."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Format:
    """`record` takes one sample or, if `paired`, the better and the worse of two replies to one prompt.

    It raises LeftOut. `sink` takes the file and the traits of all the records that will come.
    """

    name: FormatName
    suffix: str
    record: Callable[..., Record]
    sink: Callable[[BinaryIO, frozenset[str]], Sink]
    paired: bool = False


def traits(record: Record) -> frozenset[str]:
    """The columns of a record whose type a reader could not guess from a poorer record.

    Readers infer the types of a JSONL file from its beginning (`datasets`: the first 10 MB). A column that is null so
    far, or messages that are only text so far, would make a later number or tool call an error.
    """
    return frozenset(name for name, value in record.items() if value is not None and _is_rich(value))


def _is_rich(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict) and "role" in item and item.keys() != PLAIN for item in value)
    return isinstance(value, float)
