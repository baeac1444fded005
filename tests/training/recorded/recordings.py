"""Traces with tool calls, made by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence
from contextlib import closing
from typing import Any

from msgspec.structs import replace

from flywheel.records.states import Split
from flywheel.records.tool_calls import SharedRecordings
from flywheel.records.trace import ChatMessage, Reply
from flywheel.training.recorded.recordings import RecordingPool, TraceRecording, results_of, tools_by_name
from tests.factories.trace import replies_on

_numbers = itertools.count()


def tool(name: str = "add", description: str = "Add two numbers.", **properties: Any) -> dict[str, Any]:
    schemas = properties or {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": schemas}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


ADD = tool()
FINISH = tool("generate_response", "Answer the user.", response={"type": "string"})


def call(name: str = "add", arguments: Any = None, call_id: str = "") -> dict[str, Any]:
    """Arguments that are no text are written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {
        "id": call_id or f"c-{next(_numbers)}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def said(*calls: dict[str, Any], content: str = "") -> ChatMessage:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def steps(*pairs: tuple[dict[str, Any], str | None]) -> tuple[ChatMessage, ...]:
    """One message for each call, and its result; None is a call without a result."""
    made: list[ChatMessage] = []
    for asked, result in pairs:
        made.append(said(asked))
        if result is not None:
            name = asked["function"]["name"]
            made.append({"role": "tool", "tool_call_id": asked["id"], "name": name, "content": result})
    return tuple(made)


def recording(
    *pairs: tuple[dict[str, Any], str | None],
    conversation: str = "",
    split: Split = Split.TRAIN,
    tools: tuple[dict[str, Any], ...] = (ADD, FINISH),
    errors: tuple[str, ...] = (),
    question: str = "",
) -> TraceRecording:
    asked: tuple[ChatMessage, ...] = ({"role": "user", "content": question},)
    return TraceRecording(f"t-{next(_numbers)}", conversation, split, tools, steps(*pairs), errors, asked)


def shared_recordings(
    recordings: Sequence[TraceRecording], reader: Split, *, offered: Collection[str] | None = None
) -> SharedRecordings:
    """What rollouts of tasks in a split may use of these traces; by default they are offered all tools of all."""
    tools = {tool.digest for each in recordings for tool in tools_by_name(each.tools).values()}
    wanted = tools if offered is None else offered
    with closing(RecordingPool(reader, wanted)) as pool:
        for each in recordings:
            pool.add(each, results_of(each))
        return pool.shared()


def identity(value: Any) -> Any:
    """A value with its types: in Python, 1 == 1.0 == True."""
    if isinstance(value, dict):
        return {name: identity(item) for name, item in value.items()}
    if isinstance(value, list):
        return [identity(item) for item in value]
    return type(value).__name__, value


SUM = {"a": 1, "b": 2}


def asked(split: Split, *results: str | None, tools: tuple[Any, ...] = (ADD,), **values: Any) -> list[Reply]:
    """A conversation for each result, in which the same sum was asked; None is a reply without a call."""
    found = []
    for number, one in enumerate(replies_on(split, len(results), tools=tools, **values)):
        result = results[number]
        made_steps = steps((call(arguments=SUM), result)) if result is not None else ()
        found.append(replace(one, trajectory=made_steps))
    return found
