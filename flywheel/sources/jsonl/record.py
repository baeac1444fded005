"""Converts one line of another program's task file into a task: which key is the question, the history, the answer.

`QUERY`, `HISTORY` and `ANSWER` list the accepted keys; the first one with a value is used. They cover Flywheel's own
exports, AgentJet's tasks, Trinity's question and answer, TRL's prompt and completion, and OpenAI's messages. Other
keys only describe the task; values of an unexpected type are ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import xxhash
from msgspec.structs import asdict, replace

from flywheel.errors import ConfigError
from flywheel.records import chat, exclusion
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.ground_truth import KEY as GROUND_TRUTH
from flywheel.records.privacy import NOBODY, PrivateNames, named_in
from flywheel.records.states import SkipReason
from flywheel.records.task import (
    METADATA,
    Entry,
    TaskLine,
    class_of,
    entry_of,
    hashed,
    line_bytes,
    row_id,
    storable,
    task_line,
)
from flywheel.records.tool_calls import FINISH_FUNCTIONS, arguments_text, functions_by_name
from flywheel.records.trace import LATEST_NS, ChatMessage, Reply, ToolCall, ToolDefinition, get_path, reasoning_of
from flywheel.sources.jsonl import arrow_nulls, batch_lines, sage, sharegpt
from flywheel.sources.spans.recorded_calls import inexact_because
from flywheel.system.files import json_line, json_problem

_NAMES: Final = ("name", "tool_call_id")
_REASONING: Final = ("reasoning", "reasoning_content", "thinking")
_ARGUMENTS: Final = ("arguments", "input", "args", "parameters")
_KEYS: Final = frozenset({
    "role", "content", "parts", "refusal", "tool_calls", "function_call", "weight", *_NAMES, *_REASONING,
    # What a program says about a message, where it comes from, how it ended; what is spoken has a text as well.
    "id", "type", "object", "index", "metadata", "annotations", "audio", "timestamp", "created", "created_at",
    "model", "finish_reason", "stop_reason", "usage", "logprobs", "cache_control", "status", "is_error",
})  # fmt: skip
"""Keys of a message that are read, or that say nothing to train on."""
_CALL_KEYS: Final = frozenset({"id", "type", "index", "function", "custom", "name", *_ARGUMENTS})
_ROW_KEYS: Final = ("system", "system_prompt", "chat_template_kwargs", "images", "videos", "audios")
"""Keys by which other programs change what a row says; they are not read."""
_NOTHING: Final[tuple[Any, ...]] = (None, "", [], {})
_MANY_DIGITS: Final = re.compile(rb"[0-9]{19}")


class LineError(ValueError):
    """A line that cannot be a task. The text says why, and at which key."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What follows a question: the steps, and the answer of the last assistant message with the model's reasoning.

    It is unfinished if it ends in a tool call or in the result of one: then all is steps. `messages` are all of it
    where it is a list.
    """

    steps: tuple[ChatMessage, ...] = ()
    text: str = ""
    reasoning: str = ""
    is_refusal: bool = False
    is_unfinished: bool = False
    messages: tuple[ChatMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation split at its last user message: `history` before it, `answered` after it.

    `request` is the prompt that the agent received, if that is another text.
    """

    history: tuple[ChatMessage, ...] = ()
    query: str = ""
    images: tuple[str, ...] = ()
    answered: Answered = Answered()
    request: str = ""
    unread: tuple[str, ...] = ()
    """What of it was not read."""


def messages_of(value: Any, where: str) -> list[ChatMessage]:
    """A list of messages in the form of the OpenAI API, the content of each reduced to its text. `where` names the
    key. Raises LineError."""
    if not isinstance(value, list):
        raise LineError(f"`{where}` is {kind(value)}, not a list of messages")
    return [_message(message, f"{where}[{place}]") for place, message in enumerate(value)]


def dialogue_of(value: Any, where: str) -> Dialogue:
    """A list of messages as a dialogue. Raises LineError."""
    unread = tuple(
        f"a part of type {part} at {where}[{place}] was not read"
        for place, message in enumerate(value if isinstance(value, list) else ())
        for part in (chat.unread_in(message) if isinstance(message, dict) else ())
    )
    value, messages = _read(value, where)
    asked = _last(messages, "user")
    if asked is None:
        return Dialogue(history=tuple(messages), unread=unread)
    return Dialogue(
        history=tuple(messages[:asked]),
        query=messages[asked]["content"],
        images=tuple(dict.fromkeys(chat.images_of(value[asked]))),
        answered=_answered(value[asked + 1 :], messages[asked + 1 :]),
        unread=unread,
    )


def answered_by(value: Any, where: str) -> Answered:
    """What a list of messages answers to the question before it. Raises LineError."""
    return _answered(*_read(value, where))


def _answered(value: Sequence[Any], messages: Sequence[ChatMessage]) -> Answered:
    last, every = _last(messages, "assistant"), tuple(messages)
    if any(message["role"] == "tool" for message in messages[0 if last is None else last :]) or (
        last is not None and _calls_tools(messages[last])
    ):
        return Answered(every, is_unfinished=True, messages=every)
    if last is None:
        return Answered(every, messages=every)
    return Answered(
        every[:last],
        messages[last]["content"],
        reasoning_of(messages[last]),
        is_refusal=chat.is_refusal(value[last]),
        messages=every,
    )


