"""The canonical form of messages, and hashes of conversations, by which a call is recognised as continuing another.

What clients write differently when they repeat an answer makes no difference: content as text or as parts, null or an
empty text, the layout of arguments, ids of tool calls, names, reasoning, space around an answer, and an answer in
several messages. Plain data, no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import copy
from hashlib import blake2b
from typing import Any, Final

from flywheel.records.model_call import ModelAnswer, ModelCall
from flywheel.records.trace import ChatMessage

_REASONING: Final = ("thinking", "reasoning", "redacted_thinking")
_BYTES: Final = 16


class ConversationHash:
    """A hash over the messages of a conversation, for one credential and user. Each message changes it."""

    def __init__(self, credential: str, user: str) -> None:
        self.value = _hash(b"", [credential, user])
        self._before = self.value
        self._answer: list[Any] | None = None
        """Texts and tool calls of the messages of the assistant since `_before`."""

    def add(self, message: ChatMessage) -> bytes:
        """The hash up to this message."""
        if message.get("role") == "assistant":
            texts, calls = self._answer or ([], [])
            said = text.strip() if isinstance(text := _content(message), str) else text
            self._answer = [texts + [said] * bool(said), calls + _tool_calls(message.get("tool_calls"))]
            self.value = _hash(self._before, ["assistant", *self._answer])
        else:
            role = message.get("role")
            name = message.get("name") if role == "user" else None
            self.value = self._before = _hash(self.value, [role, _content(message), name])
            self._answer = None
        return self.value

    def answered(self, answer: ModelAnswer) -> bytes:
        """The hash with an answer behind the last message; the hash itself stays."""
        message = {"role": "assistant", "content": answer.content, "tool_calls": list(answer.tool_calls)}
        return copy(self).add(message)


def hashes(call: ModelCall) -> tuple[list[tuple[int, bytes]], list[bytes]]:
    """Hashes of the beginnings of a call that end with an answer, each with its number of messages, and hashes of the
    whole with each answer to it."""
    hashed = ConversationHash(call.credential, call.user)
    beginnings = []
    for number, message in enumerate(call.messages, 1):
        value = hashed.add(message)
        if message.get("role") == "assistant":
            beginnings.append((number, value))
    return beginnings, list(dict.fromkeys(hashed.answered(answer) for answer in call.answers))


def tool_call_keys(call: ModelCall, messages: Iterable[ChatMessage]) -> list[bytes]:
    """Hashes of the ids of tool calls in some messages, for the credential and user of the call."""
    ids: dict[str, None] = {}
    for message in messages:
        calls = message.get("tool_calls")
        of_calls = [each.get("id") for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []
        ids |= {each: None for each in (*of_calls, message.get("tool_call_id")) if isinstance(each, str) and each}
    return [_hash(b"id", [call.credential, call.user, each]) for each in ids]


def _content(message: ChatMessage) -> Any:
    """The content as text; with other things than text in it, a list."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return [content]
    texts: list[str] = []
    others: list[Any] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(text := part.get("text"), str):
            texts.append(text)
        elif not (isinstance(part, dict) and part.get("type") in _REASONING):
            others.append(part)
    text = "\n".join(texts)
    return [text, *others] if others else text


def _tool_calls(calls: Any) -> list[Any]:
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            found.append([function.get("name"), _arguments(function.get("arguments"))])
    return found


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _hash(before: bytes, value: Any) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        text = "too deep"
    return blake2b(before + text.encode(), digest_size=_BYTES).digest()
