"""What a line of another program's task file means: which key is the question, the answer, the history.

`QUERY`, `HISTORY` and `ANSWER` are the whole of it; the first key that says something is taken. They cover what
Flywheel itself exports, AgentJet's tasks, Trinity's question and answer, TRL's prompt and completion, and OpenAI's
messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson
import xxhash
from msgspec.structs import replace

from flywheel.batch import Entry, entry_of, line_bytes
from flywheel.lines.messages import Dialogue, LineError, answered, dialogue_of, kind, messages_of
from flywheel.states import SkipReason, Split
from flywheel.task import Task
from flywheel.trace import ChatMessage, Reply

QUERY: Final = ("main_query", "question", "prompt", "messages", "init_messages")
"""Where the question is. In a list of messages it is the last one of the user."""
HISTORY: Final = ("init_messages", "prompt", "messages")
"""Where the conversation before the question is."""
ANSWER: Final = ("answer", "metadata.answer", "completion", "response", "reference", "prompt", "messages")
"""Where the answer is. In a list of messages it is the last one of the assistant, behind the question."""

NO_ID: Final = frozenset({"no_id"})
"""What AgentJet calls every task."""
MAX_ID: Final = 200


@dataclass(frozen=True, slots=True)
class _Asked:
    """The dialogue of a line, put together from all its keys; `request` is what the agent itself was handed."""

    query: str
    answer: str
    history: tuple[ChatMessage, ...]
    request: str
    images: tuple[str, ...]
    trajectory: tuple[ChatMessage, ...]


def entry_of_line(text: bytes, source: Path, now: datetime) -> Entry:
    """The task that a line holds, or why it is none. Raises LineError.

    The same line is the same task whenever and wherever it is read; `now` is the time of one that has none.
    """
    line = _parsed(text)
    metadata = _object(line, "metadata")
    asked = _asked(line, metadata)
    skip, detail = _skip(asked)
    own = _own_id(line)
    key = own or _id({"line": xxhash.xxh3_128_hexdigest(text.strip())} if skip else _identifying(asked))
    conversation = _conversation(metadata)
    # Several answers to one question are on one side of the split.
    trace = _text_of(metadata, "trace_id") or _id([asked.query, asked.history])
    started, ended = _times(metadata, now)
    reply = Reply(
        span_id=key,
        trace_id=trace,
        conversation_id=conversation,
        agent=_text_of(metadata, "agent_name"),
        query=asked.query,
        answer=asked.answer,
        started_at=started,
        ended_at=ended,
        request=asked.request,
        model=_text_of(metadata, "model"),
        adapter=_text_of(metadata, "adapter"),
        turn=_turn(metadata, asked),
        history=asked.history,
        trajectory=asked.trajectory or _listed(metadata, "trajectory_json"),
        tools=_tools(line) or _listed(metadata, "tools_json"),
        images=asked.images or tuple(str(image) for image in _json_in(metadata, "images_json", list)),
        structured=_json_in(metadata, "structured_json", dict) or None,
        errors=tuple(str(error) for error in _json_in(metadata, "errors_json", list)),
        reference=_reference(metadata),
        service=_text_of(metadata, "service"),
        input_tokens=_count(metadata, "input_tokens"),
        output_tokens=_count(metadata, "output_tokens"),
        skip=skip,
        skip_detail=detail,
    )
    task: dict[str, Any] = Task(key, Split.TRAIN, str(source), reply).line()
    if isinstance(line.get("env_type"), str):
        task["env_type"] = line["env_type"]
    return replace(
        entry_of(reply, str(source)),
        key=key,
        line=b"" if skip else line_bytes(task),
        # Of the line and not of its task, which may hold the time of reading.
        content=xxhash.xxh3_64_intdigest(orjson.dumps(line, option=orjson.OPT_SORT_KEYS)) >> 1,
        # A line is whole: what it does not say came before it is not looked for.
        linked=False,
    )


def _parsed(text: bytes) -> dict[str, Any]:
    text = text.removeprefix(b"\xef\xbb\xbf")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        value = _with_lone_surrogates(text, error)
    if not isinstance(value, dict):
        raise LineError(f"it is {kind(value)}, not an object")
    return value


def _with_lone_surrogates(text: bytes, error: orjson.JSONDecodeError) -> Any:
    """Half an emoji, which Python's json writes as it is, becomes `?`; whatever else is wrong stays wrong."""
    try:
        value = json.loads(text.decode(), parse_constant=_no_constant)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise LineError(f"it is not JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _asked(line: Mapping[str, Any], metadata: Mapping[str, Any]) -> _Asked:
    told = {key: dialogue_of(line[key], key) for key in HISTORY if _has_messages(line, key)}
    at = next((key for key in QUERY if _asks(line, key, told)), "")
    answer, steps = _answer(line, metadata, told)
    if at in told:
        own = told[at]
        return _Asked(own.query, answer, own.history, "", own.images, steps or own.trajectory)
    query = _plain(line, at) if at else ""
    if "init_messages" in told:
        own = _beside_init_messages(line, query, told)
    else:
        own = told.get("prompt") or told.get("messages") or Dialogue()
    request = own.query if own.query != query else ""
    return _Asked(query, answer, own.history, request, own.images, steps or own.trajectory)


def _has_messages(line: Mapping[str, Any], key: str) -> bool:
    value = line.get(key)
    return value is not None and not (key == "prompt" and isinstance(value, str))


def _asks(line: Mapping[str, Any], key: str, told: Mapping[str, Dialogue]) -> bool:
    if key in told:
        return bool(told[key].query.strip() or told[key].images)
    return bool(_plain(line, key).strip())


def _beside_init_messages(line: Mapping[str, Any], query: str, told: Mapping[str, Dialogue]) -> Dialogue:
    """What `init_messages` and `prompt` say around a question that is a text of its own."""
    before = tuple(messages_of(line["init_messages"], "init_messages"))
    if before and before[-1]["role"] == "user" and before[-1]["content"] == query:
        # AgentJet's tasks may repeat the question there.
        return told["init_messages"]
    handed = told.get("prompt", Dialogue())
    return Dialogue(before, handed.query if handed.history == before else "", handed.images)


def _answer(
    line: Mapping[str, Any], metadata: Mapping[str, Any], told: Mapping[str, Dialogue]
) -> tuple[str, tuple[ChatMessage, ...]]:
    for key in ANSWER:
        if key in told:
            if told[key].answer.strip():
                return told[key].answer, ()
        elif key == "completion" and isinstance(line.get(key), list):
            steps, answer = answered(messages_of(line[key], key))
            if answer.strip():
                return answer, steps
        elif key not in HISTORY:
            holder = metadata if key.startswith("metadata.") else line
            if (answer := _plain(holder, key.removeprefix("metadata."), key)).strip():
                return answer, ()
    return "", ()


def _plain(holder: Mapping[str, Any], key: str, where: str = "") -> str:
    """A text, or a number as text. Raises LineError for anything else but null."""
    value = holder.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LineError(f"`{where or key}` is {kind(value)}, not a text")
    return str(value)


def _skip(asked: _Asked) -> tuple[SkipReason | None, str]:
    if not asked.query.strip() and not asked.images:
        return SkipReason.NO_QUERY, f"none of {', '.join(QUERY)} holds a question"
    if not asked.answer.strip():
        return SkipReason.NO_ANSWER, f"none of {', '.join(ANSWER)} holds an answer"
    return None, ""


def _own_id(line: Mapping[str, Any]) -> str:
    """The line's own id if it can tell tasks apart."""
    own = line.get("task_id")
    usable = isinstance(own, str) and own.strip() and own not in NO_ID and len(own) <= MAX_ID and own.isprintable()
    return str(own) if usable else ""


def _identifying(asked: _Asked) -> list[Any]:
    return [asked.query, asked.answer, asked.history, asked.images]


def _id(value: Any) -> str:
    return "t-" + hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:20]


