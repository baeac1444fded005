"""Converts one line of another program's task file into a task: which key is the question, the history, the answer.

`QUERY`, `HISTORY` and `ANSWER` list the accepted keys; the first one with a value is used. They cover Flywheel's own
exports, AgentJet's tasks, Trinity's question and answer, TRL's prompt and completion, and OpenAI's messages. Other
keys only describe the task; values of an unexpected type are ignored.
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
from msgspec.structs import asdict, replace

from flywheel import exclusion
from flywheel.batch import Entry, entry_of, line_bytes
from flywheel.exclusion import ANY_MODEL, TrainedModels
from flywheel.files import json_line
from flywheel.sources.jsonl.messages import (
    Dialogue,
    LineError,
    answered,
    dialogue_of,
    in_chat_form,
    kind,
    messages_of,
)
from flywheel.states import SkipReason, Split
from flywheel.task import Task
from flywheel.trace import ChatMessage, Reply, get_path

MAX_DEPTH: Final = 254
"""Levels of JSON inside each other, as deep as it can be written again."""


def text_of(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def reference_of(metadata: Mapping[str, Any]) -> str:
    """The right answer; task files of maths have it as a number too."""
    value = metadata.get("reference")
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def id_of(metadata: Mapping[str, Any], key: str) -> str:
    """An id, which many number."""
    value = metadata.get(key)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else text_of(metadata, key)


def count_of(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def json_in(metadata: Mapping[str, Any], key: str, wanted: type) -> Any:
    """What a JSON text holds, if it is of the type `wanted`; else an empty one."""
    text = text_of(metadata, key)
    try:
        value = orjson.loads(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return wanted()
    return value if isinstance(value, wanted) else wanted()


def steps_of(metadata: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """The messages of the trajectory, without what is none."""
    return tuple(step for part in json_in(metadata, "trajectory_json", list) for step in _step(part))


def _step(part: Any) -> list[ChatMessage]:
    try:
        read = messages_of([part], "trajectory_json")[0]
    except LineError:
        return []
    return [in_chat_form(part if isinstance(part.get("content", ""), str) else read)]


def tools_of(line: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that were offered, without what describes none."""
    value = line.get("tools")
    # Flywheel's own exports have them as JSON text.
    offered = _tools(value if isinstance(value, list) else json_in(line, "tools", list))
    return offered or _tools(json_in(metadata, "tools_json", list))


def _tools(offered: list[Any]) -> tuple[dict[str, Any], ...]:
    return tuple(tool for tool in offered if isinstance(tool, dict) and isinstance(tool.get("function", tool), dict))


def times_of(metadata: Mapping[str, Any], now: datetime) -> tuple[datetime, datetime]:
    started = _time(metadata, "started_at") or now
    return started, _time(metadata, "ended_at") or started


def _time(metadata: Mapping[str, Any], key: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text_of(metadata, key))
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


QUERY: Final = ("main_query", "question", "prompt", "messages", "init_messages")
"""Where the question is. In a list of messages it is the last one of the user."""
HISTORY: Final = ("init_messages", "prompt", "messages")
"""Where the conversation before the question is."""
ANSWER: Final = ("answer", "metadata.answer", "completion", "response", "reference", "prompt", "messages")
"""Where the answer is. In a list of messages it is the last one of the assistant, behind the question."""

_NUMBERS: Final = tuple(
    tuple(key.split("."))
    for key in dict.fromkeys((*QUERY, *ANSWER, "metadata.reference", "metadata.conversation_id"))
)
"""What may be a number and is read as text."""
_ROUNDED: Final = 2.0**63
_MARK: Final = b"\xef\xbb\xbf"
"""The byte order mark that some programs begin a file with."""

NO_ID: Final = frozenset({"no_id"})
"""What AgentJet calls every task."""
MAX_ID: Final = 200


