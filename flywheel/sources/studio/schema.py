"""The two schemas of Studio's span table: how they are told apart, and how a row becomes a span.

Version numbers do not tell them apart; columns do. A row that cannot be understood raises RowError and costs itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flywheel.sources.studio.recorded import NOTHING, with_first_argument
from flywheel.sources.studio.row import (
    TABLE,
    Row,
    RowError,
    attributes_in,
    decimal_ns,
    events_in,
    id_in,
    iso_ns,
    json_in,
    shown,
    text_in,
    what_it_is,
)
from flywheel.sources.studio.span import Span, SpanKind
from flywheel.trace import DeadRow, SpanStatus, get_path


@dataclass(frozen=True, slots=True)
class Schema:
    """One generation: `marks` are the columns that only it has, `columns` what is read, in this order.

    A row begins with its rowid, the span's id, its trace's, its parent's and the time it ended, whichever the schema.
    """

    name: str
    marks: frozenset[str]
    columns: tuple[str, ...]
    span_of: Callable[[Row], Span]
    ended_of: Callable[[Any], int]

    @property
    def page_sql(self) -> str:
        return f"SELECT {self._listed} FROM {TABLE} WHERE rowid > ? ORDER BY rowid"  # noqa: S608 - constants

    def rows_sql(self, count: int) -> str:
        marks = ",".join("?" * count)
        return f"SELECT {self._listed} FROM {TABLE} WHERE rowid IN ({marks}) ORDER BY rowid"  # noqa: S608 - constants

    @property
    def _listed(self) -> str:
        return ", ".join(("rowid", *self.columns))

    def read(self, row: Row) -> Span | DeadRow:
        """A row as a span, or as a dead row with the reason."""
        try:
            span = self.span_of(row)
            if span.ended_ns < span.started_ns:
                raise RowError(f"it ended {(span.started_ns - span.ended_ns) / 1e9:g} s before it began")
            return span
        except (RowError, UnicodeDecodeError) as error:
            why = "a text is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            excerpt = row[5]
            for column, value in zip(self.columns, row[1:], strict=True):
                if isinstance(value, tuple):
                    # The other values were not even looked at.
                    why, excerpt = f"{column} {what_it_is(value)}", value
            return DeadRow(row[0], shown(row[1]), shown(row[2]), why, shown(excerpt)[:500])


def fingerprint(columns: Sequence[tuple[str, str]]) -> str:
    """A hash of the span table's columns and their types: another one means another schema."""
    return hashlib.sha256(repr(list(columns)).encode()).hexdigest()[:16]


def _span_1(row: Row) -> Span:
    rowid, span_id, trace_id, parent, ended, attributes, name, events, status, kind, started, message, run = row
    found = attributes_in(attributes)
    if kind == b"AGENT":
        found = with_first_argument(found, attributes)
    return Span(
        rowid,
        id_in(span_id, "id"),
        id_in(trace_id, "traceId"),
        text_in(parent, "parentSpanId"),
        text_in(name, "name"),
        _KINDS_1.get(kind, SpanKind.OTHER),
        iso_ns(started, "startTime"),
        iso_ns(ended, "endTime"),
        _STATUS_1.get(status, SpanStatus.UNSET),
        text_in(message, "statusMessage"),
        text_in(run, "run_id"),
        found,
        events_in(events),
    )


def _span_2(row: Row) -> Span:
    (rowid, span_id, trace_id, parent, ended, attributes, name, events, status, started, operation, conversation,
     service) = row  # fmt: skip
    found = attributes_in(attributes)
    kind = _KINDS_2.get(found.gen_ai.operation.name)
    if kind is None:
        kind = _KINDS_2.get(text_in(operation, "operationName"), SpanKind.OTHER)
    if kind is SpanKind.AGENT and found.gen_ai.input.messages is NOTHING:
        found = with_first_argument(found, attributes)
    state, message = _STATUS_2.get(status) or _status_of(status)
    return Span(
        rowid,
        span_id.decode() if span_id and type(span_id) is bytes else id_in(span_id, "id"),
        trace_id.decode() if trace_id and type(trace_id) is bytes else id_in(trace_id, "traceId"),
        parent.decode() if type(parent) is bytes else text_in(parent, "parentSpanId"),
        name.decode() if type(name) is bytes else text_in(name, "name"),
        kind,
        decimal_ns(started, "startTimeUnixNano"),
        decimal_ns(ended, "endTimeUnixNano"),
        state,
        message,
        conversation.decode() if type(conversation) is bytes else text_in(conversation, "conversationId"),
        found,
        () if events == b"[]" else events_in(events),
        service.decode() if type(service) is bytes else text_in(service, "serviceName"),
    )


def _status_of(value: Any) -> tuple[SpanStatus, str]:
    status = json_in(value, "status")
    code, message = get_path(status, "code"), get_path(status, "message")
    known = {1: SpanStatus.OK, 2: SpanStatus.ERROR}.get(code) if isinstance(code, int) else None
    return known or SpanStatus.UNSET, message if isinstance(message, str) else ""


def _iso_end(value: Any) -> int:
    try:
        return iso_ns(value, "endTime")
    except (RowError, UnicodeDecodeError):
        return 0


def _decimal_end(value: Any) -> int:
    try:
        return decimal_ns(value, "endTimeUnixNano")
    except RowError:
        return 0


_KINDS_1: Final = {
    b"AGENT": SpanKind.AGENT,
    b"LLM": SpanKind.LLM,
    b"TOOL": SpanKind.TOOL,
    b"FORMATTER": SpanKind.FORMATTER,
}
_KINDS_2: Final = {
    "invoke_agent": SpanKind.AGENT,
    "chat": SpanKind.LLM,
    "execute_tool": SpanKind.TOOL,
    "format": SpanKind.FORMATTER,
}
_STATUS_1: Final = {b"OK": SpanStatus.OK, b"ERROR": SpanStatus.ERROR}
_STATUS_2: Final = {
    b'{"code":1,"message":""}': (SpanStatus.OK, ""),
    b'{"code":1}': (SpanStatus.OK, ""),
    b'{"code":0}': (SpanStatus.UNSET, ""),
    b'{"code":0,"message":""}': (SpanStatus.UNSET, ""),
}
"""How nearly every row spells it; the others are parsed."""

GENERATIONS: Final = (
    Schema(
        "generation 1",
        frozenset({"spanKind", "run_id"}),
        ("id", "traceId", "parentSpanId", "endTime", "attributes", "name", "events", "status", "spanKind",
         "startTime", "statusMessage", "run_id"),
        _span_1,
        _iso_end,
    ),
    Schema(
        "generation 2",
        frozenset({"spanId", "conversationId"}),
        ("id", "traceId", "parentSpanId", "endTimeUnixNano", "attributes", "name", "events", "status",
         "startTimeUnixNano", "operationName", "conversationId", "serviceName"),
        _span_2,
        _decimal_end,
    ),
)  # fmt: skip


def recognise(columns: Sequence[str]) -> Schema | None:
    """The generation whose own columns these include."""
    return next((schema for schema in GENERATIONS if schema.marks <= set(columns)), None)


def named(name: str) -> Schema:
    """The generation of that name."""
    return next(schema for schema in GENERATIONS if schema.name == name)