def _calls_tools(message: ChatMessage) -> bool:
    """Whether a message calls tools. A finish function only hands in the answer."""
    return any(call["function"]["name"] not in FINISH_FUNCTIONS for call in message.get("tool_calls") or ())


def has_target(reply: Iterable[ChatMessage]) -> bool:
    """Whether there is a message of the model among these that can be trained on."""
    return any(_is_said(message) and message.get("weight") != 0 for message in reply)


def _is_said(message: ChatMessage) -> bool:
    """Whether it is a message of the model with any text, reasoning or call."""
    is_empty = not (message["content"].strip() or message.get("tool_calls") or reasoning_of(message))
    return message["role"] == "assistant" and not is_empty


def _last(messages: Sequence[ChatMessage], role: str) -> int | None:
    return next((place for place in reversed(range(len(messages))) if messages[place]["role"] == role), None)


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise LineError(f"`{where}` is {kind(value)}, not a message")
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise LineError(f"`{where}.role` is {kind(role)}, not a text")
    kept: ChatMessage = {}
    for key in _NAMES:
        if isinstance(name := value.get(key), bool | list | dict):
            raise LineError(f"`{where}.{key}` is {kind(name)}, not a text")
        if name is not None:
            kept[key] = str(name)
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise LineError(f"`{where}.tool_calls` is {kind(calls)}, not a list of calls")
    for place, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(_function(call).get("name"), str):
            raise LineError(f"`{where}.tool_calls[{place}]` names no function")
    if calls:
        kept["tool_calls"] = [_call(call) for call in calls]
    _check_content(value.get("content"), f"{where}.content")
    if role == "assistant" and (reasoning := chat.reasoning_in(value)):
        kept["reasoning_content"] = reasoning
    content = chat.chat_of(value)[0]["content"] if role == "tool" else chat.text_of(value)
    message: ChatMessage = {"role": role, "content": content, **kept}
    if role == "assistant" and (value.get("weight") == 0 or not _is_said(message)):
        message["weight"] = 0
    return message


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """Name and arguments of a tool call: its `function`, its `custom` tool or, in some templates, the call itself."""
    function = call.get("function", call.get("custom", call))
    return function if isinstance(function, dict) else {}


def _call(call: dict[str, Any]) -> ToolCall:
    function = _function(call)
    arguments = arguments_text(next((function[key] for key in _ARGUMENTS if function.get(key) is not None), None))
    call_id = "" if call.get("id") is None else str(call["id"])
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _check_content(content: Any, where: str) -> None:
    """Raises LineError for a content that is neither a text, null, nor a list of parts."""
    is_parts = isinstance(content, list) and all(isinstance(part, str | dict) for part in content)
    if not (content is None or isinstance(content, str) or is_parts):
        raise LineError(f"`{where}` is {kind(content)}, neither text nor a list of parts")


def _read(value: Any, where: str) -> tuple[list[Any], list[ChatMessage]]:
    """A list of messages as they stand, and as they are read. Those with tool calls or results among their parts are
    in the OpenAI form: a result stands behind the message with its call. Raises LineError."""
    messages = messages_of(value, where)
    if any(map(_has_tool_parts, value)):
        value = [
            {**each, "weight": said.get("weight")}
            for said in value
            for each in (chat.chat_of(said, with_reasoning=True) if _has_tool_parts(said) else [said])
        ]
        messages = messages_of(value, where)
    return value, messages


def _has_tool_parts(message: Any) -> bool:
    content = get_path(message, "parts") or get_path(message, "content")
    if not isinstance(content, list) or not isinstance(message.get("role"), str):
        return False
    return any(each.get("role") == "tool" or each.get("tool_calls") for each in chat.chat_of(message)) and not (
        message["role"] == "tool" or message.get("tool_calls")
    )


_KINDS: Final = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}


def kind(value: Any) -> str:
    """The JSON type of a value, for a message."""
    return "null" if value is None else _KINDS.get(type(value), "an object")


QUERY: Final = ("main_query", "question", "prompt", "messages", "init_messages")
"""Keys of the question. In a list of messages it is the last user message."""
HISTORY: Final = ("init_messages", "prompt", "messages")
"""Keys of the conversation before the question."""
ANSWER: Final = ("answer", "metadata.answer", "completion", "response", "reference", "prompt", "messages")
"""Keys of the answer. In a list of messages it is the last assistant message after the question."""

_PREFERENCE: Final = frozenset({"chosen", "rejected"})
_SCORES: Final = ("chosen_score", "rejected_score")

_READ: Final = frozenset({*QUERY, *HISTORY, *ANSWER, "task_id", "env_type", "tools", "metadata"})