def _object(line: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = line.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise LineError(f"`{key}` is {kind(value)}, not an object")
    return value


# What follows only describes a task. Another program may mean something else by these keys: what has another type is
# left out.


def _text_of(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def _reference(metadata: Mapping[str, Any]) -> str:
    """The right answer; task files of maths have it as a number too."""
    value = metadata.get("reference")
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _conversation(metadata: Mapping[str, Any]) -> str:
    value = metadata.get("conversation_id")
    return (
        str(value)
        if isinstance(value, int) and not isinstance(value, bool)
        else _text_of(metadata, "conversation_id")
    )


def _count(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _turn(metadata: Mapping[str, Any], asked: _Asked) -> int:
    if "turn" in metadata:
        return _count(metadata, "turn")
    return sum(message["role"] == "user" for message in asked.history)


def _json_in(metadata: Mapping[str, Any], key: str, wanted: type) -> Any:
    """What a JSON text holds, if it is of the type `wanted`; else an empty one."""
    try:
        value = orjson.loads(_text_of(metadata, key))
    except orjson.JSONDecodeError:
        return wanted()
    return value if isinstance(value, wanted) else wanted()


def _listed(metadata: Mapping[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    return tuple(part for part in _json_in(metadata, key, list) if isinstance(part, dict))


def _tools(line: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    value = line.get("tools")
    return tuple(part for part in value if isinstance(part, dict)) if isinstance(value, list) else ()


def _times(metadata: Mapping[str, Any], now: datetime) -> tuple[datetime, datetime]:
    started = _time(metadata, "started_at") or now
    return started, _time(metadata, "ended_at") or started


def _time(metadata: Mapping[str, Any], key: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(_text_of(metadata, key))
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
