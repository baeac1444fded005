"""The lines of OpenAI's batch interface: requests, and the responses to them, joined by their `custom_id`.

Other servers (vLLM, SGLang) read and write the same. https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from flywheel.records.trace import ModelCall, get_path
from flywheel.serving.calls.call_log import RecordedCall
from flywheel.sources.calls.parsing import error_in, parse
from flywheel.sources.spans.recorded_calls import message_of

Line = dict[str, Any]
"""A parsed line of a file."""
_OTHERS: Final = frozenset({"main_query", "question", "prompt", "messages", "init_messages", "conversations"})
"""Keys of lines that have a task of their own, whatever other keys stand beside."""


def id_of(line: Line) -> str:
    """The `custom_id`; empty if the line is neither a request nor a response of a batch."""
    return str(line["custom_id"]) if is_request(line) or is_response(line) else ""


def is_request(line: Line) -> bool:
    return _has_id(line) and isinstance(line.get("body"), dict) and isinstance(line.get("url"), str)


def is_response(line: Line) -> bool:
    """Whether it is what a server wrote about a request: its response, or why there is none."""
    return _has_id(line) and "response" in line and isinstance(line["response"], dict | None) and "url" not in line


def _has_id(line: Line) -> bool:
    own = line.get("custom_id")
    return isinstance(own, str | int) and not isinstance(own, bool) and own != "" and _OTHERS.isdisjoint(line)


def names_in(request: Line) -> tuple[str, str]:
    """The conversation and the user that a request names; empty if it names none."""
    metadata = get_path(request, "body", "metadata")
    given = get_path(metadata, "conversation_id"), get_path(request, "body", "user"), get_path(metadata, "user_id")
    conversation, own, user = (str(name) if isinstance(name, str | int) else "" for name in given)
    return conversation, own or user


def failure_of(response: Line) -> str:
    """Why a line has no response to its request; empty if it has one."""
    status = get_path(response, "response", "status_code")
    if response.get("error"):
        return error_in(response)
    if status not in (200, None):
        body = get_path(response, "response", "body")
        said = error_in(body) if isinstance(body, dict) else ""
        return f"HTTP {status}{': ' if said else ''}{said}"
    return "" if isinstance(get_path(response, "response", "body"), dict) else "the line has no response"


def call_of(request: Line, response: Line | None) -> ModelCall:
    """The model call of a request, and of the response to it if that is given."""
    return parse(
        RecordedCall(
            str(request["custom_id"]),
            request["url"],
            "",
            status=200,
            is_complete=True,
            media_type="application/json",
            request=orjson.dumps(request["body"]),
            response=orjson.dumps(get_path(response, "response", "body") or {}),
        )
    )


def task_of(request: Line, response: Line | None, call: ModelCall) -> Line:
    """A call as a line with messages: those of the request, and the answer."""
    conversation, user = names_in(request)
    said = [message_of(answer) for answer in call.answers[:1]]
    body = get_path(response, "response", "body") or {}
    metadata: Line = {
        "conversation_id": conversation,
        "user_id": user,
        "model": body["model"] if isinstance(body.get("model"), str) else call.model,
        "input_tokens": call.prompt_tokens,
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": call.completion_tokens,
    }
    with contextlib.suppress(StopIteration, ValueError, OverflowError, OSError):
        made = next(at for key in ("created", "created_at") if isinstance(at := body.get(key), int | float))
        metadata["started_at"] = datetime.fromtimestamp(made, UTC).isoformat()
    return {
        "custom_id": request["custom_id"],
        "messages": [*call.messages, *said],
        "tools": list(call.tools),
        "metadata": metadata,
    }