NO_ID: Final = frozenset({"no_id"})
"""The `task_id` of every AgentJet task."""
MAX_ID: Final = 200
_NO_TIME: Final = datetime.fromtimestamp(0, UTC)
"""That of a row without one: the same data set is the same whenever it is read."""
MAX_DEPTH: Final = 254
"""Levels of nested JSON that orjson can write."""
_NUMBERS: Final = tuple(
    tuple(key.split("."))
    for key in dict.fromkeys((*QUERY, *ANSWER, "metadata.reference", "metadata.conversation_id", "metadata.user_id"))
)
"""Paths of values that may be a number and are read as text."""
_NUMBERS_OF_BATCH: Final = (
    ("custom_id",),
    *(("body", *path) for path in (("user",), ("metadata", "user_id"), ("metadata", "conversation_id"))),
)
"""The same in lines of a batch."""
_ROUNDED: Final = 2.0**63
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def entry_of_line(
    text: bytes, source: Path, now: datetime, models: TrainedModels = ANY_MODEL, private: PrivateNames = NOBODY
) -> Entry:
    """The task that a line holds, or why it is skipped. Raises LineError.

    The same line is the same task whenever and wherever it is read: `span_id` is the id of the row, and `key` the one
    that the file gives it, if it does. `now` is the time of a line without one. `models` says whose tasks are trained
    on, and `private` of whom only a count is kept.
    """
    line = _parsed(text)
    content = _content(line)
    reply, row = _reply(_exact(line, text), text, now)[:2]
    if private.cover(users=(reply.user,), conversations=(reply.conversation_id,), agents=(reply.agent,)):
        # Its time may be that of now, so its hash says nothing.
        return replace(entry_of(reply.without_content(), str(source)), key=reply.span_id, content=0)
    task = _task(line, reply, source)
    return replace(
        entry_of(reply, str(source), models),
        span_id=row,
        key=reply.span_id,
        line=b"" if reply.skip else line_bytes(task),
        content=content,
        # A line is complete: no other reply can supply what it lacks.
        linked=False,
        asked_alias="",
        follows=False,
        own_id="" if reply.span_id == row else reply.span_id,
    )


class BatchEntry(Entry, frozen=True, gc=False):
    """The entry of a response in a batch, or of a request that waits for one. `request` is the span of the request,
    empty if it is not known."""

    request: str = ""


def batch_line(text: bytes) -> TaskLine:
    """A line of a batch, parsed. Raises LineError."""
    line = _parsed(text)
    _restore_large_integers(line, text, _NUMBERS_OF_BATCH)
    if not batch_lines.id_of(line):
        raise LineError("it is neither a request nor a response of a batch, as the first line of the file is")
    return line


def entry_of_request(request: TaskLine, span: str, now: datetime, private: PrivateNames) -> BatchEntry:
    """A request that waits for its response: whom it names, but no text."""
    waiting = _waiting(span, now, "no line of the folder has the response to this request yet", request=span)
    try:
        reply = _reply_of_batch(request, None, now)[0]
    except LineError:
        return waiting  # its response is skipped with the reason
    if private.cover(users=(reply.user,), conversations=(reply.conversation_id,), agents=()):
        return waiting
    return replace(waiting, conversation_id=storable(reply.conversation_id), user=storable(reply.user))


def entry_without_request(span: str, now: datetime) -> BatchEntry:
    """A response that waits for its request."""
    return _waiting(span, now, "no line of the folder is the request with its custom_id")


def _waiting(span: str, now: datetime, detail: str, request: str = "") -> BatchEntry:
    content = xxhash.xxh3_64_intdigest(span.encode()) >> 1
    return BatchEntry(
        span, span, "", "", "", now.isoformat(), span, b"", content, detail=detail, waits=True, request=request
    )


def entry_of_response(
    request: TaskLine | None,
    response: TaskLine,
    spans: tuple[str, str],
    source: Path,
    now: datetime,
    models: TrainedModels = ANY_MODEL,
    private: PrivateNames = NOBODY,
    skip: tuple[SkipReason, str] | None = None,
) -> BatchEntry:
    """The task of a response and its `request`, None where it is not known, or why it is skipped.

    `spans` are those of the response and of the request, empty without one. `skip` is a reason that is known already.
    """
    span, asked = spans
    reply = Reply(span, asked or span, "", "", "", "", now, now)
    key = span
    if request is not None:
        try:
            reply, key = _reply_of_batch(request, response, now)
        except LineError as error:
            skip = skip or (SkipReason.ERROR, f"its messages cannot be read: {error}")
    if private.cover(users=(reply.user,), conversations=(reply.conversation_id,), agents=()):
        reply = reply.without_content()
    elif skip is not None:
        reply = replace(reply, skip=skip[0], skip_detail=skip[1])
    reply = replace(reply, span_id=span, trace_id=asked or span)
    entry = entry_of(reply, str(source), models)
    content = _content({"request": asked, "response": span, "skip": str(reply.skip)})
    line = b"" if reply.skip else line_bytes(task_line(reply, str(source), key))
    settled = replace(entry, key=key, line=line, content=content, linked=False, asked_alias="", follows=False)
    return BatchEntry(**asdict(settled), request=asked)


