"""One row of a span table as it is understood, in a form that no longer depends on the schema it was stored in."""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter
from typing import Any

from msgspec import Struct

from flywheel.sources.studio.recorded import Attributes
from flywheel.trace import SpanStatus


class SpanKind(StrEnum):
    AGENT = "agent"
    LLM = "llm"
    TOOL = "tool"
    FORMATTER = "formatter"
    OTHER = "other"


class Span(Struct, frozen=True, eq=False):
    """One operation of a trace.

    `rowid` is its place in the source's table; times are nanoseconds since 1970 in UTC.
    """

    rowid: int
    span_id: str
    trace_id: str
    parent_id: str
    name: str
    kind: SpanKind
    started_ns: int
    ended_ns: int
    status: SpanStatus
    status_message: str
    conversation_id: str
    attributes: Attributes
    events: tuple[dict[str, Any], ...] = ()
    service: str = ""


in_order = attrgetter("started_ns", "rowid")
"""Sorts spans by when they began. Converted rows have times in milliseconds, so many tie; rows are stored as
they ended."""
