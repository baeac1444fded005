"""Recorded results of tool calls by key: those of one trace, and those on which traces of two conversations agree.

Calls with equal keys ask the same of the same tool. A key is a hash of the tool's name, its definition, and the
parsed arguments with the schema's defaults filled in. Types are kept: 1, 1.0, "1" and true are four values. A key
that is too fine causes a miss; one that is too coarse would return the result of another call.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from flywheel.records.states import Split
from flywheel.records.task import conversation_key, trace_parts
from flywheel.records.tool_calls import (
    FINISH_FUNCTIONS,
    SharedRecordings,
    Tool,
    ToolResult,
    calls_in,
    functions_by_name,
)
from flywheel.records.trace import ChatMessage, get_path
from flywheel.training.data.samples import digest


def tools_by_name(tools: Iterable[Mapping[str, Any]]) -> dict[str, Tool]:
    """The offered tools (`functions_by_name`) with the digests of their definitions."""
    return {name: Tool(name, function, digest(function)) for name, function in functions_by_name(tools).items()}


def call_key(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """The key of a call with these parsed arguments. Raises ValueError if they are nested too deeply."""
    schema = tool.definition.get("parameters")
    try:
        return digest([tool.name, tool.digest, with_defaults(arguments, schema)])
    except RecursionError:
        raise ValueError("they are nested too deeply") from None


def with_defaults(value: Any, schema: Any, root: Any = None) -> Any:
    """The value with the defaults of the properties that it leaves out, also in the objects within it.

    Follows `properties`, `items` and references within the schema (`root`). A default is taken as it is written. The
    branches of an `anyOf` are not followed.
    """
    root = schema if root is None else root
    schema = _resolved(schema, root)
    if isinstance(value, Mapping):
        properties = get_path(schema, "properties")
        if not isinstance(properties, dict):
            return value
        filled = {name: with_defaults(item, properties.get(name), root) for name, item in value.items()}
        for name, about in properties.items():
            if name not in filled and isinstance(about, dict) and "default" in about:
                filled[name] = about["default"]
        return filled
    if isinstance(value, list) and isinstance(items := get_path(schema, "items"), dict):
        return [with_defaults(item, items, root) for item in value]
    return value


def _resolved(schema: Any, root: Any) -> Any:
    """The schema that local references lead to; None for other references and for circles."""
    seen: set[str] = set()
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        if reference in seen or not reference.startswith("#"):
            return None
        seen.add(reference)
        path = [part.replace("~1", "/").replace("~0", "~") for part in reference[1:].split("/")[1:]]
        schema = get_path(root, *path)
    return schema


MAX_BYTES: Final = 8 << 20
"""Text of results that a specification has room for. First those that were called most often."""

_ADD: Final = (
    "INSERT INTO results VALUES (?, ?, ?, ?, ?, 1, 0, 0) ON CONFLICT (key) DO UPDATE SET calls = calls + 1,"
    " confirmed = confirmed OR conversation <> excluded.conversation,"
    " differs = differs OR content <> excluded.content OR failed <> excluded.failed"
)
_AGREEING: Final = (
    "SELECT key, content, failed, task FROM results WHERE confirmed AND NOT differs ORDER BY calls DESC, key"
)


class RecordingPool:
    """What rollouts of tasks in the split `reader` may use; training never reads held-out traces.

    The results are in a temporary database on disk, however many traces are added.
    """

    def __init__(self, reader: Split, offered: Collection[str]) -> None:
        """`offered` are the digests of the tools that rollouts are offered."""
        self._reader, self._offered = reader, frozenset(offered)
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(
            "CREATE TABLE results (key TEXT PRIMARY KEY, content BLOB, failed INTEGER, conversation BLOB,"
            " task BLOB, calls INTEGER, confirmed INTEGER, differs INTEGER) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def add(self, recording: TraceRecording, results: TraceResults) -> None:
        """Add a trace, with the results that `results_of` finds in it."""
        if self._reader is Split.TRAIN and recording.split is not Split.TRAIN:
            return
        own = [each for each in results.results if each.tool.digest in self._offered]
        if own:
            key = recording.conversation or recording.task_id
            conversation = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:16]
            of = conversation, _bytes(recording.task_id)
            rows = ((each.key, _bytes(each.result.content), each.result.failed, *of) for each in own)
            self._database.executemany(_ADD, rows)

    def shared(self) -> SharedRecordings:
        """What rollouts may use of the traces so far."""
        shared: dict[str, ToolResult] = {}
        room = MAX_BYTES
        for key, content, failed, task in self._database.execute(_AGREEING):
            # A result that has no room leaves room for smaller ones.
            if len(content) <= room:
                room -= len(content)
                text, name = (each.decode("utf-8", "surrogatepass") for each in (content, task))
                shared[key] = ToolResult(text, bool(failed), name)
        return SharedRecordings(shared)

    def close(self) -> None:
        self._database.close()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


Share = Literal["agreeing", "off"]


@dataclass(frozen=True, slots=True)
class TraceRecording:
    """The steps of a traced reply.

    Attributes:
        conversation: The key of its conversation.
        tools: The tools that the agent was offered, in the OpenAI chat form.
        steps: The messages between question and answer.
        errors: The steps that failed, as the task's `metadata.errors_json` lists them.
        messages: The conversation so far and what the agent was asked.
    """

    task_id: str
    conversation: str
    split: Split
    tools: tuple[dict[str, Any], ...] = ()
    steps: tuple[ChatMessage, ...] = ()
    errors: tuple[str, ...] = ()
    messages: tuple[ChatMessage, ...] = ()

    @property
    def question(self) -> str:
        """A key of the messages without system prompts, which may have the time."""
        conversation = [(message.get("role"), message.get("content")) for message in self.messages]
        return json.dumps([each for each in conversation if each[0] != "system"])


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """The result of one recorded call."""

    key: str
    tool: Tool
    result: ToolResult


@dataclass(frozen=True, slots=True)
class TraceResults:
    """The calls of one trace.

    Attributes:
        calls: Number of calls, including those without a key.
        by_key: The results of each key, in order. A call without a result has a key with no results.
        results: Those of all calls that have a key, in order.
    """

    calls: int
    by_key: dict[str, tuple[ToolResult, ...]]
    results: tuple[RecordedResult, ...]

    def kth(self, key: str, k: int) -> ToolResult | None:
        """The result of the k-th identical call; k counts from 1. After the last result it is that one, if all are
        equal."""
        results = self.by_key.get(key, ())
        if k <= len(results):
            return results[k - 1]
        return results[-1] if len(set(results)) == 1 else None

    def trains(self, *, use_uncalled: bool) -> bool:
        """Whether a round may ask the task: its trace has results, or it made no call and such tasks are used."""
        return bool(self.results) or (use_uncalled and not self.calls)

    def gates(self, *, accepted: bool) -> bool:
        """Whether the gate may ask the task: its trace has results, or it made no call and the traced answer was
        accepted."""
        return bool(self.results) or (accepted and not self.calls)


def recording_of(line: Mapping[str, Any], split: Split) -> TraceRecording:
    """The recording in a line of `tasks.jsonl`, whose own split is provisional. Where the chain redacts tasks, the
    line must be redacted: the policy sees redacted questions, and its calls have redacted arguments."""
    metadata = line["metadata"]
    return TraceRecording(
        line["task_id"],
        conversation_key(metadata["conversation_id"], metadata["trace_id"]),
        split,
        *trace_parts(line),
        (*line["init_messages"], {"role": "user", "content": line["main_query"]}),
    )


def results_of(recording: TraceRecording, finish_tools: Collection[str] = ()) -> TraceResults:
    """The results of a recording (`trace_results`)."""
    return trace_results(recording.tools, recording.steps, recording.errors, finish_tools)


def trace_results(
    offered: Iterable[Mapping[str, Any]],
    steps: Sequence[ChatMessage],
    failures: Sequence[str],
    finish_tools: Collection[str] = (),
) -> TraceResults:
    """The results of a trace, given its steps and which of them failed. Calls of tools that it was not offered, and
    calls whose arguments are no JSON object, have no key. Calls of finish tools are answers, not calls."""
    tools = tools_by_name(offered)
    not_called = FINISH_FUNCTIONS.union(finish_tools)
    calls = [call for call in calls_in(steps, failures) if call.name not in not_called]
    by_key: dict[str, tuple[ToolResult, ...]] = {}
    recorded: list[RecordedResult] = []
    for call in calls:
        if (tool := tools.get(call.name)) is None:
            continue
        try:
            key = call_key(tool, call.parsed)
        except ValueError:
            continue
        results = by_key.setdefault(key, ())
        if call.result is not None:
            result = ToolResult(call.result, call.failed)
            by_key[key] = (*results, result)
            recorded.append(RecordedResult(key, tool, result))
    return TraceResults(len(calls), by_key, tuple(recorded))
