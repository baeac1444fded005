"""Converts OTLP spans to rows of Studio's span table: the rows that Studio would have stored, with exact times.

As in Studio, dotted attribute keys become nested objects, and attributes with JSON text become JSON values. Texts
that read as a number, true or false stay texts: an answer "1e3" must not change.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from msgspec import to_builtins
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from flywheel.records.privacy import NOBODY, PrivateNames, is_refusal
from flywheel.records.trace import LATEST_NS, get_path
from flywheel.sources.otlp.conventions import TEXTS, TEXTS_OF_EVENTS, known_operation, put, translate
from flywheel.sources.otlp.decoding import MAX_VALUES
from flywheel.sources.otlp.inbox import COLUMNS, Refusal, Row
from flywheel.sources.otlp.recorded_messages import Nested
from flywheel.sources.spans.span import UNKNOWN
from flywheel.sources.spans.truncation import breaks_off, longest_of, texts_in

_SPAN_KINDS: Final = {"AGENT": "invoke_agent", "LLM": "chat", "TOOL": "execute_tool", "FORMATTER": "format"}
"""Operations by the `span.kind` of AgentScope before 1.0.9."""
_CONVERSATIONS: Final = (("gen_ai", "conversation", "id"), ("project", "run_id"), ("session", "id"))
_USERS: Final = (("user", "id"), ("enduser", "id"))
_AGENT: Final = (("gen_ai", "agent", "name"), ("metadata", "name"))
_INVOKE: Final = "invoke_agent"
_IN_EVENTS: Final = (("input", "messages"), ("output", "messages"), ("system_instructions",), ("tool", "definitions"))
"""Attributes below `gen_ai` that may stand in `gen_ai.client.inference.operation.details` events instead."""
_MESSAGES: Final = frozenset(".".join(("gen_ai", *path)) for path in _IN_EVENTS)
_STRUCTURES: Final = ("array_value", "kvlist_value")


def complete(attributes: Nested, events: Sequence[Nested]) -> None:
    """Add what events of a span's operation have to its nested attributes."""
    for path in _IN_EVENTS:
        for event in reversed(events):
            value = get_path(event, "attributes", "gen_ai", *path)
            if value is not None and get_path(attributes, "gen_ai", *path) is None:
                put(attributes, value, "gen_ai", *path)


def _lead_with_instructions(attributes: Nested) -> None:
    parts = get_path(attributes, "gen_ai", "system_instructions")
    if isinstance(parts, str):
        if breaks_off(parts):
            return
        parts = [{"type": "text", "content": parts}]
    messages = get_path(attributes, "gen_ai", "input", "messages")
    if not (isinstance(parts, list) and parts and isinstance(messages, list)):
        return
    if not any(get_path(message, "role") == "system" for message in messages):
        put(attributes, [{"role": "system", "parts": parts}, *messages], "gen_ai", "input", "messages")


def operation(attributes: Nested) -> str | None:
    """The operation under the name that the reader knows, if it has one for it."""
    written = get_path(attributes, "gen_ai", "operation", "name")
    if written is None:
        kind = get_path(attributes, "span", "kind")
        return _SPAN_KINDS.get(kind) if isinstance(kind, str) else None
    return known_operation(written)


def conversation(attributes: Nested) -> str:
    """The id of the conversation of a span; `unknown` without one."""
    for path in _CONVERSATIONS:
        if (name := get_path(attributes, *path)) not in (None, "", {}, []):
            return str(name)
    return UNKNOWN


_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
_DEEP: Final = 100
_SHOWN_REASONS: Final = 5


class SpanError(ValueError):
    """A span that cannot be stored."""


@dataclass(slots=True)
class Rows:
    """The spans of a request: the rows to store, the spans of private runs, of which none may be stored, and
    the number of rejected spans with the first reasons."""

    accepted: list[Row] = field(default_factory=list)
    private: set[Refusal] = field(default_factory=set)
    rejected: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def why(self) -> str:
        more = self.rejected - len(self.reasons)
        return "; ".join((*self.reasons, *([f"and {more} more"] if more else [])))


def rows_of(request: ExportTraceServiceRequest, names: PrivateNames = NOBODY) -> Rows:
    """Convert every span of a request to a row, or reject it. Traces are private that refuse recording, or are of one
    of these names."""
    rows = Rows()
    nested = _Nesting()
    for of_resource in request.resource_spans:
        resource = {"attributes": nested(of_resource.resource.attributes)}
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                try:
                    attributes = nested(span.attributes)
                    rows.accepted.append(_row(span, attributes, resource, nested))
                    if _is_private(attributes, span.name, names):
                        rows.private.add((span.trace_id.hex(), span.start_time_unix_nano))
                except SpanError as error:
                    rows.rejected += 1
                    if len(rows.reasons) < _SHOWN_REASONS:
                        rows.reasons.append(f"span {span.span_id.hex() or '?'} ({span.name[:80]}): {error}")
    return rows


