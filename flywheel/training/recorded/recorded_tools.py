"""Answers the tool calls of one rollout from recordings.

The results of the task's own trace come first, then those shared by other traces. A well-formed call of an offered
tool that has neither is a miss. No model and no tool runs here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from flywheel.records.finish_functions import FINISH_FUNCTIONS, finish_answer
from flywheel.records.tool_calls import Call
from flywheel.records.tool_results import Result, SharedRecordings
from flywheel.records.trace import ChatMessage, get_path
from flywheel.training.data.answered_calls import AnsweredCall, Outcome
from flywheel.training.recorded.call_key import call_key, tools_by_name
from flywheel.training.recorded.recordings import TraceResults

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
        return [
            {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": call.result.content}
            for call in self.calls
            if call.result is not None
        ]

    @property
    def steps(self) -> list[ChatMessage]:
        """The answers as steps of the trajectory, which say what failed."""
        answered = [call for call in self.calls if call.result is not None]
        return [
            {
                **message,
                **({"status": "error"} if call.result is not None and call.result.failed else {}),
            }
            for message, call in zip(self.messages, answered, strict=True)
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
                answered.append(AnsweredCall(call.id, call.name, Outcome.FINISH))
                return ToolTurn(tuple(answered), "finish", answer)
            found = self._answer(call)
            answered.append(replace(found, result=None) if has_ended else found)
            has_ended |= found.outcome is Outcome.MISS and self._on_miss == "end"
        return ToolTurn(tuple(answered), "miss" if has_ended else "")

    def _finish(self, call: Call) -> str | None:
        """The answer in a call of a finish tool; None if it is not offered or its arguments cannot be parsed."""
        try:
            return finish_answer(call.name, call.parsed) if call.name in self._tools else None
        except (ValueError, RecursionError):
            return None

    def _answer(self, call: Call) -> AnsweredCall:
        def answered(outcome: Outcome, result: Result | None, repeats_trace: bool = False) -> AnsweredCall:
            return AnsweredCall(call.id, call.name, outcome, result, repeats_trace)

        if (tool := self._tools.get(call.name)) is None:
            available = ", ".join(sorted(self._tools)) or "none"
            text = f"ToolNotFoundError: there is no tool {call.name!r}. Available tools: {available}"
            return answered(Outcome.UNKNOWN_TOOL, Result(text, failed=True))
        try:
            key = call_key(tool, call.parsed)
        except ValueError as problem:
            text = f"InvalidArgumentsError: the arguments of {call.name} cannot be parsed: {problem}"
            return answered(Outcome.UNPARSEABLE, Result(text, failed=True))
        self._times[key] += 1
        repeats = key in self._own.by_key
        if (own := self._own.kth(key, self._times[key])) is not None:
            return answered(Outcome.TRACE, own, repeats)
        # Where the own trace has different results, it contradicts any other trace.
        if not self._own.by_key.get(key) and (shared := self._shared.results.get(key)) is not None:
            return answered(Outcome.SHARED, shared, repeats)
        error = Result(f"ToolUnavailableError: {call.name} returned no result", failed=True)
        return answered(Outcome.MISS, error if self._on_miss == "error" else None, repeats)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
