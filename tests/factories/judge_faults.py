"""What endpoints of judges answer: a completion, whole or streamed, and the refusals of various servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

FAULTS = (
    "401", "403", "404", "400", "422", "429", "429 with Retry-After", "500", "reset", "truncated body", "html",
    "prose", "truncated verdict", "missing criterion", "unknown criterion", "unknown choice", "empty choices",
    "empty content", "refusal", "error object", "no schema", "too long", "quoted verdict", "cut off", "stream",
    "choices of text", "content of thoughts", "error object 429", "billed error object", "huge", "cut off stream",
)  # fmt: skip


def _has(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda request: name in request


def _has_system_message(request: dict[str, Any]) -> bool:
    return request["messages"][0]["role"] == "system"  # type: ignore[no-any-return]


USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
SHORT = "max_tokens is too large: 2048. This model supports at most 1024 completion tokens."
NO_ROLE = "System role not supported at row 1, column 46:\n{{ raise_exception('System role') }}"
OVERLONG = (
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9012 tokens (8000 in the "
    "messages, 1012 in the response_format schemas and the functions). Please reduce the length of the messages or "
    "schemas."
)
REFUSALS: dict[str, tuple[tuple[Callable[[dict[str, Any]], bool], int, str | dict[str, Any]], ...]] = {
    "no schema": ((_has("response_format"), 400, "response_format is not supported"),),
    "no schema, no tools": (
        (_has("response_format"), 422, "response_format: extra fields not permitted"),
        (_has("tools"), 422, "tools: extra fields not permitted"),
    ),
    "refuses silently": ((_has("response_format"), 400, "Bad request"),),
    "breaks on schema and tools": (
        (_has("response_format"), 500, "failed to parse grammar"),
        (_has("tools"), 500, "tools param requires --jinja flag"),
    ),
    "no seed": ((_has("seed"), 400, "Unsupported parameter: seed"),),
    "newer": ((_has("max_tokens"), 400, "Use 'max_completion_tokens' instead of 'max_tokens'."),),
    "no max_tokens": ((_has("max_tokens"), 400, "Unrecognized request argument supplied: max_tokens"),),
    "no temperature": (
        (_has("temperature"), 400, "Unsupported value: 'temperature' does not support 0.0 with this model."),
    ),
    "no system message": ((_has_system_message, 400, "System role not supported"),),
    "breaks on a system message": ((_has_system_message, 500, NO_ROLE),),
    "short answers only": ((bool, 400, SHORT),),
    "too long": ((bool, 400, "This model's maximum context length is 4096 tokens."),),
    "overlong": ((bool, 400, {"message": OVERLONG, "param": "messages", "code": "context_length_exceeded"}),),
    "overlong without a code": ((bool, 400, OVERLONG),),
    "names the schema by param": (
        (
            _has("response_format"),
            400,
            {"message": "'response_format' is not supported.", "param": "response_format", "code": None},
        ),
    ),
    "names the temperature by param": (
        (
            _has("temperature"),
            400,
            {"message": "Only the default is allowed.", "param": "temperature", "code": "unsupported_value"},
        ),
    ),
    "temperature too high": (
        (
            _has("temperature"),
            400,
            {"message": "'temperature' is above 2.", "param": "temperature", "code": "decimal_above_max_value"},
        ),
    ),
    "refuses temperature silently": ((_has("temperature"), 400, "Bad request"),),
    "odd": ((bool, 400, "Bad request"),),
    "moderated": ((bool, 403, "Your input was flagged by moderation."),),
}
"""Requests that an endpoint refuses: which, with what status and message or fields. Others it answers."""
ERROR_OBJECTS: dict[str, Any] = {
    "error object": {"error": {"message": "overloaded", "code": 529}},
    "error object 429": {"error": {"message": "slow down", "code": 429}},
    "billed error object": {"error": {"message": "broke", "code": 502}, "usage": USAGE},
}


def stream(text: str, *, whole: bool) -> bytes:
    pieces: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": text[at : at + 7]}, "finish_reason": None}]}
        for at in range(0, len(text), 7)
    ]
    if whole:
        pieces.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        pieces.append({"choices": [], "usage": USAGE})
    lines = [f"data: {json.dumps(piece)}\n\n" for piece in pieces]
    return "".join([": hello\n\n", *lines, "data: [DONE]\n\n" if whole else ""]).encode()


def chat_completion(text: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "judge",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": dict(USAGE),
    }