def _reply_of_batch(request: TaskLine, response: TaskLine | None, now: datetime) -> tuple[Reply, str]:
    """The reply of a request with its response, and its key as a task. Raises LineError."""
    try:
        call = batch_lines.call_of(request, response)
        reply, key = _reply(batch_lines.task_of(request, response, call), b"", now)[:2]
    except orjson.JSONEncodeError:
        raise LineError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    skip: tuple[SkipReason, str] | None = None
    if not call.messages:
        skip = SkipReason.NO_QUERY, call.error or "the request has no messages"
    elif call.parameters.get("previous_response_id") is not None:
        skip = SkipReason.NO_QUERY, "the request names a response of the server in place of the messages before it"
    elif response is not None and (call.error or not call.answers):
        skip = SkipReason.ERROR, call.error or "the response has no answer"
    if skip is not None:
        return replace(reply, skip=skip[0], skip_detail=skip[1]), key
    reasons = dict.fromkeys(filter(None, (reply.prompt_reason, inexact_because(call))))
    first = f"first of {len(call.answers)}" if len(call.answers) > 1 else ""
    detail = reply.skip_detail or first
    return replace(reply, prompt_reason="; ".join(reasons), skip_detail=detail), key


def names_in_line(text: bytes) -> tuple[str, str]:
    """The conversation and the user that a line names which is no task, as far as it can be read; else empty."""
    try:
        line = _parsed(text)
        if batch_lines.is_request(line):
            return batch_lines.names_in(line)
        metadata = get_path(line, "metadata") or {}
        return _text(metadata, "conversation_id", int), _text(metadata, "user_id", int)
    except (LineError, AttributeError):
        conversations, users = named_in(text.decode("utf-8", "replace"))
        # Metadata are the last key of the lines that programs write.
        return next(reversed(conversations), ""), next(reversed(users), "")


@dataclass(frozen=True, slots=True)
class DataRow:
    """A line of a data set.

    Attributes:
        number: That of the line, from 1.
        task: Its task, which needs no answer. That of a preference has the better reply.
        worse: The same task with the worse reply; None for a line that is no preference.
        difference: How much higher the better reply's score is; None without scores.
        reply: All messages behind the question, of a preference those of the better reply; `worse_reply` those of the
            worse one. The model's are trained on, but for those with a `weight` of 0. It may end in a call, or in the
            result of one.
        unread_keys: Names of keys with a value that were not read, of messages, calls and the line itself.
        structure: Its class (`training.task_weights`), of a preference that of the better reply.
    """

    number: int
    task: TaskLine
    worse: TaskLine | None = None
    difference: float | None = None
    reply: tuple[ChatMessage, ...] = ()
    worse_reply: tuple[ChatMessage, ...] = ()
    unread_keys: tuple[str, ...] = ()
    structure: str = ""


def rows_of(
    lines: Iterable[bytes], source: Path, attempted: str, *, needs_question: bool = True, called: str = "line"
) -> Iterator[DataRow]:
    """The lines of a data set: tasks, conversations (`messages`), and preferences (`chosen` and `rejected`, as texts
    or as lists of messages, with or without their prompt). Empty lines are left out.

    Raises ConfigError, which names the line (by what it is `called`), for a preference without both replies, and for
    one without a question. Unless it `needs_question`, such a line is its own question.
    """
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            yield _row(text, source, _NO_TIME, number, needs_question=needs_question)
        except LineError as error:
            why = f"{called} {number}: {error}"
            raise ConfigError(attempted, why, f"Each {called} is one task, a JSON object.") from None


def rows_of_file(path: Path, attempted: str) -> Iterator[DataRow]:
    """The lines of a file. Raises ConfigError as well if it cannot be read."""
    try:
        with path.open("rb") as lines:
            yield from rows_of(lines, path, attempted)
    except OSError as error:
        raise ConfigError(attempted, error.strerror or str(error), "Name a file of JSON lines.") from None


def entries_of(rows: Iterable[DataRow], attempted: str, called: str = "line") -> list[Entry]:
    """An entry for each line, in order. Lines with the same `task_id` are tasks of their own. Raises ConfigError,
    which names the line (by what it is `called`), also for one without an answer."""
    found: dict[str, Entry] = {}
    for row in rows:
        task, metadata = row.task, row.task["metadata"]
        if not task["answer"].strip():
            why = f"{called} {row.number}: it has no answer"
            raise ConfigError(attempted, why, f"Give it one in {ANSWER[0]!r}.")
        key = task["task_id"]
        while key in found:
            key = f"{key}-{len(found) + 1}"
        task["task_id"] = key
        found[key] = Entry(
            span_id=key,
            trace_id=metadata["trace_id"],
            conversation_id=metadata["conversation_id"],
            agent=metadata["agent_name"],
            adapter=metadata["adapter"],
            started_at=metadata["started_at"],
            key=key,
            line=line_bytes(task),
            content=row.number,
            model=metadata["model"],
        )
    return list(found.values())


