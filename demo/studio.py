"""A trace database as AgentScope Studio keeps it (schema generation 2, spans of an AgentScope 2.x client).

Owns the schema and the shape of the rows; must not know who asked or what becomes of them. Written as Studio writes:
`journal_mode=delete`, one transaction per export, a span saved again replaces its row in place.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

SERVICE: Final = "flywheel-demo"
PROVIDER: Final = "openai"
CLIENT_VERSION: Final = "2.0.11"
BUSY_SECONDS: Final = 5.0
INSTANCE: Final = secrets.token_hex(16)

COLUMN_TYPES: Final = {
    "id": "varchar PRIMARY KEY NOT NULL",
    "traceId": "varchar NOT NULL",
    "spanId": "varchar NOT NULL",
    "traceState": "varchar",
    "parentSpanId": "varchar",
    "flags": "integer",
    "name": "varchar NOT NULL",
    "kind": "integer NOT NULL",
    "startTimeUnixNano": "varchar NOT NULL",
    "endTimeUnixNano": "varchar NOT NULL",
    "attributes": "json NOT NULL",
    "droppedAttributesCount": "integer",
    "events": "json",
    "droppedEventsCount": "integer",
    "links": "json",
    "droppedLinksCount": "integer",
    "status": "json NOT NULL",
    "resource": "json NOT NULL",
    "scope": "json NOT NULL",
    "statusCode": "integer",
    "serviceName": "varchar",
    "operationName": "varchar",
    "instrumentationName": "varchar",
    "instrumentationVersion": "varchar",
    "model": "varchar",
    "inputTokens": "integer",
    "outputTokens": "integer",
    "totalTokens": "integer",
    "conversationId": "varchar",
    "latencyNs": "float NOT NULL",
}
COLUMNS: Final = tuple(COLUMN_TYPES)
INDEXES: Final = {
    "IDX_a9c90d6dcc77a52eee70759192": "conversationId",
    "IDX_9b03613341a28f3adc4b25bede": "totalTokens",
    "IDX_b3cef24d908083f74e0296f019": "outputTokens",
    "IDX_eed52eb7930ae0a16a637ae0fc": "inputTokens",
    "IDX_1a65be629f1e8717ae936f237f": "model",
    "IDX_6a42dec2234c4d8f03e4636a1c": "instrumentationName",
    "IDX_50345441e37fcaa6a81f9e1f23": "operationName",
    "IDX_597fb8acbd91e2eb45550a3a27": "serviceName",
    "IDX_bdb32c4f77e940ff499cfb66be": "latencyNs",
    "IDX_10fc9e48821fafed09920bbae5": "statusCode",
    "IDX_23807b42325ccc1f324741edea": "startTimeUnixNano",
    "IDX_ae666e33c6833fb99bba2d8c0d": "parentSpanId",
    "IDX_fca75f17a2ac51391c28a1fe6c": "spanId",
    "IDX_e53c038912e2db29c8ab91e23a": "traceId",
}
MIGRATIONS: Final = (
    (1730000000000, "AddMessageReplyForeignKey1730000000000"),
    (1740000000000, "MigrateSpanTable1740000000000"),
)

Row = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the agent as its client saw it; times are nanoseconds since 1970."""

    conversation_id: str
    agent: str
    question: str
    answer: str
    messages: list[dict[str, str]]
    """What the model was sent: system prompt, history and question, in the OpenAI form."""
    requested_model: str
    answered_model: str
    response_id: str
    finish_reason: str
    input_tokens: int
    output_tokens: int
    agent_started_ns: int
    call_started_ns: int
    call_ended_ns: int
    agent_ended_ns: int
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    agent_span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    call_span_id: str = field(default_factory=lambda: secrets.token_hex(8))


