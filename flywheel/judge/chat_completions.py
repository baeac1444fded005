"""The chat completions protocol: response formats of a request, and the parsing of what an endpoint answers.

A response format or parameter that an endpoint does not support is recorded in `EndpointCapabilities` and left out of
later requests for a day, because servers change. Nothing in a response is trusted: an endpoint can answer anything
with status 200.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from flywheel.records.trace import ChatMessage
from flywheel.secrets import redact_secrets
from flywheel.system.files import json_line
from flywheel.system.http_client import CallError

DAY_SECONDS: Final = 86_400.0
TOOL_NAME: Final = "verdict"
"""The function that a judge calls to give its verdict, where the format is a tool call."""
SEED: Final = "seed"
TEMPERATURE: Final = "temperature"
"""Reasoning models reject every temperature but their default."""
MAX_TOKENS: Final = "max_tokens"
"""Newer OpenAI models require `max_completion_tokens` instead."""
SYSTEM: Final = "system"
"""The role: chat templates of some open-weight models have none."""
MOVED: Final = (MAX_TOKENS, SYSTEM)
"""What is sent in another place where it is refused."""
_UNKNOWN: Final = r"(?:un(?:support|recogni|known|expect)|n['o]t (?:support|permit|allow|accept)|extra|deprecated)"
_PARAMETER: Final = r"{unknown}.*\b{name}\b|\b{name}\b.*{unknown}{more}"
"""A rejection of the parameter itself, and not of its value."""
MAX_TOKEN_COUNT: Final = 100_000_000
"""No call uses more tokens: higher counts are cut to this."""
REJECTED_FOR_ALL: Final = frozenset({401, 402, 403, 404})
"""Status codes about the key, the account or the model: every other call would get them too."""


class ResponseFormat(StrEnum):
    """From the strictest to the loosest."""

    SCHEMA = "schema"
    TOOL = "tool"
    JSON = "json"
    TEXT = "text"


AUTOMATIC: Final = (ResponseFormat.SCHEMA, ResponseFormat.TOOL, ResponseFormat.TEXT)
"""The formats that are tried where none is set. JSON mode is none of them: under it some models never end."""

FIELDS: Final = {
    ResponseFormat.SCHEMA.value: ("response_format",),
    ResponseFormat.TOOL.value: ("tools", "tool_choice"),
    SEED: (SEED,),
    TEMPERATURE: (TEMPERATURE,),
    MAX_TOKENS: (MAX_TOKENS,),
}
"""The fields of a request that hold a part."""
LABELS: Final = {
    ResponseFormat.SCHEMA.value: "JSON schema",
    ResponseFormat.TOOL.value: "tool call",
    SYSTEM: "system message",
}

_REJECTIONS: Final = {
    ResponseFormat.SCHEMA.value: r"response_?format|json_?\s?schema|structured|guided|grammar|schema",
    ResponseFormat.TOOL.value: r"\btools?\b|tool_choice|tool-call|function",
    SEED: r"\bseed\b",
    TEMPERATURE: _PARAMETER.format(unknown=_UNKNOWN, name="temperature", more=""),
    MAX_TOKENS: _PARAMETER.format(
        unknown=_UNKNOWN,
        name="max_tokens",
        more=r"|use\W+max_completion_tokens|max_completion_tokens\W+instead",
    ),
    SYSTEM: _PARAMETER.format(
        unknown=_UNKNOWN,
        name=r"system\W+(?:role|message|prompt|instruction)s?",
        more="|roles must alternate|only user and assistant roles|developer instruction is not enabled",
    ),
}
_REJECTIONS_BY_FAILURE: Final = {
    **_REJECTIONS,
    ResponseFormat.SCHEMA.value: r"response_?format|json_?schema|grammar",
    ResponseFormat.TOOL.value: r"\btools? param|tool_choice",
    SEED: r"(?!)",
}
"""Stricter, for servers that fail with 5xx where others reject (llama.cpp, when a template raises): their messages
name much else that failed."""


def part_of_param(error: CallError) -> str:
    """The part of a request that an endpoint names in the field `param` of its error, such as
    `response_format.json_schema`; empty if none."""
    name = re.split(r"[.\[]", error.param)[0]
    return next((part for part, fields in FIELDS.items() if name in fields), "")


def says_unsupported(error: CallError) -> bool:
    """Whether an error whose `param` names a part says that the part is unsupported. Other values of it may be right
    in all other cases."""
    unsupported = r"un(?:support|recogni|known|expect)|not (?:support|permit)|extra|deprecated"
    return re.search(unsupported, f"{error.code} {error}", re.I) is not None


def is_rejection_of(message: str, part: str, status: int = 400) -> bool:
    """Whether an error message rejects this part of a request: a response format or a parameter."""
    patterns = _REJECTIONS_BY_FAILURE if status >= 500 else _REJECTIONS
    return part in patterns and re.search(patterns[part], message, re.I | re.S) is not None


def strict_object(properties: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with all of these properties and no other."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def strict_format(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    """The value of `response_format` for such an object."""
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "strict": True, "schema": strict_object(properties)},
    }


def request_parts(request: Mapping[str, Any]) -> list[str]:
    """The parameters and response formats of a request, as far as an endpoint may not support them."""
    parts: list[str] = [parameter for parameter in (SEED, TEMPERATURE, MAX_TOKENS) if parameter in request]
    if any(message["role"] == SYSTEM for message in request["messages"]):
        parts.append(SYSTEM)
    return parts + [form for form in (ResponseFormat.SCHEMA, ResponseFormat.TOOL) if FIELDS[form][0] in request]


class EndpointCapabilities:
    """Which parts of a request endpoints support, by endpoint with model, for a day. Thread-safe.

    `testing` is held by who finds out.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.testing = threading.Lock()
        self._now = now
        self._found: dict[tuple[str, str], tuple[float, bool]] = {}

    def supports(self, endpoint: str, part: str) -> bool | None:
        """None if nothing was recorded within a day."""
        since, supported = self._found.get((endpoint, part), (float("-inf"), False))
        return supported if since + DAY_SECONDS > self._now() else None

    def lacks(self, endpoint: str, part: str) -> bool:
        return self.supports(endpoint, part) is False

    def format(self, endpoint: str) -> ResponseFormat:
        """The strictest one that is not known to be unsupported. Text always is supported."""
        return next(form for form in AUTOMATIC if form is ResponseFormat.TEXT or not self.lacks(endpoint, form))

    def supported_request(
        self, endpoint: str, request: Mapping[str, Any], form: ResponseFormat, response_format: dict[str, Any]
    ) -> dict[str, Any]:
        """The request in this format, without the parameters that the endpoint does not support."""
        supported = dict(request)
        for parameter in (SEED, TEMPERATURE):
            if self.lacks(endpoint, parameter):
                supported.pop(parameter, None)
        if self.lacks(endpoint, MAX_TOKENS):
            supported["max_completion_tokens"] = supported.pop(MAX_TOKENS)
        if self.lacks(endpoint, SYSTEM):
            messages: list[ChatMessage] = supported["messages"]
            text = "\n\n".join(str(message["content"]) for message in messages)
            supported["messages"] = [{"role": "user", "content": text}]
        if form is ResponseFormat.SCHEMA:
            supported["response_format"] = response_format
        elif form is ResponseFormat.JSON:
            supported["response_format"] = {"type": "json_object"}
        elif form is ResponseFormat.TOOL:
            function = {
                "name": TOOL_NAME,
                "description": "Give the verdict.",
                "parameters": response_format["json_schema"]["schema"],
                "strict": True,
            }
            supported["tools"] = [{"type": "function", "function": function}]
            supported["tool_choice"] = {"type": "function", "function": {"name": TOOL_NAME}}
        return supported

    def record(self, endpoint: str, part: str, *, supported: bool) -> bool:
        """Record whether the endpoint supports this part; returns whether that was not known."""
        is_new = self.supports(endpoint, part) is not supported
        self._found[endpoint, part] = self._now(), supported
        return is_new


