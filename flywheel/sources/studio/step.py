"""What reading a source brings, step by step, and what it has to remember in between. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from flywheel.trace import Cursor, DeadRow, Mark


class Memory(Protocol):
    """What is remembered of the traces of one source."""

    def open_marks(self) -> Sequence[Mark]: ...

    def marks(self, trace_ids: Sequence[str]) -> Mapping[str, Mark]: ...


class RawTrace(Struct, frozen=True):
    """The packed rows of a trace by number; `is_open` if spans are missing that may still come."""

    trace_id: str
    rows: dict[int, bytes]
    is_open: bool = False


class Step(Struct, frozen=True):
    """What some pages brought, at the end also none. `rows` is how many rows were read, `more` whether the end is
    still ahead. A trace is in it once."""

    cursor: Cursor
    traces: tuple[RawTrace, ...]
    marks: tuple[Mark, ...]
    dead: tuple[DeadRow, ...]
    open_traces: int
    rows: int
    more: bool