def _row(text: bytes, source: Path, now: datetime, number: int, *, needs_question: bool) -> DataRow:
    line = _parsed(text)
    _content(line)
    line = _exact(line, text)
    if not _PREFERENCE.issubset(line):
        if not needs_question and _reply({**line}, text, now).reply.skip is SkipReason.NO_QUERY:
            # The same for equal lines of two files, whatever the order of their keys and the nulls of a table.
            given = sorted(json.loads(text.removeprefix(_BYTE_ORDER_MARK)).items())
            line["main_query"] = json_line({key: value for key, value in given if value is not None}).decode().strip()
        task, read = _asked(line, text, source, now)
        return DataRow(number, task, reply=read.messages, unread_keys=read.unread, structure=class_of(read.reply))
    both = []
    for key in ("chosen", "rejected"):
        task, read = _asked(_with_reply(line, key), text, source, now)
        if not has_target(read.messages):
            raise LineError(f"`{key}` holds no reply")
        both.append((task, read))
    (better, one), (worse, other) = both
    if better["prompt"] != worse["prompt"]:
        raise LineError("`chosen` and `rejected` reply to different messages")
    better_score, worse_score = (_score(line, key) for key in _SCORES)
    difference = None if better_score is None or worse_score is None else better_score - worse_score
    unread = dict.fromkeys((*(key for key in _REASONING if line.get(key)), *one.unread, *other.unread))
    structure = class_of(one.reply)
    return DataRow(number, better, worse, difference, one.messages, other.messages, tuple(unread), structure)


def _score(line: TaskLine, key: str) -> float | None:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise LineError(f"`{key}` is {kind(value)}, not a number")
    return value


def _asked(line: TaskLine, text: bytes, source: Path, now: datetime) -> tuple[TaskLine, _Line]:
    """The task of a line, which needs no answer. Raises LineError."""
    read = _reply(line, text, now)
    if read.reply.skip is SkipReason.NO_QUERY:
        raise LineError(read.reply.skip_detail)
    return _task(line, read.reply, source), read


def _with_reply(line: TaskLine, key: str) -> TaskLine:
    """A preference with the reply in `key` as its only one, in the keys of other lines. Raises LineError."""
    replaced = _PREFERENCE | {*_SCORES, *_REASONING, *ANSWER} - {*HISTORY}
    rest = {name: value for name, value in line.items() if name not in replaced}
    if isinstance(line.get("metadata"), dict):
        rest["metadata"] = {name: value for name, value in line["metadata"].items() if name != "answer"}
    if isinstance(line[key], str):
        return {**rest, "answer": line[key]}
    messages = messages_of(_chat(line[key]), key)
    if not messages or messages[0]["role"] in ("assistant", "tool"):
        return {**rest, "completion": line[key]}
    # The whole conversation, which repeats its prompt.
    return {**{name: value for name, value in rest.items() if name not in QUERY}, "messages": line[key]}


def _task(line: Mapping[str, Any], reply: Reply, source: Path) -> TaskLine:
    task = task_line(reply, str(source), reply.span_id)
    if isinstance(line.get("env_type"), str):
        task["env_type"] = line["env_type"]
    return task


class _Line(NamedTuple):
    """What a line says. `row` is the id of the row; see DataRow for the others."""

    reply: Reply
    row: str
    messages: tuple[ChatMessage, ...]
    unread: tuple[str, ...]


