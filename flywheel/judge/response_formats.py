"""Response formats of a judge call (JSON schema, tool call, text) and what an endpoint does not support.

A rejected format or parameter is recorded in `EndpointCapabilities` and left out of later requests. An entry expires
after a month, because servers change.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

from flywheel.trace import ChatMessage

MONTH_SECONDS: Final = 30 * 86_400.0
TOOL_NAME: Final = "verdict"
"""The function that a judge calls to give its verdict, where the format is a tool call."""


class ResponseFormat(StrEnum):
    """From the strictest to the loosest."""

    SCHEMA = "schema"
    TOOL = "tool"
    TEXT = "text"


SEED: Final = "seed"
TEMPERATURE: Final = "temperature"
"""Reasoning models reject every temperature but their default."""
MAX_TOKENS: Final = "max_tokens"
"""Newer OpenAI models require `max_completion_tokens` instead."""
SYSTEM: Final = "system"
"""The role: chat templates of some open-weight models have none."""
PARAMETERS: Final = (SEED, TEMPERATURE, MAX_TOKENS, SYSTEM)
LABELS: Final = {
    ResponseFormat.SCHEMA.value: "JSON schema",
    ResponseFormat.TOOL.value: "tool call",
    SEED: "seed",
    TEMPERATURE: "temperature",
    MAX_TOKENS: "max_tokens",
    SYSTEM: "system message",
}

_UNKNOWN: Final = r"(?:un(?:support|recogni|known|expect)|n['o]t (?:support|permit|allow|accept)|extra|deprecated)"
_PARAMETER: Final = r"{unknown}.*\b{name}\b|\b{name}\b.*{unknown}{more}"
"""A rejection of the parameter itself, and not of its value."""
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


def is_rejection_of(message: str, part: str, status: int = 400) -> bool:
    """Whether an error message rejects this part of a request: a response format or a parameter."""
    patterns = _REJECTIONS_BY_FAILURE if status >= 500 else _REJECTIONS
    return part in patterns and re.search(patterns[part], message, re.I | re.S) is not None


def request_parts(request: Mapping[str, Any]) -> list[str]:
    """The parameters and response formats of a request, as far as an endpoint may not support them."""
    parts: list[str] = [parameter for parameter in (SEED, TEMPERATURE, MAX_TOKENS) if parameter in request]
    if any(message["role"] == SYSTEM for message in request["messages"]):
        parts.append(SYSTEM)
    formats = {"response_format": ResponseFormat.SCHEMA, "tools": ResponseFormat.TOOL}
    return parts + [form for name, form in formats.items() if name in request]


class EndpointCapabilities:
    """What endpoints do not support, by endpoint with model. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._unsupported: dict[str, dict[str, float]] = {}
        self._now = now
        self._lock = threading.Lock()

    def lacks(self, endpoint: str, part: str) -> bool:
        # Without the lock: each call asks several times, and a mapping is only ever replaced or added to.
        since = self._unsupported.get(endpoint, {}).get(part)
        return since is not None and since + MONTH_SECONDS > self._now()

    def formats(self, endpoint: str) -> list[ResponseFormat]:
        """The supported formats, the strictest first. Text always is."""
        return [form for form in ResponseFormat if form is ResponseFormat.TEXT or not self.lacks(endpoint, form)]

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

    def add(self, endpoint: str, part: str) -> bool:
        """Record that the endpoint does not support this part; returns whether it was not known."""
        if self.lacks(endpoint, part):
            return False
        with self._lock:
            self._unsupported.setdefault(endpoint, {})[part] = self._now()
            return True

    def snapshot(self) -> str:
        """All entries, as JSON to be stored."""
        with self._lock:
            return json.dumps(self._unsupported, sort_keys=True)

    def restore(self, snapshot: str) -> None:
        """Add stored entries. An unreadable snapshot is ignored."""
        try:
            stored = json.loads(snapshot or "{}")
            entries = {str(at): {str(k): float(since) for k, since in each.items()} for at, each in stored.items()}
        except (ValueError, TypeError, AttributeError):
            return
        with self._lock:
            known = self._unsupported
            self._unsupported = {
                at: {**entries.get(at, {}), **known.get(at, {})} for at in dict.fromkeys([*entries, *known])
            }
