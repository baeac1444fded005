"""What a recorded call says of its conversation: hashes of its beginnings and of its whole, by which
`flywheel.store.placed_calls` knows which call it continues.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import copy
from hashlib import blake2b
from typing import Any, Final

from flywheel.records.chat import text_of
from flywheel.records.request_id import mark_of
from flywheel.records.states import SkipReason
from flywheel.records.task import storable
from flywheel.records.tool_calls import FINISH_FUNCTIONS
from flywheel.records.trace import CallOutline, ChatMessage, ModelAnswer, ModelCall, is_reminder
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.calls.parsing import parse

_REASONING: Final = ("thinking", "reasoning", "redacted_thinking")
_BYTES: Final = 16
_BAD_MESSAGES = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""Raised by messages that have no form that can be read."""


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

    def answered(self, answer: ModelAnswer) -> list[bytes]:
        """The hash with an answer behind the last message; the hash itself stays. A client sends a refusal back as a
        text, or under a key of its own beside an empty text."""
        contents = [answer.content, ""] if answer.is_refusal else [answer.content]
        message = {"role": "assistant", "tool_calls": list(answer.tool_calls)}
        return [copy(self).add({**message, "content": content}) for content in contents]


def hashes(call: ModelCall) -> tuple[list[tuple[int, bytes]], list[bytes]]:
    """Hashes of the beginnings of a call that end with an answer, each with its number of messages, and hashes of the
    whole with each answer to it."""
    hashed = ConversationHash(call.credential, call.user)
    beginnings = []
    for number, message in enumerate(call.messages, 1):
        value = hashed.add(message)
        if message.get("role") == "assistant":
            beginnings.append((number, value))
    return beginnings, list(dict.fromkeys(end for answer in call.answers for end in hashed.answered(answer)))


def tool_call_keys(call: ModelCall, messages: Iterable[ChatMessage]) -> list[bytes]:
    """Hashes of the ids of tool calls in some messages, for the credential and user of the call."""
    ids: dict[str, None] = {}
    for message in messages:
        calls = message.get("tool_calls")
        of_calls = [part.get("id") for part in calls if isinstance(part, dict)] if isinstance(calls, list) else []
        ids |= {
            call_id: None
            for call_id in (*of_calls, message.get("tool_call_id"))
            if isinstance(call_id, str) and call_id
        }
    return [_hash(b"id", [call.credential, call.user, call_id]) for call_id in ids]


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
        elif isinstance(part, dict) and isinstance(text := part.get("text", part.get("refusal")), str):
            texts.append(text)
        elif not (isinstance(part, dict) and part.get("type") in _REASONING):
            others.append(part)
    text = "\n".join(texts)
    return [text, *others] if others else text


def _tool_calls(calls: Any) -> list[Any]:
    functions = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            functions.append([function.get("name"), _arguments(function.get("arguments"))])
    return functions


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


def outline(call: ModelCall) -> CallOutline:
    """What the placement of a call needs of it. One whose messages have no form that can be read is a failed call."""
    try:
        said = _said_in(call)
    except _BAD_MESSAGES:
        said = None
    is_skipped = said is None or _kept_out(call)[0] is not None
    return CallOutline(
        request_id=call.request_id,
        conversation=_conversation_id(call.request_id),
        trace_id=id_of("reply", call.request_id, 16),
        model=storable(call.model),
        started_ns=call.started_ns,
        ended_ns=call.ended_ns,
        is_answered=is_skipped or not wanted_tools(call),
        is_skipped=is_skipped,
        **(said or {}),
    )


def _said_in(call: ModelCall) -> dict[str, Any]:
    """The fields of an outline that are made of messages. Raises one of _BAD_MESSAGES."""
    beginnings, ends = hashes(call)
    answers = [{"tool_calls": list(answer.tool_calls)} for answer in call.answers]
    return {
        "beginnings": tuple(beginnings),
        "ends": tuple(ends),
        "last_question": max(_questions(call), default=0),
        "tool_ids": tuple(tool_call_keys(call, call.messages)),
        "own_tool_ids": tuple(tool_call_keys(call, answers)),
    }


def _questions(call: ModelCall) -> list[int]:
    """The numbers of the messages in which a user asks something."""
    return [
        number
        for number, message in enumerate(call.messages, 1)
        if message.get("role") == "user" and not is_reminder(text_of(message))
    ]


def _conversation_id(request_id: str) -> str:
    mark = mark_of(request_id)
    return f"calls-{mark.random if mark is not None else request_id}"


def id_of(kind: str, request_id: str, size: int) -> str:
    """The id of the trace (`kind` "reply") or of a span ("agent", "call") that is made of a call, of `size` bytes."""
    return blake2b(f"{kind} {request_id}".encode(), digest_size=size).hexdigest()


def wanted_tools(call: ModelCall) -> list[str]:
    """The tools that a call asks for in place of an answer; finish functions are answers."""
    asked_for = [tool_call["function"]["name"] for tool_call in call.answers[0].tool_calls]
    return asked_for if FINISH_FUNCTIONS.isdisjoint(asked_for) else []


def extending(log: CallLog, request_ids: Iterable[str]) -> list[str]:
    """The request ids of later calls that go on from one of these: they resend all of its messages, unchanged,
    and its answer, for the same credential and user, and name no other conversation.

    Without the answer, two people who begin with the same words would be taken for one. A call that failed has none:
    then its messages must have an earlier answer.
    """
    found: dict[str, None] = {}
    for request_id, later_ids in log.resending(request_ids).items():
        calls = log.find([request_id, *later_ids])
        given = calls.pop(request_id)
        first = outline(parse(given))
        for later in calls.values():
            sender = (later.credential, later.user, later.conversation or given.conversation)
            beginnings = {value for _, value in outline(parse(later)).beginnings}
            goes_on = not beginnings.isdisjoint(first.ends) if first.ends else bool(first.beginnings)
            if goes_on and sender == (given.credential, given.user, given.conversation or later.conversation):
                found[later.request_id] = None
    return list(found)


def skipped_because(call: ModelCall) -> tuple[SkipReason | None, str]:
    """Why a call is no part of a conversation, with details for people."""
    skip, detail = _kept_out(call)
    if skip is None:
        try:
            _said_in(call)
        except _BAD_MESSAGES as error:
            return SkipReason.ERROR, f"its messages cannot be read: {error}"
    return skip, detail


def _kept_out(call: ModelCall) -> tuple[SkipReason | None, str]:
    """The same, as far as its messages are not looked at."""
    if call.is_interrupted:
        return SkipReason.INTERRUPTED, "the client disconnected before the end of the answer"
    if call.error or not call.answers:
        return SkipReason.ERROR, call.error or f"HTTP {call.status} without an answer"
    if "previous_response_id" in call.parameters and call.parameters["previous_response_id"] is not None:
        return (
            SkipReason.NO_QUERY,
            "the request names a response of the server in place of the conversation before it",
        )
    if not call.messages:
        return SkipReason.NO_QUERY, "the request has a prompt in place of messages"
    return None, ""
