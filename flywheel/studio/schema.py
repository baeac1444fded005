"""The two schemas of Studio's span table: how they are told apart, and how a row becomes a span.

Version numbers do not tell them apart; columns do. A row that cannot be understood raises RowError and costs itself.
"""

from __future__ import annotations

import hashlib
import json
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from flywheel.nested import dig
from flywheel.studio.recorded import Attributes, attributes_of
from flywheel.studio.span import Span, SpanKind
from flywheel.trace import DeadRow, SpanStatus

Row = Sequence[Any]

TABLE: Final = "span_table"
MAX_CELL: Final = 32 * 1024 * 1024
"""Bytes of one value above which its row is dead rather than a reason to run out of memory."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_NS: Final = 10**19
"""The year 2286, within what a datetime can hold."""


class RowError(ValueError):
    """A row that cannot be understood."""


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
                    why, excerpt = f"{column} {_is(value)}", value
            return DeadRow(row[0], shown(row[1]), shown(row[2]), why, shown(excerpt)[:500])


def packed(row: Row) -> bytes:
    """A row without its number, as equal bytes for equal values: to be hashed, kept and sent."""
    # Version 2 of marshal: later ones also write which objects are shared.
    return marshal.dumps(tuple(row[1:]), 2)


def unpacked(rowid: int, data: bytes) -> Row:
    """The row that `packed` packed."""
    return (rowid, *marshal.loads(data))


def fingerprint(columns: Sequence[tuple[str, str]]) -> str:
    """A hash of the span table's columns and their types: another one means another schema."""
    return hashlib.sha256(repr(list(columns)).encode()).hexdigest()[:16]


def shown(value: Any) -> str:
    """A value of a row as text, whatever it is."""
    if isinstance(value, tuple):
        value = value[1]
    if isinstance(value, bytes):
        return value[:2000].decode(errors="replace")
    return "" if value is None else str(value)[:2000]


def _text(value: Any, column: str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if value is None:
        return ""
    raise RowError(f"{column} {_is(value)}, not text")


def _is(value: Any) -> str:
    if isinstance(value, tuple):
        return f"has {value[0]:,} bytes, more than {MAX_CELL:,}"
    return f"is a {type(value).__name__}"


def _identifier(value: Any, column: str) -> str:
    if isinstance(value, bytes) and value:
        return value.decode()
    raise RowError(f"{column} is empty" if value in (None, b"") else f"{column} {_is(value)}, not text")


def identifiers(row: Row) -> tuple[str, str]:
    """The ids of a row's span and trace. Raises RowError and UnicodeDecodeError."""
    return _identifier(row[1], "id"), _identifier(row[2], "traceId")


def _json(value: Any, column: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, bytes):
        raise RowError(f"{column} {_is(value)}, not JSON text")
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        pass
    try:
        # Slower and more lenient: lone surrogates and numbers that orjson refuses are valid for Studio.
        return json.loads(value.decode())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise RowError(f"{column} is not JSON: {error}") from error


def _attributes(value: Any) -> Attributes:
    if value is not None and type(value) is not bytes:
        raise RowError(f"attributes {_is(value)}, not JSON text")
    try:
        return attributes_of(b"null" if value is None else value)
    except TypeError as error:
        raise RowError(f"attributes is {error}") from error
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"attributes is not JSON: {error}") from error


def _events(value: Any) -> tuple[dict[str, Any], ...]:
    if value == b"[]" or value is None:
        return ()
    events = _json(value, "events")
    return tuple(event for event in events if isinstance(event, dict)) if isinstance(events, list) else ()


def _span_1(row: Row) -> Span:
    rowid, span_id, trace_id, parent, ended, attributes, name, events, status, kind, started, message, run = row
    return Span(
        rowid,
        _identifier(span_id, "id"),
        _identifier(trace_id, "traceId"),
        _text(parent, "parentSpanId"),
        _text(name, "name"),
        _KINDS_1.get(kind, SpanKind.OTHER),
        _iso_ns(started, "startTime"),
        _iso_ns(ended, "endTime"),
        _STATUS_1.get(status, SpanStatus.UNSET),
        _text(message, "statusMessage"),
        _text(run, "run_id"),
        _attributes(attributes),
        _events(events),
    )


def _iso_ns(value: Any, column: str) -> int:
    text = _text(value, column)
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        since = moment - _EPOCH
    except (ValueError, OverflowError) as error:
        raise RowError(f"{column} is no time: {text[:40]!r}") from error
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


def _span_2(row: Row) -> Span:
    (rowid, span_id, trace_id, parent, ended, attributes, name, events, status, started, operation, conversation,
     service) = row  # fmt: skip
    found = _attributes(attributes)
    kind = _KINDS_2.get(found.gen_ai.operation.name)
    if kind is None:
        kind = _KINDS_2.get(_text(operation, "operationName"), SpanKind.OTHER)
    state, message = _STATUS_2.get(status) or _status_of(status)
    return Span(
        rowid,
        span_id.decode() if span_id and type(span_id) is bytes else _identifier(span_id, "id"),
        trace_id.decode() if trace_id and type(trace_id) is bytes else _identifier(trace_id, "traceId"),
        parent.decode() if type(parent) is bytes else _text(parent, "parentSpanId"),
        name.decode() if type(name) is bytes else _text(name, "name"),
        kind,
        _decimal_ns(started, "startTimeUnixNano"),
        _decimal_ns(ended, "endTimeUnixNano"),
        state,
        message,
        conversation.decode() if type(conversation) is bytes else _text(conversation, "conversationId"),
        found,
        () if events == b"[]" else _events(events),
        service.decode() if type(service) is bytes else _text(service, "serviceName"),
    )


def _status_of(value: Any) -> tuple[SpanStatus, str]:
    status = _json(value, "status")
    code, message = dig(status, "code"), dig(status, "message")
    known = {1: SpanStatus.OK, 2: SpanStatus.ERROR}.get(code) if isinstance(code, int) else None
    return known or SpanStatus.UNSET, message if isinstance(message, str) else ""


def _decimal_ns(value: Any, column: str) -> int:
    try:
        ns = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"{column} is no number of nanoseconds: {shown(value)[:40]!r}") from error
    if not 0 <= ns < _LATEST_NS:
        raise RowError(f"{column} is out of range: {ns}")
    return ns


def _iso_end(value: Any) -> int:
    try:
        return _iso_ns(value, "endTime")
    except (RowError, UnicodeDecodeError):
        return 0


def _decimal_end(value: Any) -> int:
    try:
        return _decimal_ns(value, "endTimeUnixNano")
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
