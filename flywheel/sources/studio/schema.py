"""The two schemas of Studio's span table: recognising the schema of a file, and parsing a row into a span.

Version numbers do not identify a schema; columns do. A row that cannot be parsed becomes a dead row and costs nothing
else. A file with any other table is refused with what was expected and what was found.
"""

from __future__ import annotations

import hashlib
import json
import marshal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson
import xxhash

from flywheel.records.privacy import named_in
from flywheel.records.trace import LATEST_NS, DeadRow, SpanStatus, get_path
from flywheel.sources.spans.attributes import attributes_of, with_first_argument
from flywheel.sources.spans.span import NOTHING, Attributes, Span, SpanKind
from flywheel.sources.studio.database import MAX_CELL, TABLE, Database, Row, fault, shown

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
hash_of: Final = xxhash.xxh3_64_intdigest
_CONVERSATIONS: Final = ("conversationId", "run_id")
"""The columns of both generations with the id of a conversation."""
DIGEST_BITS: Final = 2**63 - 1


class RowError(ValueError):
    """A row that cannot be parsed."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One generation. `own_columns` identify it; `columns` are read, in this order.

    In both generations a row begins with rowid, span id, trace id, parent id, end time, attributes, name, events and
    status.
    """

    name: str
    own_columns: frozenset[str]
    columns: tuple[str, ...]
    own_values: Callable[..., tuple[SpanKind, int, SpanStatus, str, str, str, str]]
    """Kind, start, status, its message, conversation, service and resource, from attributes, status and what
    follows."""
    time_of: Callable[[Any, str], int]

    @property
    def id_columns(self) -> tuple[str, ...]:
        """Span id, trace id, parent id and end time: all that shows whether a trace is complete."""
        return self.columns[:4]

    def read(self, rowid: int, data: bytes) -> Span | DeadRow:
        """A packed row as a span, or as a dead row with the reason."""
        row = (rowid, *marshal.loads(data))
        try:
            _, row_id, trace_id, parent, ended, attributes, name, events, *own = row
            span_id = span_id_of(row_id, trace_id)
            decoded = _attributes(attributes)
            kind, started_ns, status, message, conversation, service, resource = self.own_values(decoded, *own)
            if kind is SpanKind.AGENT and decoded.gen_ai.input.messages is NOTHING:
                decoded = with_first_argument(decoded, attributes)
            ended_ns = self.time_of(ended, self.columns[3])
            if ended_ns < started_ns:
                raise RowError(f"it ended {(started_ns - ended_ns) / 1e9:g} s before it began")
            return Span(
                rowid,
                text_in(span_id, "id", required=True),
                text_in(trace_id, "traceId", required=True),
                text_in(parent, "parentSpanId"),
                text_in(name, "name"),
                kind,
                started_ns,
                ended_ns,
                status,
                message,
                conversation,
                decoded,
                _events(events),
                service,
                resource=resource,
                recorded=attributes or b"",
            )
        except (RowError, UnicodeDecodeError) as error:
            why = "a text is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            excerpt = row[5]
            for column, value in zip(self.columns, row[1:], strict=True):
                if isinstance(value, tuple):
                    # The other values were not loaded.
                    why, excerpt = f"{column} {_type_of(value)}", value
            return DeadRow(rowid, shown(span_id_of(row[1], row[2])), shown(row[2]), why, shown(excerpt)[:500])

    def named_in(self, data: bytes) -> tuple[list[str], list[str]]:
        """The conversations and the users that a packed row names, as far as it can be read."""
        values = dict(zip(self.columns, marshal.loads(data), strict=True))
        conversations, users = named_in(_attributes_text(values["attributes"]))
        column = next(values[name] for name in _CONVERSATIONS if name in values)
        return [*([column.decode(errors="replace")] if isinstance(column, bytes) else []), *conversations], users

    def ended_ns(self, value: Any) -> int:
        """An end time as nanoseconds since 1970; 0 if it cannot be parsed."""
        try:
            return self.time_of(value, self.columns[3])
        except (RowError, UnicodeDecodeError):
            return 0


def span_id_of(row_id: Any, trace_id: Any) -> Any:
    """The span id of a row. Where another span has that id, its row in an inbox has trace and start in its id."""
    if type(row_id) is bytes and b"@" in row_id and type(trace_id) is bytes:
        return row_id.partition(b"@" + trace_id + b"@")[0]
    return row_id