def _reply(line: TaskLine, text: bytes, now: datetime) -> _Line:
    """The reply that a parsed line describes. Raises LineError."""
    _restore_large_integers(line, text)
    unread = _translate(line)
    if isinstance(line.get("messages"), str):
        # Trinity-RFT's reader and Flywheel's export for it have the messages as JSON text.
        line["messages"] = _json(line, "messages", list) or line["messages"]
    metadata = {} if line.get("metadata") is None else line["metadata"]
    if not isinstance(metadata, dict):
        raise LineError(f"`metadata` is {kind(metadata)}, not an object")
    # Flywheel's own exports have the tools as JSON text.
    offered = {key: _tools(_list(line, key)) for key in ("tools", "functions")}
    tools = offered["tools"] or offered["functions"] or _tools(_list(metadata, "tools_json"))
    unread += [key for key, read in offered.items() if not read and line.get(key) not in (*_NOTHING, "null", "[]")]
    functions = functions_by_name(tools) if b"null" in text else None
    for key in (*HISTORY, "completion"):
        if isinstance(line.get(key), list):
            line[key] = _chat(line[key], functions)
            unread += (name for message in line[key] for name in _unread(message))
    parts = _parts(line, metadata)
    reasoning = _text(metadata, "answer_reasoning") or parts.answered.reasoning
    read_elsewhere = {"system", "system_prompt"} if any(each["role"] == "system" for each in parts.history) else ()
    unread += (key for key in _ROW_KEYS if line.get(key) not in _NOTHING and key not in read_elsewhere)
    unread += (key for key in _REASONING if line.get(key) not in (*_NOTHING, reasoning))
    skip, detail = _skip(parts)
    own = _own_id(line)
    history = tuple({key: message[key] for key in message if key != "weight"} for message in parts.history)
    images = parts.images or tuple(str(image) for image in _json(metadata, "images_json", list))
    row = (
        hashed({"line": xxhash.xxh3_128_hexdigest(text.strip())})
        if skip
        else row_id(own, parts.query, parts.answered.text, history, images, tools)
    )
    started = _time(metadata, "started_at") or _time(metadata, "ended_at") or now
    steps = parts.answered.steps or _trajectory(metadata)
    messages = parts.answered.messages
    if not messages and parts.answered.text.strip():
        messages = (*steps, _answer_of(parts.answered.text, reasoning))
    reply = Reply(
        span_id=own or row,
        # Several answers to one question belong to one split.
        trace_id=_text(metadata, "trace_id") or hashed([parts.query, parts.history]),
        conversation_id=_text(metadata, "conversation_id", int),
        user=_text(metadata, "user_id", int),
        agent=_text(metadata, "agent_name"),
        query=parts.query,
        answer=parts.answered.text,
        started_at=started,
        ended_at=_time(metadata, "ended_at") or started,
        request=parts.request,
        model=_text(metadata, "model"),
        adapter=_text(metadata, "adapter"),
        adapter_source=_adapter_source(metadata),
        turn=_count(metadata, "turn")
        if "turn" in metadata
        else sum(message["role"] == "user" for message in parts.history),
        history=history,
        trajectory=steps,
        tools=tools,
        images=images,
        structured=_json(metadata, "structured_json", dict) or None,
        errors=tuple(str(error) for error in _json(metadata, "errors_json", list)),
        reasoning=reasoning,
        is_refusal=parts.answered.is_refusal or metadata.get("refusal") is True,
        reference=_text(metadata, "reference", int, float),
        service=_text(metadata, "service"),
        input_tokens=_count(metadata, "input_tokens"),
        output_tokens=_count(metadata, "output_tokens"),
        prompt_tokens=_count(metadata, "prompt_tokens"),
        prompt_reason=_text(metadata, "prompt_reason")
        or (exclusion.OTHER_PROMPT if metadata.get("prompt_exact") is False else "; ".join(parts.unread)),
        extra=_extra(line, metadata),
        skip=skip,
        skip_detail=detail,
    )
    return _Line(reply, row, messages, tuple(dict.fromkeys(unread)))