KNOWN: Final = EndpointCapabilities()
"""What this process knows."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The reply to one call.

    Attributes:
        text: What the judge wrote; empty where there is a `problem`.
        problem: Why there is no text.
        cut_off: The reply reached the maximum length.
        calls: 0 for a call that the endpoint rejected.
        attempts: The attempts that it took.
        is_final: Where there is a problem: another attempt would have it too.
        format: The response format that was requested.
        judge: The model and endpoint that answered.
    """

    text: str
    problem: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut_off: bool = False
    calls: int = 1
    attempts: int = 1
    is_final: bool = False
    format: ResponseFormat = ResponseFormat.TEXT
    judge: str = ""


def reply_of(completion: object) -> JudgeReply:
    """The reply in what `openai` made of a response, of which it checks no type.

    Raises CallError for a response without one, and what Python raises for values of other types.
    """
    from openai.types.chat import ChatCompletion, ChatCompletionMessage
    from openai.types.chat.chat_completion import Choice

    if not isinstance(completion, ChatCompletion):
        raise CallError("the response is not a chat completion")
    usage = completion.usage
    tokens = _count(getattr(usage, "prompt_tokens", 0)), _count(getattr(usage, "completion_tokens", 0))
    match completion:
        case ChatCompletion(choices=[Choice(message=ChatCompletionMessage() as message) as choice, *_]):
            text, problem = _text(message)
            is_cut_off = choice.finish_reason == "length"
            return JudgeReply(text, problem, *tokens, cut_off=is_cut_off)
    return _without_choice(getattr(completion, "error", None), tokens)