def schema_of(database: Database) -> tuple[Schema, str]:
    """The generation of a file and the fingerprint of its span table. Raises StudioError if it is not Studio's."""
    path = database.path
    table = database.ask("SELECT name, type FROM pragma_table_info(?)", (TABLE,))
    columns = [(shown(name), shown(kind)) for name, kind in table]
    names = [name for name, _ in columns]
    if not columns:
        tables = [shown(name) for (name,) in database.ask("SELECT name FROM sqlite_master WHERE type = 'table'")]
        held = f"it holds {', '.join(sorted(tables)[:8])}" if tables else "it holds no table"
        raise fault(
            path,
            f"it is a SQLite database but not Studio's: there is no {TABLE} ({held})",
            "Point the source at Studio's own database, usually ~/AgentScope-Studio/database.sqlite.",
            "not Studio's",
        )
    fingerprint = hashlib.sha256(repr(columns).encode()).hexdigest()[:16]
    schema = next((schema for schema in SCHEMAS.values() if schema.own_columns <= set(names)), None)
    if schema is None:
        expected = " or ".join(" and ".join(sorted(candidate.own_columns)) for candidate in SCHEMAS.values())
        raise fault(
            path,
            f"its {TABLE} is of no known generation (fingerprint {fingerprint}): expected the columns {expected}, "
            f"found {', '.join(names)}",
            "Use a Studio from 1.0.5 to 1.0.9, or report this version.",
            "unknown schema",
        )
    if lacking := [column for column in schema.columns if column not in names]:
        raise fault(
            path,
            f"its {TABLE} ({schema.name}, fingerprint {fingerprint}) lacks the columns {', '.join(lacking)}",
            "Let Studio finish its migration, or restore the database from a backup.",
            "unknown schema",
        )
    if why := _without_rowids(database, names):
        hint = f"Point the source at Studio's own database, with the {TABLE} that Studio made."
        raise fault(path, f"its {TABLE} {why}", hint, "unknown schema")
    return schema, fingerprint


def _without_rowids(database: Database, names: Sequence[str]) -> str:
    """Why rows cannot be read in order of their rowid, from 1 on; empty if they can."""
    if "rowid" in (name.lower() for name in names):
        return "has a column of the name rowid, which hides the rows' own numbers"
    for kind, sql in database.ask("SELECT type, sql FROM sqlite_master WHERE lower(name) = ?", (TABLE,)):
        if kind != b"table":
            return f"is a {shown(kind)}: its rows have no numbers"
        if b"WITHOUT ROWID" in sql.upper().rpartition(b")")[2]:
            return "is a table WITHOUT ROWID: its rows have no numbers"
    ((first,),) = database.ask(f"SELECT min(rowid) FROM {TABLE}")  # noqa: S608 - a constant
    return f"has rows with numbers below 1 (the first is {first})" if first is not None and first < 1 else ""


def packed(row: Row) -> bytes:
    """A row without its rowid. Equal values give equal bytes, which are hashed, kept and sent."""
    # Version 2 of marshal: later versions also encode which objects are shared.
    return marshal.dumps(tuple(row[1:]), 2)


def digest_of(rows: Iterable[bytes]) -> int:
    """A hash of packed rows in any order: 63 bits, never 0."""
    return (sum(map(hash_of, rows)) & DIGEST_BITS) or 1


def is_id(value: object) -> bool:
    """Whether a value can be an id: a text that is not empty."""
    try:
        return bool(text_in(value, "id", required=True))
    except (RowError, UnicodeDecodeError):
        return False


def unnamed(rows: Iterable[Row]) -> list[DeadRow]:
    """The rows whose span id or trace id cannot be read, as dead rows."""
    dead: list[DeadRow] = []
    for row in rows:
        try:
            text_in(row[1], "id", required=True)
            text_in(row[2], "traceId", required=True)
        except (RowError, UnicodeDecodeError) as error:
            why = str(error) if isinstance(error, RowError) else "an id is not UTF-8"
            # The same row gets the same name in every scan.
            name = shown(row[1]) or f"unnamed-{digest_of([packed(row)]):016x}"
            named = (next(iter(each), "") for each in named_in(_attributes_text(row[5])))
            dead.append(DeadRow(row[0], name, shown(row[2]), why, shown(row[5])[:500], *named))
    return dead


def excerpt_of(data: bytes) -> str:
    """The first 500 characters of a packed row's attributes."""
    return shown(marshal.loads(data)[4])[:500]


def _attributes_text(value: Any) -> str:
    """The attributes of a row, as far as they were loaded."""
    value = value[1] if isinstance(value, tuple) else value
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _own_values_1(
    _: Attributes, status: Any, kind: Any, started: Any, message: Any, run: Any
) -> tuple[SpanKind, int, SpanStatus, str, str, str, str]:
    return (
        _KINDS_1.get(kind, SpanKind.OTHER),
        iso_ns(started, "startTime"),
        _STATUS_1.get(status, SpanStatus.UNSET),
        text_in(message, "statusMessage"),
        text_in(run, "run_id"),
        "",
        "",
    )