def _list(holder: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key, which may be JSON text; else an empty one."""
    value = holder.get(key)
    return value if isinstance(value, list) else list(_json(holder, key, list))


def _chat(messages: Any, functions: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """A list of messages, with `functions` without the nulls of tables. The calls and results of OpenAI's older
    interface, and Gemini's role of the model, are those of OpenAI's chats. Any other value stays as it is."""
    if not isinstance(messages, list):
        return messages
    found, call_id = [], ""
    for place, each in enumerate(messages):
        message = each if functions is None else arrow_nulls.of_message(each, functions)
        if isinstance(message, dict):
            if isinstance(called := message.get("function_call"), dict) and not message.get("tool_calls"):
                call_id = f"call-{place}"
                message = {**message, "tool_calls": [{"id": call_id, "type": "function", "function": called}]}
            if message.get("role") == "function":
                message = {"tool_call_id": call_id, **message, "role": "tool"}
            elif message.get("role") == "model":
                message = {**message, "role": "assistant"}
        found.append(message)
    return found


def _unread(message: Any) -> Iterator[str]:
    """The names of what a message says that is not read."""
    if not isinstance(message, dict):
        return
    yield from (key for key in message if key not in _KEYS and message[key] not in _NOTHING)
    yield from (key for key in _REASONING if not isinstance(message.get(key, ""), str))
    if message.get("weight", 1) not in (0, 1):
        yield "weight"
    if str(message.get("role")) not in chat.ROLES:
        yield f"role.{message.get('role')}"
    if not isinstance(message.get("content"), str):
        yield from ("content.image",) if chat.has_media(message) else ()
        yield from (f"content.{kind}" for kind in chat.unread_in(message))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        said = call if isinstance(call, dict) else {}
        for each in (said, _function(said)):
            yield from (f"tool_calls.{key}" for key in each if key not in _CALL_KEYS and each[key] not in _NOTHING)


def _exact(line: TaskLine, text: bytes) -> TaskLine:
    """The line with the integers in its lists to the digit: orjson rounds those beyond 64 bits."""
    if _MANY_DIGITS.search(text) is None:
        return line
    with contextlib.suppress(ValueError):  # More digits than Python reads.
        exact = json.loads(json_line(json.loads(text.removeprefix(_BYTE_ORDER_MARK))))
        line |= {key: value for key, value in exact.items() if isinstance(line.get(key), list)}
    return line


def _translate(line: TaskLine) -> list[str]:
    """Bring the keys of ShareGPT, SAGE and verl into those that are read. Returns those that are not read. Raises
    LineError."""
    if batch_lines.id_of(line):
        raise LineError(
            "it is a line of a batch (`custom_id`), and the file begins with another one: divide the file"
        )
    if line.get("messages") is None and sharegpt.is_conversation(line.get("conversations")):
        line["messages"] = sharegpt.messages(line.pop("conversations"), line.get("system"))
    truth, metadata = get_path(line, "reward_model", GROUND_TRUTH), line.get("metadata") or {}
    if truth is not None and isinstance(metadata, dict) and GROUND_TRUTH not in metadata:
        is_plain = isinstance(truth, str | int | float) and not isinstance(truth, bool)
        answer = truth if is_plain else json.dumps(truth, ensure_ascii=False)
        line["metadata"] = {**metadata, GROUND_TRUTH: {"answer": answer}}
    is_of_sage = not any(line.get(key) for key in QUERY) and sage.translate(line)
    return ["split"] if is_of_sage and line.get("split") else []


def _extra(line: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own keys. A line that Flywheel wrote has them as JSON text."""
    earlier = _json(metadata, "extra_json", dict)
    of_earlier = earlier.get("metadata")
    own = {
        **(of_earlier if isinstance(of_earlier, dict) else {}),
        **{name: value for name, value in metadata.items() if name not in METADATA},
        # Only AgentJet's traced tasks have it without a trace (see is_traced).
        **({"qa_hash": metadata["qa_hash"]} if "qa_hash" in metadata and not metadata.get("trace_id") else {}),
    }
    extra = {
        **{name: value for name, value in earlier.items() if name not in _READ},
        **{name: value for name, value in line.items() if name not in _READ},
    }
    return {**extra, "metadata": own} if own else extra


def _parsed(text: bytes) -> TaskLine:
    text = text.removeprefix(_BYTE_ORDER_MARK)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # Python's json writes a lone surrogate (half an emoji) as it is; it becomes `?`.
        try:
            value = orjson.loads(json_line(json.loads(text.decode(), parse_constant=_refuse_constant)))
        except (ValueError, RecursionError):
            raise LineError(f"it is {json_problem(error)}") from None
    if not isinstance(value, dict):
        raise LineError(f"it is {kind(value)}, not an object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _restore_large_integers(line: TaskLine, text: bytes, paths: Sequence[tuple[str, ...]] = _NUMBERS) -> None:
    """Replace integers beyond 64 bits, which orjson rounds, by their digits where a text is expected."""
    rounded = [path for path in paths if isinstance(value := get_path(line, *path), float) and abs(value) >= _ROUNDED]
    if rounded:
        exact = json.loads(text.removeprefix(_BYTE_ORDER_MARK).decode(errors="replace"), parse_int=str)
        for *above, key in rounded:
            if isinstance(digits := get_path(exact, *above, key), str):
                get_path(line, *above)[key] = digits


def _content(line: Mapping[str, Any]) -> int:
    """A hash of the line. The task itself may contain the time of reading."""
    try:
        return xxhash.xxh3_64_intdigest(orjson.dumps(line, option=orjson.OPT_SORT_KEYS)) >> 1
    except orjson.JSONEncodeError:
        raise LineError(f"it is nested more than {MAX_DEPTH} levels deep") from None


def _parts(line: Mapping[str, Any], metadata: Mapping[str, Any]) -> Dialogue:
    """The dialogue of a line, collected from all its keys."""
    dialogues = {
        key: dialogue_of(value, key)
        for key in HISTORY
        if (value := line.get(key)) is not None and not (key == "prompt" and isinstance(value, str))
    }
    asked = next((key for key in QUERY if _asks(line, key, dialogues)), "")
    answered = _answer(line, metadata, dialogues)
    if asked in dialogues:
        own = dialogues[asked]
        return dataclasses.replace(own, answered=_behind(own.answered, answered, dialogues))
    query = _plain(line, asked) if asked else ""
    if "init_messages" in dialogues:
        own = _beside_init_messages(line, query, dialogues)
    else:
        own = dialogues.get("prompt") or dialogues.get("messages") or Dialogue()
    request = own.query if own.query != query else ""
    answered = _behind(own.answered, answered, dialogues)
    return Dialogue(own.history, query, own.images, answered, request, own.unread)


def _behind(own: Answered, answered: Answered, dialogues: Mapping[str, Dialogue]) -> Answered:
    """The answer of a line, behind what its messages have after the question."""
    messages, prompt = answered.messages, dialogues.get("prompt", Dialogue()).answered
    if not messages and answered.text.strip() == own.text.strip() != "":
        return own
    if not messages and answered.text.strip() and own is prompt and own.steps:
        messages = (_answer_of(answered.text, answered.reasoning),)
    elif any(messages is each.answered.messages for each in dialogues.values()):
        own = dataclasses.replace(own, messages=())
    if messages:
        # What a prompt has behind the question is not trained on.
        messages = (*({**m, "weight": 0} if m["role"] == "assistant" else m for m in own.messages), *messages)
    return dataclasses.replace(answered, steps=answered.steps or own.steps, messages=messages)


def _answer_of(text: str, reasoning: str) -> ChatMessage:
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {})}


def _asks(line: Mapping[str, Any], key: str, dialogues: Mapping[str, Dialogue]) -> bool:
    if key in dialogues:
        return bool(dialogues[key].query.strip() or dialogues[key].images)
    return bool(_plain(line, key).strip())