class StudioDatabase:
    """The file. Whoever writes it is alone in doing so, as Studio's server is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = ", ".join(f'"{name}" {kind}' for name, kind in COLUMN_TYPES.items())
        with closing(self._connect()) as connection, connection:
            connection.execute("PRAGMA journal_mode = delete")
            connection.execute(
                'CREATE TABLE IF NOT EXISTS "migrations" ("id" integer PRIMARY KEY AUTOINCREMENT NOT NULL, '
                '"timestamp" bigint NOT NULL, "name" varchar NOT NULL)'
            )
            connection.execute(f'CREATE TABLE IF NOT EXISTS "span_table" ({columns})')
            for name, column in INDEXES.items():
                connection.execute(f'CREATE INDEX IF NOT EXISTS "{name}" ON "span_table" ("{column}")')
            if not connection.execute('SELECT count(*) FROM "migrations"').fetchone()[0]:
                connection.executemany('INSERT INTO "migrations" ("timestamp", "name") VALUES (?, ?)', MIGRATIONS)

    def export(self, rows: Sequence[Row]) -> None:
        """Save spans in one transaction. Raises sqlite3.OperationalError when a reader blocks it for too long."""
        if not rows:
            return
        names = ", ".join(f'"{name}"' for name in COLUMNS)
        places = ", ".join(f":{name}" for name in COLUMNS)
        updates = ", ".join(f'"{name}" = excluded."{name}"' for name in COLUMNS if name != "id")
        statement = (
            f'INSERT INTO "span_table" ({names}) VALUES ({places}) '  # noqa: S608 - the names are constants
            f'ON CONFLICT ("id") DO UPDATE SET {updates}'
        )
        with closing(self._connect()) as connection, connection:
            connection.executemany(statement, rows)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=BUSY_SECONDS)


def call_row(turn: Turn) -> Row:
    """The span of the model call: it ends, and is written, before its agent's."""
    names = {"assistant": turn.agent}
    sent = [_message(each["role"], each["content"], names.get(each["role"], each["role"])) for each in turn.messages]
    attributes = {
        "operation": {"name": "chat"},
        "provider": {"name": PROVIDER},
        "request": {"model": turn.requested_model},
        "input": {"messages": sent},
        "conversation": {"id": turn.conversation_id},
        "response": {"id": turn.response_id, "model": turn.answered_model, "finish_reasons": [turn.finish_reason]},
        "usage": {"input_tokens": turn.input_tokens, "output_tokens": turn.output_tokens},
        "output": {"messages": [_message("assistant", turn.answer)]},
    }
    return _row(
        turn,
        span_id=turn.call_span_id,
        parent_id=turn.agent_span_id,
        name=f"chat {turn.requested_model}",
        started_ns=turn.call_started_ns,
        ended_ns=turn.call_ended_ns,
        attributes={"gen_ai": attributes},
        operationName="chat",
        model=turn.requested_model,
        inputTokens=turn.input_tokens,
        outputTokens=turn.output_tokens,
        totalTokens=turn.input_tokens + turn.output_tokens,
    )


def agent_row(turn: Turn) -> Row:
    """The span of the agent, the last of its trace."""
    attributes = {
        "operation": {"name": "invoke_agent"},
        "agent": {"name": turn.agent, "description": "The agent class."},
        "input": {"messages": [_message("user", turn.question, "user")]},
        "conversation": {"id": turn.conversation_id},
        "output": {"messages": [_message("assistant", turn.answer, turn.agent)]},
    }
    return _row(
        turn,
        span_id=turn.agent_span_id,
        parent_id="",
        name=f"invoke_agent {turn.agent}",
        started_ns=turn.agent_started_ns,
        ended_ns=turn.agent_ended_ns,
        attributes={"gen_ai": attributes, "agentscope": {"agent": {"reply_id": secrets.token_hex(16)}}},
        operationName="invoke_agent",
    )


def _message(role: str, text: str, name: str | None = None) -> Message:
    parts = [{"type": "text", "content": text}] if text else []
    named = {"name": name} if name else {}
    return {"role": role, "parts": parts, **named, "finish_reason": "stop"}


def _row(
    turn: Turn,
    *,
    span_id: str,
    parent_id: str,
    name: str,
    started_ns: int,
    ended_ns: int,
    attributes: dict[str, Any],
    **columns: Any,
) -> Row:
    resource = {
        "telemetry": {"sdk": {"language": "python", "name": "opentelemetry", "version": "1.45.2"}},
        "service": {"instance": {"id": INSTANCE}, "name": SERVICE, "version": "1.0.0"},
    }
    return {
        **dict.fromkeys(COLUMNS),
        "id": span_id,
        "traceId": turn.trace_id,
        "spanId": span_id,
        "traceState": "",
        "parentSpanId": parent_id,
        "flags": 256,
        "name": name,
        "kind": 1,
        "startTimeUnixNano": _nanoseconds(started_ns),
        "endTimeUnixNano": _nanoseconds(ended_ns),
        "attributes": _json(attributes),
        "droppedAttributesCount": 0,
        "events": "[]",
        "droppedEventsCount": 0,
        "links": "[]",
        "droppedLinksCount": 0,
        "status": _json({"code": 1, "message": ""}),
        "resource": _json({"attributes": resource}),
        "scope": _json({"name": "agentscope", "version": CLIENT_VERSION, "attributes": {}}),
        "statusCode": 1,
        "serviceName": SERVICE,
        "conversationId": turn.conversation_id,
        "latencyNs": float(ended_ns - started_ns),
        **columns,
    }


def _nanoseconds(value: int) -> str:
    """Studio's times went through a double: their last digits are rounded."""
    return str(round(value, -2))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
