"""What the tests send: spans of the fixtures rebuilt as OTLP, by hand or through the real SDK's exporter."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from tests.sources.studio.writer import DATA

PROTOBUF = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json"}
BEGAN = 1_795_238_600_000_000_000
AS_TEXT = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions", "agentscope.function.input")
"""Attributes that AgentScope sends as JSON text: attributes of spans hold no objects."""


def stored(path: Path) -> list[dict[str, Any]]:
    """All rows of a span table."""
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute("SELECT * FROM span_table ORDER BY rowid")]
    connection.close()
    return rows


def fixture(name: str) -> list[dict[str, Any]]:
    return stored(DATA / f"{name}.sqlite")


def any_value(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case list() if all(isinstance(item, str) for item in value):
            made = AnyValue()
            made.array_value.values.extend(any_value(item) for item in value)
            return made
        case _:
            return AnyValue(string_value=json.dumps(value, ensure_ascii=False))


def pairs(attributes: dict[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def _flat(nested: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in nested.items():
        name = prefix + key
        if isinstance(value, dict) and name not in AS_TEXT and not name.startswith("gen_ai.tool.call."):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, str) and _decodes(value):
            yield name, json.dumps(value, ensure_ascii=False)
        else:
            yield name, value


def _decodes(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def flat(nested: dict[str, Any]) -> list[KeyValue]:
    """The attributes a client had sent for what Studio stored nested and decoded."""
    return pairs(dict(_flat(nested)))


def span_of(row: dict[str, Any]) -> Span:
    """The span that Studio had received for a row of generation 2."""
    status = json.loads(row["status"])
    span = Span(
        trace_id=bytes.fromhex(row["traceId"]),
        span_id=bytes.fromhex(row["spanId"]),
        parent_span_id=bytes.fromhex(row["parentSpanId"] or ""),
        trace_state=row["traceState"] or "",
        flags=row["flags"] or 0,
        name=row["name"],
        kind=row["kind"],
        start_time_unix_nano=int(row["startTimeUnixNano"]),
        end_time_unix_nano=int(row["endTimeUnixNano"]),
        attributes=flat(json.loads(row["attributes"])),
    )
    span.status.code, span.status.message = status["code"], status["message"]
    for event in json.loads(row["events"]):
        span.events.add(name=event["name"], time_unix_nano=int(event["time"]), attributes=flat(event["attributes"]))
    return span


def request_of(rows: Iterable[dict[str, Any]]) -> ExportTraceServiceRequest:
    """One request with each row's own resource and scope."""
    request = ExportTraceServiceRequest()
    for row in rows:
        scope = json.loads(row["scope"])
        of_resource = ResourceSpans()
        of_resource.resource.attributes.extend(flat(json.loads(row["resource"])["attributes"]))
        of_scope = of_resource.scope_spans.add()
        of_scope.scope.name, of_scope.scope.version = scope["name"], scope["version"]
        of_scope.spans.append(span_of(row))
        request.resource_spans.append(of_resource)
    return request


def request(*spans: Span) -> ExportTraceServiceRequest:
    made = ExportTraceServiceRequest()
    of_resource = made.resource_spans.add()
    of_resource.resource.attributes.extend(pairs({"service.name": "shop"}))
    of_scope = of_resource.scope_spans.add()
    of_scope.scope.name = "tests"
    of_scope.spans.extend(spans)
    return made


def span(number: int, attributes: dict[str, Any] | None = None, *, trace: int = 1, parent: int = 0) -> Span:
    """A span whose ids are made of small numbers; it lasts one second."""
    began = BEGAN + number * 1_000_000
    return Span(
        trace_id=trace.to_bytes(16, "big"),
        span_id=number.to_bytes(8, "big"),
        parent_span_id=parent.to_bytes(8, "big") if parent else b"",
        name=f"span {number}",
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=began,
        end_time_unix_nano=began + 1_000_000_000,
        attributes=pairs(attributes or {}),
    )


def ids(path: Path) -> list[int]:
    """The numbers of the stored spans."""
    return [int(row["id"], 16) for row in stored(path)]
