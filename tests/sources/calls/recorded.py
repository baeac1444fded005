"""Recorded calls for tests: requests of clients, and what a server answers, plain and as a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flywheel.records.request_id import new_request_id
from flywheel.serving.calls.call_log import RecordedCall
from tests.factories.call_log import compact

INSTANCE = "0123456789abcdef"
JSON = "application/json"
STREAM = "text/event-stream; charset=utf-8"
BEGIN_NS = 1_700_000_000_000_000_000
SECOND_NS = 1_000_000_000


def recorded(
    request: Any,
    response: Any,
    *,
    path: str = "/v1/chat/completions",
    began: float = 0.0,
    seconds: float = 1.0,
    status: int = 200,
    is_complete: bool = True,
    media_type: str = "",
    credential: str = "c1",
    retry: int = 0,
    version: str = "base",
    request_id: str = "",
) -> RecordedCall:
    """A call that began `began` seconds after a fixed time. A stream is given as bytes."""
    body = response if isinstance(response, bytes) else json.dumps(response).encode()
    return RecordedCall(
        request_id=request_id or new_request_id(INSTANCE, version),
        path=path,
        version=version,
        credential=credential,
        retry=retry,
        started_ns=BEGIN_NS + int(began * SECOND_NS),
        ended_ns=BEGIN_NS + int((began + seconds) * SECOND_NS),
        status=status,
        is_complete=is_complete,
        media_type=media_type or (STREAM if isinstance(response, bytes) else JSON),
        request=request if isinstance(request, bytes) else compact(request),
        response=body,
    )


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def tool_call(name: str, arguments: str = "{}", call_id: str = "call-1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(text: str, call_id: str = "call-1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def chat(messages: Sequence[dict[str, Any]], **others: Any) -> dict[str, Any]:
    return {"model": "agent", "messages": list(messages), **others}


def completion(*messages: dict[str, Any], usage: Any = None, **others: Any) -> dict[str, Any]:
    """The body of a response with these messages as its choices."""
    choices = [
        {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        for index, message in enumerate(messages)
    ]
    return {"id": "chatcmpl-x", "object": "chat.completion", "choices": choices, "usage": usage, **others}


def sse(*events: Any, done: bool = True, newline: str = "\n") -> bytes:
    """A stream of events; a text is written as it is."""
    lines = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in events]
    lines += ["data: [DONE]"] if done else []
    return "".join(line + 2 * newline for line in lines).encode()


def delta(index: int = 0, *, finish: str | None = None, **said: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": index, "delta": said, "finish_reason": finish}]}