def _own_values_2(
    decoded: Attributes, status: Any, started: Any, operation: Any, conversation: Any, service: Any, resource: Any
) -> tuple[SpanKind, int, SpanStatus, str, str, str, str]:
    kind = _KINDS_2.get(decoded.gen_ai.operation.name)
    if kind is None:
        kind = _KINDS_2.get(text_in(operation, "operationName"), SpanKind.OTHER)
    state, message = _STATUS_2.get(status, (None, ""))
    if state is None:
        written = _json(status, "status")
        code, message = get_path(written, "code"), get_path(written, "message")
        state = _CODES_2.get(code, SpanStatus.UNSET) if isinstance(code, int) else SpanStatus.UNSET
    return (
        kind,
        decimal_ns(started, "startTimeUnixNano"),
        state,
        message if isinstance(message, str) else "",
        text_in(conversation, "conversationId"),
        text_in(service, "serviceName"),
        resource.decode(errors="replace") if isinstance(resource, bytes) else "",
    )


def text_in(value: Any, column: str, *, required: bool = False) -> str:
    """A text; NULL is an empty text. Raises RowError, also for an empty text if it is required, and
    UnicodeDecodeError."""
    if type(value) is bytes and (value or not required):
        return value.decode()
    if required and value in (None, b""):
        raise RowError(f"{column} is empty")
    if value is None:
        return ""
    raise RowError(f"{column} {_type_of(value)}, not text")


def _type_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"has {value[0]:,} bytes, more than {MAX_CELL:,}"
    return f"is a {type(value).__name__}"


def _json(value: Any, column: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, bytes):
        raise RowError(f"{column} {_type_of(value)}, not JSON text")
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        pass
    try:
        # Slower and more lenient: Studio accepts lone surrogates and numbers that orjson refuses.
        return json.loads(value.decode())
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"{column} is not JSON: {error}") from error


def _attributes(value: Any) -> Attributes:
    if value is not None and type(value) is not bytes:
        raise RowError(f"attributes {_type_of(value)}, not JSON text")
    try:
        return attributes_of(b"null" if value is None else value)
    except TypeError as error:
        raise RowError(f"attributes is {error}") from error
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"attributes is not JSON: {error}") from error


def _events(value: Any) -> tuple[dict[str, Any], ...]:
    """The events of a span; anything but a list of objects counts as no events."""
    if value is None or value == b"[]":
        return ()
    events = _json(value, "events")
    return tuple(event for event in events if isinstance(event, dict)) if isinstance(events, list) else ()


def iso_ns(value: Any, column: str) -> int:
    """An ISO 8601 time, in UTC if it has no offset, as nanoseconds since 1970. Raises RowError."""
    text = text_in(value, column)
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        since = moment - _EPOCH
    except (ValueError, OverflowError) as error:
        raise RowError(f"{column} is no time: {text[:40]!r}") from error
    return _in_range(((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000, column)


def decimal_ns(value: Any, column: str) -> int:
    """A decimal number of nanoseconds since 1970. Raises RowError."""
    try:
        ns = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"{column} is no number of nanoseconds: {shown(value)[:40]!r}") from error
    return _in_range(ns, column)


def _in_range(ns: int, column: str) -> int:
    if not 0 <= ns < LATEST_NS:
        raise RowError(f"{column} is out of range: {ns}")
    return ns


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
_CODES_2: Final = {1: SpanStatus.OK, 2: SpanStatus.ERROR}
_STATUS_1: Final = {b"OK": SpanStatus.OK, b"ERROR": SpanStatus.ERROR}
_STATUS_2: Final = {
    b'{"code":1,"message":""}': (SpanStatus.OK, ""),
    b'{"code":1}': (SpanStatus.OK, ""),
    b'{"code":0}': (SpanStatus.UNSET, ""),
    b'{"code":0,"message":""}': (SpanStatus.UNSET, ""),
}
"""The most common spellings; others are parsed."""

_GENERATION_1: Final = Schema(
    "generation 1",
    frozenset({"spanKind", "run_id"}),
    ("id", "traceId", "parentSpanId", "endTime", "attributes", "name", "events", "status", "spanKind", "startTime",
     "statusMessage", "run_id"),
    _own_values_1,
    iso_ns,
)  # fmt: skip
_GENERATION_2: Final = Schema(
    "generation 2",
    frozenset({"spanId", "conversationId"}),
    ("id", "traceId", "parentSpanId", "endTimeUnixNano", "attributes", "name", "events", "status",
     "startTimeUnixNano", "operationName", "conversationId", "serviceName", "resource"),
    _own_values_2,
    decimal_ns,
)  # fmt: skip
SCHEMAS: Final = {schema.name: schema for schema in (_GENERATION_1, _GENERATION_2)}
"""The generations by name."""
