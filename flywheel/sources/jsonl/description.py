"""What a line says of its task beside question, history and answer: who answered, when, with which tools.

It only describes the task. Another program may mean something else by these keys: what has another type is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from flywheel.sources.jsonl.messages import LineError, in_chat_form, messages_of
from flywheel.trace import ChatMessage

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
