"""The two schemas of Studio's span table: how they are told apart, and how a row becomes a span.

Version numbers do not tell them apart; columns do. A row that cannot be understood raises RowError and costs itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson

from flywheel.studio.attributes import dig
from flywheel.trace import DeadRow, Span, SpanKind, SpanStatus

Row = Sequence[Any]

TABLE: Final = "span_table"
MAX_ATTRIBUTES: Final = 64 * 1024 * 1024
"""Bytes of attributes above which a row is dead rather than a reason to run out of memory."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_NS: Final = 10**19
"""The year 2286, within what a datetime can hold."""


class RowError(ValueError):
    """A row that cannot be understood."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One generation: `marks` are the columns that only it has, `columns` what is read, in this order."""

    name: str
    marks: frozenset[str]
    columns: tuple[str, ...]
    span_of: Callable[[dict[str, Any], int], Span]

    @property
    def page_sql(self) -> str:
        return f"SELECT {self._listed} FROM {TABLE} WHERE rowid > ? ORDER BY rowid LIMIT ?"  # noqa: S608 - constants

    def lookup_sql(self, count: int) -> str:
        marks = ",".join("?" * count)
        return f"SELECT {self._listed} FROM {TABLE} WHERE id IN ({marks})"  # noqa: S608 - constants

    @property
    def _listed(self) -> str:
        return ", ".join(("rowid", *self.columns))

    def read(self, row: Row) -> Span | DeadRow:
        """A row as a span, or as a dead row with the reason."""
        values = dict(zip(self.columns, row[1:], strict=True))
        try:
            return self.span_of(values, row[0])
        except (RowError, UnicodeDecodeError) as error:
            why = "a text is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            return DeadRow(
                row[0], _shown(values["id"]), _shown(values["traceId"]), why, _shown(values["attributes"])[:500]
            )


def fingerprint(columns: Sequence[tuple[str, str]]) -> str:
    """A hash of the span table's columns and their types: another one means another schema."""
    return hashlib.sha256(repr(list(columns)).encode()).hexdigest()[:16]


def _shown(value: Any) -> str:
    return value[:2000].decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _text(values: Mapping[str, Any], column: str) -> str:
    value = values[column]
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode()
    raise RowError(f"{column} is a {type(value).__name__}, not text")


def _identifier(values: Mapping[str, Any], column: str) -> str:
    value = _text(values, column)
    if not value:
        raise RowError(f"{column} is empty")
    return value


def _json(values: Mapping[str, Any], column: str) -> Any:
    value = values[column]
    if value is None:
        return None
    if not isinstance(value, bytes):
        raise RowError(f"{column} is a {type(value).__name__}, not JSON text")
    if len(value) > MAX_ATTRIBUTES:
        raise RowError(f"{column} has {len(value):,} bytes, more than {MAX_ATTRIBUTES:,}")
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


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    attributes = _json(values, "attributes")
    if not isinstance(attributes, dict):
        raise RowError(f"attributes is a JSON {type(attributes).__name__}, not an object")
    return attributes


def _events(values: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    if values["events"] == b"[]":
        return ()
    events = _json(values, "events")
    return tuple(event for event in events if isinstance(event, dict)) if isinstance(events, list) else ()


def _span_1(values: dict[str, Any], rowid: int) -> Span:
    return Span(
        rowid=rowid,
        span_id=_identifier(values, "id"),
        trace_id=_identifier(values, "traceId"),
        parent_id=_text(values, "parentSpanId") or None,
        name=_text(values, "name"),
        kind=_KINDS_1.get(_text(values, "spanKind"), SpanKind.OTHER),
        started_ns=_iso_ns(values, "startTime"),
        ended_ns=_iso_ns(values, "endTime"),
        status=_STATUS_1.get(_text(values, "status"), SpanStatus.UNSET),
        status_message=_text(values, "statusMessage"),
        conversation_id=_text(values, "run_id"),
        attributes=_attributes(values),
        events=_events(values),
    )


def _iso_ns(values: Mapping[str, Any], column: str) -> int:
    text = _text(values, column)
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError) as error:
        raise RowError(f"{column} is no time: {text[:40]!r}") from error


def _span_2(values: dict[str, Any], rowid: int) -> Span:
    attributes = _attributes(values)
    written = dig(attributes, "gen_ai", "operation", "name")
    operations = (written if isinstance(written, str) else "", _text(values, "operationName"))
    status = _json(values, "status")
    message = dig(status, "message")
    return Span(
        rowid=rowid,
        span_id=_identifier(values, "id"),
        trace_id=_identifier(values, "traceId"),
        parent_id=_text(values, "parentSpanId") or None,
        name=_text(values, "name"),
        kind=next((_KINDS_2[name] for name in operations if name in _KINDS_2), SpanKind.OTHER),
        started_ns=_decimal_ns(values, "startTimeUnixNano"),
        ended_ns=_decimal_ns(values, "endTimeUnixNano"),
        status=next((known for code, known in _STATUS_2 if code == dig(status, "code")), SpanStatus.UNSET),
        status_message=message if isinstance(message, str) else "",
        conversation_id=_text(values, "conversationId"),
        attributes=attributes,
        events=_events(values),
        service=_text(values, "serviceName"),
    )


def _decimal_ns(values: Mapping[str, Any], column: str) -> int:
    value = values[column]
    try:
        ns = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"{column} is no number of nanoseconds: {_shown(value)[:40]!r}") from error
    if not 0 <= ns < _LATEST_NS:
        raise RowError(f"{column} is out of range: {ns}")
    return ns


_KINDS_1: Final = {
    "AGENT": SpanKind.AGENT,
    "LLM": SpanKind.LLM,
    "TOOL": SpanKind.TOOL,
    "FORMATTER": SpanKind.FORMATTER,
}
_KINDS_2: Final = {
    "invoke_agent": SpanKind.AGENT,
    "chat": SpanKind.LLM,
    "execute_tool": SpanKind.TOOL,
    "format": SpanKind.FORMATTER,
}
_STATUS_1: Final = {"OK": SpanStatus.OK, "ERROR": SpanStatus.ERROR}
_STATUS_2: Final = ((1, SpanStatus.OK), (2, SpanStatus.ERROR))

_COMMON: Final = ("id", "traceId", "parentSpanId", "name", "attributes", "events", "status")

GENERATIONS: Final = (
    Schema(
        "generation 1",
        frozenset({"spanKind", "run_id"}),
        (*_COMMON, "spanKind", "startTime", "endTime", "statusMessage", "run_id"),
        _span_1,
    ),
    Schema(
        "generation 2",
        frozenset({"spanId", "conversationId"}),
        (*_COMMON, "startTimeUnixNano", "endTimeUnixNano", "operationName", "conversationId", "serviceName"),
        _span_2,
    ),
)


def recognise(columns: Sequence[str]) -> Schema | None:
    """The generation whose own columns these include."""
    return next((schema for schema in GENERATIONS if schema.marks <= set(columns)), None)
