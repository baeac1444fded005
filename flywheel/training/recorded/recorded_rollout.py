"""The tools of a rollout, whose answers come from recordings, and the loop of its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Literal

from flywheel.records.tool_calls import FINISH_FUNCTIONS, Call, SharedRecordings, ToolResult, finish_answer
from flywheel.records.trace import ChatMessage, get_path
from flywheel.training.data.rollout import AnsweredCall, CallOutcome
from flywheel.training.recorded.recordings import TraceResults, call_key, tools_by_name

OnMiss = Literal["end", "error"]

_NOTHING_SHARED: Final = SharedRecordings()


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """The calls of one message, in order. `answer` is that of a finish tool."""

    calls: tuple[AnsweredCall, ...]
    ended_by: Literal["", "miss", "finish"] = ""
    answer: str = ""

    @property
    def messages(self) -> list[ChatMessage]:
        """The answers as the policy receives them."""
        return [{key: value for key, value in step.items() if key != "status"} for step in self.steps]

    @property
    def steps(self) -> list[ChatMessage]:
        """The answers as steps of the trajectory, which say what failed."""
        return [
            {
                "role": "tool",
                "tool_call_id": call.call_id,
                "name": call.name,
                "content": call.result.content,
                **({"status": "error"} if call.result.failed else {}),
            }
            for call in self.calls
            if call.result is not None
        ]


class RecordedTools:
    """The tools of one rollout. It counts identical calls, so each rollout needs its own."""

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        own: TraceResults,
        *,
        shared: SharedRecordings = _NOTHING_SHARED,
        on_miss: OnMiss = "end",
        finish_tools: Collection[str] = (),
    ) -> None:
        """`tools` are offered, `own` has the results of the trace. `finish_tools` are added to AgentScope's."""
        self._tools = tools_by_name(tools)
        self._own, self._shared = own, shared
        self._on_miss = on_miss
        self._finish_tools = FINISH_FUNCTIONS.union(finish_tools)
        self._times: Counter[str] = Counter()

    def answer(self, calls: Sequence[Mapping[str, Any]]) -> ToolTurn:
        """Answer the `tool_calls` of a message in order. Calls after a miss that ends the rollout are looked up, for
        the metrics, but not answered; those after a finish tool are ignored."""
        answered: list[AnsweredCall] = []
        has_ended = False
        for given in calls:
            call_id, name = _text(given.get("id")), _text(get_path(given, "function", "name"))
            call = Call(call_id, name, get_path(given, "function", "arguments"))
            if call.name in self._finish_tools and (answer := self._finish(call)) is not None:
                if has_ended:
                    break
                answered.append(AnsweredCall(call.id, call.name, CallOutcome.FINISH))
                return ToolTurn(tuple(answered), "finish", answer)
            found = self._answer(call)
            answered.append(replace(found, result=None) if has_ended else found)
            has_ended |= found.outcome is CallOutcome.MISS and self._on_miss == "end"
        return ToolTurn(tuple(answered), "miss" if has_ended else "")

    def _finish(self, call: Call) -> str | None:
        """The answer in a call of a finish tool; None if it is not offered or its arguments cannot be parsed."""
        try:
            return finish_answer(call.name, call.parsed) if call.name in self._tools else None
        except (ValueError, RecursionError):
            return None

    def _answer(self, call: Call) -> AnsweredCall:
        def answered(outcome: CallOutcome, result: ToolResult | None, repeats_trace: bool = False) -> AnsweredCall:
            return AnsweredCall(call.id, call.name, outcome, result, repeats_trace)

        if (tool := self._tools.get(call.name)) is None:
            available = ", ".join(sorted(self._tools)) or "none"
            text = f"ToolNotFoundError: there is no tool {call.name!r}. Available tools: {available}"
            return answered(CallOutcome.UNKNOWN_TOOL, ToolResult(text, failed=True))
        try:
            key = call_key(tool, call.parsed)
        except ValueError as problem:
            text = f"InvalidArgumentsError: the arguments of {call.name} cannot be parsed: {problem}"
            return answered(CallOutcome.UNPARSEABLE, ToolResult(text, failed=True))
        self._times[key] += 1
        repeats = key in self._own.by_key
        if (own := self._own.kth(key, self._times[key])) is not None:
            return answered(CallOutcome.TRACE, own, repeats)
        # Where the own trace has different results, it contradicts any other trace.
        if not self._own.by_key.get(key) and (shared := self._shared.results.get(key)) is not None:
            return answered(CallOutcome.SHARED, shared, repeats)
        error = ToolResult(f"ToolUnavailableError: {call.name} returned no result", failed=True)
        return answered(CallOutcome.MISS, error if self._on_miss == "error" else None, repeats)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


class End(StrEnum):
    """How a rollout ended. After a miss it has no answer and no reward."""

    ANSWERED = "answered"
    FINISHED = "finished"
    """By a finish tool."""
    MISS = "miss"
    TRUNCATED = "truncated"


class RecordedLoop:
    """One rollout. Until its `end`, the caller generates a message for `messages`, and gives it to `advance`.

    Attributes:
        messages: What the model is sent next.
        steps: The messages between question and answer, for the judge.
        calls: All tool calls, for the metrics.
        answer: Valid after the end; empty if the rollout ended between two messages.
    """

    def __init__(self, prompt: Sequence[ChatMessage], tools: RecordedTools) -> None:
        self.messages: list[ChatMessage] = list(prompt)
        self.steps: list[ChatMessage] = []
        self.calls: list[AnsweredCall] = []
        self.end: End | None = None
        self.answer = ""
        self._tools = tools

    def cut(self) -> None:
        """End the rollout as truncated, if it has not ended."""
        self.end = self.end or End.TRUNCATED

    def advance(self, message: ChatMessage, *, truncated: bool = False) -> None:
        """Add a message of the policy, in the form in which the agent sends it again, and answer its calls. Those of
        a truncated message are not answered, because they may be incomplete."""
        if self.end is not None:
            raise ValueError(f"the rollout has ended: {self.end}")
        content, calls = message.get("content") or "", message.get("tool_calls") or ()
        if truncated or not calls:
            self.end, self.answer = End.TRUNCATED if truncated else End.ANSWERED, content
            return
        turn = self._tools.answer(calls)
        self.calls += turn.calls
        self.messages += (message, *turn.messages)
        if (step := _step(message, turn)) is not None:
            self.steps.append(step)
        self.steps += turn.steps
        if turn.ended_by:
            self.end = End.MISS if turn.ended_by == "miss" else End.FINISHED
            self.answer = turn.answer


def _step(message: ChatMessage, turn: ToolTurn) -> ChatMessage | None:
    """The message as a step: without the call of a finish tool and the calls after it, as in tasks; None if nothing
    is left."""
    calls = list(message["tool_calls"])
    if turn.ended_by == "finish":
        calls = calls[: len(turn.calls) - 1]
    step = {**message, "content": message.get("content") or "", "tool_calls": calls}
    if not calls:
        del step["tool_calls"]
    return step if calls or step["content"] else None


@dataclass(frozen=True, slots=True)
class ToolSetup:
    """How tools answer, and the limits of rollouts.

    Attributes:
        shared: Results of other traces.
        max_turns: Messages of the policy.
    """

    shared: SharedRecordings = field(default_factory=SharedRecordings)
    on_miss: OnMiss = "end"
    finish_tools: tuple[str, ...] = ()
    max_turns: int = 16
