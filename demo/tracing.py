"""AgentScope's own traces of this process, in a Studio database as Studio's server would write them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from demo.studio import COLUMN_TYPES, StudioDatabase
from flywheel.sources.otlp.inbox import COLUMNS
from flywheel.sources.otlp.rows import rows_of

SERVICE: Final = "flywheel-demo"
_UNREAD: Final = {"kind": 1, "scope": "{}", "latencyNs": 0.0}
"""Columns that Studio requires and no reader looks at."""


class StudioExporter(SpanExporter):
    """Writes finished spans to a Studio database."""

    def __init__(self, database: StudioDatabase) -> None:
        self._database = database

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(encode_spans(spans)).accepted]
        self._database.export([{**dict.fromkeys(COLUMN_TYPES), **_UNREAD, **row} for row in rows])
        return SpanExportResult.SUCCESS


@contextlib.contextmanager
def traced(database: StudioDatabase) -> Iterator[TracerProvider]:
    """Spans of AgentScope in this process go to the database: by `force_flush` of what is yielded, and by the end.

    OpenTelemetry permits it once in a process.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(StudioExporter(database), schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    try:
        yield provider
    finally:
        provider.shutdown()
