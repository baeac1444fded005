"""Parsing of a judge endpoint's response: the reply of a chat completion, or the error that it is.

Nothing in a response is trusted: an endpoint can answer anything with status 200.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import orjson

from flywheel.files import json_line
from flywheel.judge.response_formats import TOOL_NAME, ResponseFormat
from flywheel.model_http_client import HttpAnswer

MAX_TOKEN_COUNT: Final = 100_000_000
"""No call uses more tokens: higher counts are cut to this."""
RETRYABLE: Final = frozenset({408, 409, 429})
REJECTED_FOR_ALL: Final = frozenset({401, 402, 403, 404})
"""Status codes about the key, the account or the model: every other call would get them too."""
INVALID_KEY: Final = re.compile(
    r"\b(?:invalid|incorrect|wrong|expired|missing|revoked) (?:\w+ )?(?:api[ _-]?key|token(?! (?:id|count|at|in)\b))",
    re.I,
)
"""How some endpoints report a wrong key with status 400, where others answer 401."""


class CallError(Exception):
    """An attempt without a reply.

    Attributes:
        status: Status code of the response; 0 when none came.
        retry_after: Delay that the endpoint requested, in seconds.
        retryable: Whether the same call may succeed in a moment.
    """

    def __init__(
        self, message: str, *, status: int = 0, retry_after: float | None = None, final: bool = False
    ) -> None:
        """`final` excludes a retry whatever the status is."""
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.retryable = not final and (status == 0 or status in RETRYABLE or status >= 500)


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one call.

    Attributes:
        text: What the judge wrote; empty where there is a `problem`.
        problem: Why there is no text.
        cut_off: The reply reached the maximum length.
        has_usage: The endpoint reported the tokens used.
        calls: 0 for a call that the endpoint rejected.
        error_status: The status code that an error object inside a response of status 200 names.
        format: The response format that was requested.
        judge: The model and endpoint that answered.
    """

    text: str
    problem: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut_off: bool = False
    has_usage: bool = False
    calls: int = 1
    error_status: int = 0
    format: ResponseFormat = ResponseFormat.TEXT
    judge: str = ""


def parse_response(answer: HttpAnswer) -> Reply:
    """The reply in an HTTP response. Raises CallError for a response without one."""
    if not answer.is_success:
        message = answer.error_message
        status = 401 if answer.status == 400 and INVALID_KEY.search(message) else answer.status
        raise CallError(f"it answered {answer.status} ({message})", status=status, retry_after=answer.retry_after)
    try:
        reply = _reply(_completion(answer.body))
    except ValueError as error:
        raise CallError(str(error)) from error
    if reply.error_status and not reply.prompt_tokens + reply.completion_tokens:
        # What was billed is kept, though it is no verdict. What was not can be retried, or concerns every call.
        failure = CallError(reply.problem, status=reply.error_status)
        if failure.retryable or failure.status in REJECTED_FOR_ALL:
            raise failure
    return reply


def _reply(completion: dict[str, Any]) -> Reply:
    usage = _dict(completion.get("usage"))
    tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices:
        error = completion.get("error")
        problem = f"the endpoint answered without a choice{f': {str(error)[:300]}' if error else ''}"
        code = _dict(error).get("code")
        status = _count(int(code) if isinstance(code, str) and code.isdecimal() and len(code) <= 4 else code)
        return Reply("", problem, *tokens, has_usage=bool(usage), error_status=status)
    choice = _dict(choices[0])
    text, problem = _text(_dict(choice.get("message")))
    cut_off = choice.get("finish_reason") == "length"
    return Reply(text, problem, *tokens, cut_off=cut_off, has_usage=bool(usage))


def _completion(body: bytes) -> dict[str, Any]:
    """The completion object. Raises ValueError for anything else: a proxy's page, a truncated body."""
    try:
        completion = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            # Some servers cut a text within a character.
            completion = storable_value(json.loads(body.decode(json.detect_encoding(body), "replace")))
        except (ValueError, RecursionError):
            completion = _completion_of_stream(body)
    if not isinstance(completion, dict):
        raise ValueError("the response is not a JSON object")
    return completion


def storable_value(value: Any) -> Any:
    """A parsed JSON value without lone surrogates: JSON can spell them, UTF-8 cannot hold them."""
    return json.loads(json_line(value))


def _completion_of_stream(body: bytes) -> dict[str, Any]:
    """The completion in a stream of server-sent events: some proxies stream although nobody requested it."""
    lines = body.decode("utf-8", "replace").splitlines()
    events = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    if not events or any(line and not line.startswith(("data:", "event:", "id:", "retry:", ":")) for line in lines):
        raise ValueError("the response is not JSON")
    text, name, arguments, finish_reason = "", "", "", None
    usage: Any = None
    error: Any = None
    for event in events:
        if event == "[DONE]":
            continue
        try:
            chunk = _dict(storable_value(json.loads(event)))
        except (ValueError, RecursionError):
            raise ValueError("the response is a stream that is not JSON") from None
        usage, error = chunk.get("usage") or usage, chunk.get("error") or error
        for choice in map(_dict, chunk.get("choices") or ()):
            delta = _dict(choice.get("delta"))
            text += _content(delta.get("content"))
            for call in delta.get("tool_calls") or ():
                function = _dict(_dict(call).get("function"))
                name = name or str(function.get("name") or "")
                arguments += str(function.get("arguments") or "")
            finish_reason = choice.get("finish_reason") or finish_reason
    if "[DONE]" not in events and finish_reason is None and error is None:
        raise ValueError("the response is a stream that was cut off")
    calls = [{"function": {"name": name, "arguments": arguments}}] if name else []
    message = {"content": text, "tool_calls": calls}
    choices = [{"message": message, "finish_reason": finish_reason}] if finish_reason is not None else []
    return {"choices": choices, "usage": usage, "error": error}


def _text(message: dict[str, Any]) -> tuple[str, str]:
    """The text, which can be the arguments of the verdict's tool call, and the problem."""
    if refusal := message.get("refusal"):
        return "", f"the judge refused: {str(refusal)[:300]}"
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = _dict(_dict(call).get("function"))
        if function.get("name") == TOOL_NAME and isinstance(arguments := function.get("arguments"), str):
            return arguments, ""
    content = _content(message.get("content"))
    return (content, "") if content.strip() else ("", "the reply has no text")


def _content(content: Any) -> str:
    """A message's text. Most endpoints send a string, some a list of parts with reasoning between them."""
    if isinstance(content, str):
        return content
    parts = [_dict(part) for part in content] if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if part.get("type", "text") == "text")
    return "".join(text for text in texts if isinstance(text, str))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    is_count = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return int(min(value, MAX_TOKEN_COUNT)) if is_count else 0