class JsonlEntry(Entry, frozen=True, gc=False):
    """A line's entry, by the line's own id; `otherwise` is the key that it has where its id tells nothing apart."""

    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The dialogue of a line, put together from all its keys; `request` is what the agent itself was handed."""

    query: str
    answer: str
    history: tuple[ChatMessage, ...]
    request: str
    images: tuple[str, ...]
    trajectory: tuple[ChatMessage, ...]


def entry_of_line(text: bytes, source: Path, now: datetime, models: TrainedModels = ANY_MODEL) -> JsonlEntry:
    """The task that a line holds, or why it is none. Raises LineError.

    The same line is the same task whenever and wherever it is read; `now` is the time of one that has none. `models`
    says whose tasks are trained on.
    """
    line = _parsed(text)
    content = _content(line)
    _correct_numbers(line, text)
    if isinstance(line.get("messages"), str):
        # As Trinity-RFT's reader takes them, and Flywheel's export for it has them.
        line["messages"] = json_in(line, "messages", list) or line["messages"]
    metadata = _object(line, "metadata")
    asked = _asked(line, metadata)
    skip, detail = _skip(asked)
    otherwise = _id({"line": xxhash.xxh3_128_hexdigest(text.strip())} if skip else _identifying(asked))
    key = _own_id(line) or otherwise
    conversation = id_of(metadata, "conversation_id")
    # Several answers to one question are on one side of the split.
    trace = text_of(metadata, "trace_id") or _id([asked.query, asked.history])
    started, ended = times_of(metadata, now)
    reply = Reply(
        span_id=key,
        trace_id=trace,
        conversation_id=conversation,
        user=id_of(metadata, "user_id"),
        agent=text_of(metadata, "agent_name"),
        query=asked.query,
        answer=asked.answer,
        started_at=started,
        ended_at=ended,
        request=asked.request,
        model=text_of(metadata, "model"),
        adapter=text_of(metadata, "adapter"),
        adapter_source=_adapter_source(metadata),
        turn=_turn(metadata, asked),
        history=tuple(map(in_chat_form, asked.history)),
        trajectory=tuple(map(in_chat_form, asked.trajectory)) or steps_of(metadata),
        tools=tools_of(line, metadata),
        images=asked.images or tuple(str(image) for image in json_in(metadata, "images_json", list)),
        structured=json_in(metadata, "structured_json", dict) or None,
        errors=tuple(str(error) for error in json_in(metadata, "errors_json", list)),
        reference=reference_of(metadata),
        service=text_of(metadata, "service"),
        input_tokens=count_of(metadata, "input_tokens"),
        output_tokens=count_of(metadata, "output_tokens"),
        prompt_tokens=count_of(metadata, "prompt_tokens"),
        prompt_reason=_prompt_reason(metadata),
        skip=skip,
        skip_detail=detail,
    )
    task: dict[str, Any] = Task(key, Split.TRAIN, str(source), reply).line()
    if isinstance(line.get("env_type"), str):
        task["env_type"] = line["env_type"]
    entry = replace(
        entry_of(reply, str(source), models),
        key=key,
        line=b"" if skip else line_bytes(task),
        content=content,
        # A line is whole: what it does not say is not looked for.
        linked=False,
        asked_alias="",
        follows=False,
    )
    return JsonlEntry(**asdict(entry), otherwise=otherwise)


def _parsed(text: bytes) -> dict[str, Any]:
    text = text.removeprefix(_MARK)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        value = _with_lone_surrogates(text, error)
    if not isinstance(value, dict):
        raise LineError(f"it is {kind(value)}, not an object")
    return value


def _correct_numbers(line: dict[str, Any], text: bytes) -> None:
    """Integers beyond 64 bits, which parsing has rounded, become their digits where a text is looked for."""
    rounded = [
        path for path in _NUMBERS if isinstance(value := get_path(line, *path), float) and abs(value) >= _ROUNDED
    ]
    if rounded:
        exact = json.loads(text.removeprefix(_MARK).decode(errors="replace"), parse_int=str)
        for *above, key in rounded:
            if isinstance(digits := get_path(exact, *above, key), str):
                get_path(line, *above)[key] = digits


def _content(line: Mapping[str, Any]) -> int:
    """A hash of the line, and not of its task, which may hold the time of reading."""
    try:
        return xxhash.xxh3_64_intdigest(orjson.dumps(line, option=orjson.OPT_SORT_KEYS)) >> 1
    except orjson.JSONEncodeError:
        raise LineError(f"it is nested more than {MAX_DEPTH} levels deep") from None


def _with_lone_surrogates(text: bytes, error: orjson.JSONDecodeError) -> Any:
    """Half an emoji, which Python's json writes as it is, becomes `?`; whatever else is wrong stays wrong."""
    try:
        value = json.loads(text.decode(), parse_constant=_no_constant)
        return orjson.loads(json_line(value))
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


def _adapter_source(metadata: Mapping[str, Any]) -> str:
    """What told which adapter answered; that of a line that does not say so, by its name alone."""
    told = text_of(metadata, "adapter_source")
    return told if told in ("id", "model", "history") else "model" if text_of(metadata, "adapter") else ""


def _prompt_reason(metadata: Mapping[str, Any]) -> str:
    """Why the line says that its prompt is not exact, if it does."""
    return text_of(metadata, "prompt_reason") or (
        exclusion.OTHERWISE if metadata.get("prompt_exact") is False else ""
    )


def _turn(metadata: Mapping[str, Any], asked: _Asked) -> int:
    if "turn" in metadata:
        return count_of(metadata, "turn")
    return sum(message["role"] == "user" for message in asked.history)
