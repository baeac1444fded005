"""Writes replies that were found in recorded calls as spans: one of the agent, and one for each call.

They hold no contents. Those are joined by response id, as to the spans of a trace. All ids follow from request ids:
writing a reply again updates its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import orjson

from flywheel.sources.calls.conversations import FoundCall, FoundReply
from flywheel.sources.otlp.inbox import COLUMNS, Row

_OK = 1
_ERROR = 2
_INTERNAL = 1
_CLIENT = 3


def rows_of(reply: FoundReply, agent: str) -> Iterator[Row]:
    """The rows for the inbox: those of the calls first, so that the agent's span completes them."""
    agent_id = _id("agent", reply.id, 8)
    for call in reply.calls:
        yield _row(reply, call, _id("call", call.request_id, 8), agent_id, *_of_call(call))
    whole = FoundCall(
        reply.id, min(call.started_ns for call in reply.calls), max(call.ended_ns for call in reply.calls)
    )
    attributes: dict[str, Any] = {
        "gen_ai": {
            "operation": {"name": "invoke_agent"},
            "agent": {"name": agent},
            "conversation": {"id": reply.conversation},
        },
        "flywheel": {"root_conversation": reply.root, "skip": reply.skip or "", "detail": reply.detail},
    }
    if reply.user:
        attributes["user"] = {"id": reply.user}
    yield _row(reply, whole, agent_id, "", f"invoke_agent {agent}", _INTERNAL, attributes)


def _of_call(call: FoundCall) -> tuple[str, int, dict[str, Any]]:
    gen_ai = {
        "operation": {"name": "chat"},
        "request": {"model": call.model},
        "response": {"id": call.request_id},
    }
    return f"chat {call.model}", _CLIENT, {"gen_ai": gen_ai}


def _row(
    reply: FoundReply, call: FoundCall, span_id: str, parent: str, name: str, kind: int, attributes: dict[str, Any]
) -> Row:
    status = {"code": _ERROR if call.error else _OK, "message": call.error}
    values = {
        "id": span_id,
        "traceId": _id("reply", reply.id, 16),
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(call.started_ns),
        "endTimeUnixNano": str(call.ended_ns),
        "attributes": _json(attributes),
        "events": "[]",
        "links": "[]",
        "status": _json(status),
        "resource": "{}",
        "scope": "{}",
        "statusCode": status["code"],
        "operationName": attributes["gen_ai"]["operation"]["name"],
        "model": attributes["gen_ai"].get("request", {}).get("model"),
        "conversationId": reply.conversation,
        "latencyNs": float(call.ended_ns - call.started_ns),
    }
    return [values.get(column) for column in COLUMNS]


def _id(kind: str, request_id: str, size: int) -> str:
    return blake2b(f"{kind} {request_id}".encode(), digest_size=size).hexdigest()


def _json(value: dict[str, Any]) -> str:
    return orjson.dumps(value).decode()
