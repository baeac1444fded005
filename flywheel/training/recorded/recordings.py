"""The recorded results of tool calls: of one trace, and those on which traces of two conversations agree."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from flywheel.records.states import Split
from flywheel.records.task import conversation_key
from flywheel.records.tool_calls import FINISH_FUNCTIONS, SharedRecordings, Tool, ToolResult, calls_in
from flywheel.records.trace import ChatMessage
from flywheel.training.recorded.call_key import call_key, tools_by_name

MAX_BYTES: Final = 8 << 20
"""Text of results that a specification has room for. First those that were called most often."""

_ADD: Final = (
    "INSERT INTO results VALUES (?, ?, ?, ?, 1, 0, 0) ON CONFLICT (key) DO UPDATE SET calls = calls + 1,"
    " confirmed = confirmed OR conversation <> excluded.conversation,"
    " differs = differs OR content <> excluded.content OR failed <> excluded.failed"
)
_AGREEING: Final = "SELECT key, content, failed FROM results WHERE confirmed AND NOT differs ORDER BY calls DESC, key"


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
            " calls INTEGER, confirmed INTEGER, differs INTEGER) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def add(self, recording: Recording, results: TraceResults) -> None:
        """Add a trace, with the results that `results_of` finds in it."""
        if self._reader is Split.TRAIN and recording.split is not Split.TRAIN:
            return
        own = [each for each in results.results if each.tool.digest in self._offered]
        if own:
            key = recording.conversation or recording.task_id
            conversation = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:16]
            rows = ((each.key, _bytes(each.result.content), each.result.failed, conversation) for each in own)
            self._database.executemany(_ADD, rows)

    def shared(self) -> SharedRecordings:
        """What rollouts may use of the traces so far."""
        shared: dict[str, ToolResult] = {}
        room = MAX_BYTES
        for key, content, failed in self._database.execute(_AGREEING):
            # A result that has no room leaves room for smaller ones.
            if len(content) <= room:
                room -= len(content)
                shared[key] = ToolResult(content.decode("utf-8", "surrogatepass"), bool(failed))
        return SharedRecordings(shared)

    def close(self) -> None:
        self._database.close()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


Share = Literal["agreeing", "off"]


@dataclass(frozen=True, slots=True)
class Recording:
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


def recording_of(line: Mapping[str, Any], split: Split) -> Recording:
    """The recording in a line of `tasks.jsonl`, whose own split is provisional. Where the chain redacts tasks, the
    line must be redacted: the policy sees redacted questions, and its calls have redacted arguments."""
    metadata = line["metadata"]
    return Recording(
        line["task_id"],
        conversation_key(metadata["conversation_id"], metadata["trace_id"]),
        split,
        tuple(json.loads(metadata["tools_json"])),
        tuple(json.loads(metadata["trajectory_json"])),
        tuple(json.loads(metadata["errors_json"])),
        (*line["init_messages"], {"role": "user", "content": line["main_query"]}),
    )


def results_of(recording: Recording, finish_tools: Collection[str] = ()) -> TraceResults:
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