def _beside_init_messages(line: Mapping[str, Any], query: str, dialogues: Mapping[str, Dialogue]) -> Dialogue:
    """The history in `init_messages` and `prompt` when the question has a key of its own."""
    before = tuple(messages_of(line["init_messages"], "init_messages"))
    if before and before[-1]["role"] == "user" and before[-1]["content"] == query:
        # AgentJet's tasks may repeat the question there.
        return dialogues["init_messages"]
    prompt = dialogues.get("prompt", Dialogue())
    asked = prompt.query if prompt.history == before else ""
    return Dialogue(before, asked, prompt.images, unread=dialogues["init_messages"].unread)


def _answer(line: Mapping[str, Any], metadata: Mapping[str, Any], dialogues: Mapping[str, Dialogue]) -> Answered:
    """The answer, with the messages before it if they are listed with it."""
    is_unfinished, rest = False, Answered()
    for key in ANSWER:
        found = Answered()
        if key in dialogues:
            found = dataclasses.replace(dialogues[key].answered, steps=())
        elif key == "completion" and isinstance(line.get(key), list):
            found = answered_by(line[key], key)
        elif key not in HISTORY:
            holder = metadata if key.startswith("metadata.") else line
            # One word is a setting of another program, such as `on`.
            reasoning = thought if holder is line and " " in (thought := reasoning_of(line).strip()) else ""
            found = Answered(text=_plain(holder, key.removeprefix("metadata."), key), reasoning=reasoning)
        is_said = any(map(_is_said, found.messages))
        if found.text.strip() or (is_said and key == "completion"):
            return found
        is_unfinished |= found.is_unfinished
        if is_said and not rest.messages:
            rest = found
    return dataclasses.replace(rest, is_unfinished=is_unfinished)


def _plain(holder: Mapping[str, Any], key: str, where: str = "") -> str:
    """A text, or a number as text; empty for null. Raises LineError for any other value."""
    value = holder.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LineError(f"`{where or key}` is {kind(value)}, not a text")
    return str(value)


def _skip(parts: Dialogue) -> tuple[SkipReason | None, str]:
    if not parts.query.strip() and not parts.images:
        return SkipReason.NO_QUERY, f"none of {', '.join(QUERY)} holds a question"
    if parts.answered.is_unfinished:
        return SkipReason.UNFINISHED, "it ends in a tool call, or in the result of one, without an answer"
    if not parts.answered.text.strip():
        return SkipReason.NO_ANSWER, f"none of {', '.join(ANSWER)} holds an answer"
    return None, ""


def _own_id(line: Mapping[str, Any]) -> str:
    """The line's `task_id`; empty if it cannot tell tasks apart."""
    own = line.get("task_id")
    usable = isinstance(own, str) and own.strip() and own not in NO_ID and len(own) <= MAX_ID and own.isprintable()
    return str(own) if usable else ""


def _text(metadata: Mapping[str, Any], key: str, *also: type) -> str:
    """A text, or a value of the types `also` as text; empty for anything else."""
    value = metadata.get(key)
    return str(value) if isinstance(value, (str, *also)) and not isinstance(value, bool) else ""


def _count(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _json(metadata: Mapping[str, Any], key: str, wanted: type) -> Any:
    """The value of a JSON text, if it has the type `wanted`; else an empty value of that type."""
    text = _text(metadata, key)
    try:
        value = orjson.loads(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return wanted()
    return value if isinstance(value, wanted) else wanted()


def _trajectory(metadata: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """The messages in `trajectory_json`; values that are no message are left out."""
    steps = []
    for part in _json(metadata, "trajectory_json", list):
        with contextlib.suppress(LineError):
            (message,) = messages_of([part], "trajectory_json")
            if isinstance(part.get("content", ""), str):
                message = {**part, **{key: value for key, value in message.items() if key != "content"}}
            steps.append(message)
    return tuple(steps)


def _tools(offered: list[Any]) -> tuple[ToolDefinition, ...]:
    """The tool definitions in a list, which may be JSON texts, in the form of the OpenAI API; other values are left
    out."""
    read = (_json({"": tool}, "", dict) if isinstance(tool, str) else tool for tool in offered)
    kept = (arrow_nulls.of_tool(tool) for tool in read if isinstance(tool, dict))
    return tuple(
        chat.tool_of(tool) if "name" in tool and "function" not in tool else tool
        for tool in kept
        if tool and isinstance(tool.get("function", tool), dict)
    )


def _time(metadata: Mapping[str, Any], key: str) -> datetime | None:
    """None for what is no time, or one that no reply can have."""
    try:
        found = datetime.fromisoformat(_text(metadata, key))
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return found if 0 <= found.timestamp() < LATEST_NS / 1e9 else None


def _adapter_source(metadata: Mapping[str, Any]) -> str:
    """How it is known which adapter answered; `model` for a line that names an adapter without saying so."""
    source = _text(metadata, "adapter_source")
    return source if source in ("id", "model", "history") else "model" if _text(metadata, "adapter") else ""