class _Nesting:
    """Nests attributes as Studio does; of two at the same path, the later one wins.

    JSON text becomes its value until the texts of one request hold MAX_VALUES values. Further texts, and values with
    more levels than orjson can write, stay text, which the reader accepts as well.
    """

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def __call__(self, pairs: Iterable[KeyValue]) -> Nested:
        nested: Nested = {}
        for pair in pairs:
            value = _value(pair.value)
            *path, last = pair.key.split(".")
            place = nested
            for name in path:
                inner = place.get(name)
                if not isinstance(inner, dict):
                    inner = place[name] = {}
                place = inner
            place[last] = self.loaded(value, pair.key) if isinstance(value, str) else value
        return nested

    def loaded(self, text: str, key: str = "") -> Any:
        """The value of JSON text; the text itself if it is none, one value too many, or a text by its key."""
        if text.lstrip()[:1] not in ("{", "[", '"') and text.strip() != "null":
            return text
        if key.startswith(TEXTS) or key in TEXTS_OF_EVENTS:
            return text
        openings = text.count("[") + text.count("{")
        values = openings + text.count(",")
        if values > self._left:
            return text
        try:
            value = orjson.loads(text)
            if openings > _DEEP:
                orjson.dumps(value)
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):
            return text
        self._left -= values
        return value


def _is_private(attributes: Nested, name: str, names: PrivateNames) -> bool:
    """Whether a span says that its trace is private, by its complete and translated attributes."""
    if is_refusal(get_path(attributes, "flywheel", "record")):
        return True
    if names == NOBODY:
        return False
    agents = _texts(attributes, _AGENT)
    if operation(attributes) == _INVOKE:
        agents.append(name.removeprefix(f"{_INVOKE} "))
    return names.cover(
        users=_texts(attributes, _USERS), conversations=_texts(attributes, _CONVERSATIONS), agents=agents
    )


def _texts(attributes: Nested, paths: Iterable[tuple[str, ...]]) -> list[str]:
    """The values at these paths, as texts."""
    return [str(value) for path in paths if (value := get_path(attributes, *path)) is not None]


def _row(span: Span, attributes: Nested, resource: Nested, nested: _Nesting) -> Row:
    span_id = _identifier(span.span_id, _SPAN_ID_BYTES, "span id")
    start, end = _time(span.start_time_unix_nano, "start"), _time(span.end_time_unix_nano, "end")
    events = [_event(event, nested) for event in span.events]
    sent = _messages_in(attributes)
    complete(attributes, events)
    translate(attributes, span.name, nested.loaded, events, span.dropped_attributes_count + span.dropped_events_count)
    if operation(attributes) == "chat":
        _lead_with_instructions(attributes)
    if _has_structures(span) or any(map(operator.is_not, _messages_in(attributes), sent)):
        # What is put together of several texts may be longer than each of them was.
        put(attributes, to_builtins(longest_of(_texts_sent(span))), "flywheel", "longest")
    values = {
        "id": span_id,
        "traceId": _identifier(span.trace_id, _TRACE_ID_BYTES, "trace id"),
        "spanId": span_id,
        "parentSpanId": _identifier(span.parent_span_id, _SPAN_ID_BYTES, "parent span id")
        if any(span.parent_span_id)  # some clients send zeros for a root span
        else "",
        "name": span.name,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(end),
        "attributes": _json(attributes, "attributes"),
        "events": _json(events, "events"),
        "status": _json({"code": span.status.code, "message": span.status.message}, "status"),
        "resource": _json(resource, "resource"),
        "serviceName": _text(get_path(resource, "attributes", "service", "name")),
        "operationName": operation(attributes),
        "conversationId": conversation(attributes),
    }
    return [values[column] for column in COLUMNS]


def _messages_in(attributes: Nested) -> list[Any]:
    return [get_path(attributes, "gen_ai", *path) for path in _IN_EVENTS]


def _has_structures(span: Span) -> bool:
    """Whether messages are sent as values with a structure, of which each text is limited by itself."""
    return any(pair.key in _MESSAGES and pair.value.WhichOneof("value") in _STRUCTURES for pair in span.attributes)


def _texts_sent(span: Span) -> Iterator[str]:
    """The texts in the attributes of a span and of its events, as they were sent."""
    for pairs in (span.attributes, *(event.attributes for event in span.events)):
        for pair in pairs:
            yield from texts_in(_value(pair.value))


def _identifier(raw: bytes, length: int, name: str) -> str:
    if len(raw) != length or not any(raw):
        raise SpanError(f"its {name} is not {length} bytes, or all zero")
    return raw.hex()


def _time(ns: int, name: str) -> int:
    if not 0 < ns < LATEST_NS:
        raise SpanError(f"it has no {name} time" if ns == 0 else f"its {name} time is out of range")
    return ns


def _event(event: Span.Event, nested: _Nesting) -> Nested:
    return {
        "name": event.name,
        "time": str(event.time_unix_nano),
        "attributes": nested(event.attributes),
        "droppedAttributesCount": event.dropped_attributes_count,
    }


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _value(pair.value) for pair in value.kvlist_value.values}
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case None:
            return None
        case chosen:
            return getattr(value, chosen)


def _json(value: Any, name: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise SpanError(f"its {name} cannot be written as JSON: {error}") from error


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