def _without_choice(error: Any, tokens: tuple[int, int]) -> JudgeReply:
    problem = f"the endpoint answered without a choice{f': {str(error)[:300]}' if error else ''}"
    code = _dict(error).get("code")
    status = _count(int(code) if isinstance(code, str) and code.isdecimal() and len(code) <= 4 else code)
    failure = CallError(problem, status=status)
    # What was billed is kept, though it is no verdict. What was not can be retried, or concerns every call.
    if status and not any(tokens) and (failure.retryable or status in REJECTED_FOR_ALL):
        raise failure
    return JudgeReply("", problem, *tokens, is_final=bool(error))


def mended(body: bytes) -> bytes:
    """The body of a response as clean JSON: some servers cut a text within a character, some proxies stream although
    nobody requested it. What is neither is returned as it is. Known secrets are removed.

    Raises CallError for a stream that was cut off.
    """
    body = redact_secrets(body)
    try:
        orjson.loads(body)
        return body
    except orjson.JSONDecodeError:
        pass
    try:
        return json_line(json.loads(body.decode(json.detect_encoding(body), "replace")))
    except (ValueError, RecursionError):
        completion = _completion_of_stream(body)
        return body if completion is None else json_line(completion)


def storable_value(value: Any) -> Any:
    """A parsed JSON value without lone surrogates: JSON can spell them, UTF-8 cannot hold them."""
    return json.loads(json_line(value))


def _completion_of_stream(body: bytes) -> dict[str, Any] | None:
    """The completion in a stream of server-sent events; None if it is none. Raises CallError."""
    lines = body.decode("utf-8", "replace").splitlines()
    events = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    if not events or any(line and not line.startswith(("data:", "event:", "id:", "retry:", ":")) for line in lines):
        return None
    text, name, arguments, finish_reason = "", "", "", None
    usage: Any = None
    error: Any = None
    for event in events:
        if event == "[DONE]":
            continue
        try:
            chunk = _dict(storable_value(json.loads(event)))
        except (ValueError, RecursionError):
            raise CallError("the response is a stream that is not JSON") from None
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
        raise CallError("the response is a stream that was cut off")
    calls = [{"function": {"name": name, "arguments": arguments}}] if name else []
    message = {"content": text, "tool_calls": calls}
    choices = [{"message": message, "finish_reason": finish_reason}] if finish_reason is not None else []
    return {"choices": choices, "usage": usage, "error": error}


def _text(message: Any) -> tuple[str, str]:
    """The text of a ChatCompletionMessage, which can be the arguments of the verdict's tool call, and the problem."""
    if message.refusal:
        return "", f"the judge refused: {str(message.refusal)[:300]}"
    for call in message.tool_calls or ():
        function = getattr(call, "function", None)
        name, arguments = getattr(function, "name", ""), getattr(function, "arguments", None)
        if name == TOOL_NAME and isinstance(arguments, str):
            return arguments, ""
    content = _content(message.content)
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
