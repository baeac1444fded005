"""The loop of model and tools of one rollout, without the model: the caller generates each message.

It keeps the conversation, answers calls from recordings, and decides when the rollout ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from flywheel.records.trace import ChatMessage
from flywheel.training.data.answered_calls import AnsweredCall
from flywheel.training.recorded.recorded_tools import RecordedTools, ToolTurn


class End(StrEnum):
    """How a rollout ended. After a miss it has no answer and no reward."""

    ANSWERED = "answered"
    FINISHED = "finished"
    """By a finish tool."""
    MISS = "miss"
    TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of a rollout: `turns` are messages of the policy, `tokens` are generated in all of them together (None:
    as many as the server allows)."""

    turns: int
    tokens: int | None


class RecordedLoop:
    """One rollout. While it `goes_on`, the caller generates a message for `messages` with at most `room` tokens, and
    gives it to `advance`.

    Attributes:
        messages: What the model is sent next.
        steps: The messages between question and answer, for the judge.
        calls: All tool calls, for the metrics.
        answer: Valid after the end; empty if the rollout ended between two messages.
    """

    def __init__(self, prompt: Sequence[ChatMessage], tools: RecordedTools, budgets: Budgets) -> None:
        self.messages: list[ChatMessage] = list(prompt)
        self.steps: list[ChatMessage] = []
        self.calls: list[AnsweredCall] = []
        self.end: End | None = None
        self.answer = ""
        self._tools, self._budgets = tools, budgets
        self._turns = self._generated = 0

    @property
    def room(self) -> int | None:
        """Number of tokens that the next message may have; None without a limit."""
        return None if self._budgets.tokens is None else self._budgets.tokens - self._generated

    def goes_on(self) -> bool:
        """Whether there is a next message. A budget that is used up ends the rollout as truncated."""
        if self._turns >= self._budgets.turns or self.room == 0:
            self.cut()
        return self.end is None

    def cut(self) -> None:
        """End the rollout as truncated, if it has not ended."""
        self.end = self.end or End.TRUNCATED

    def advance(self, message: ChatMessage, *, tokens: int, truncated: bool = False) -> None:
        """Add a message of the policy, in the form in which the agent sends it again, and answer its calls. `tokens`
        were generated for it. Calls of a truncated message are not answered, because they may be incomplete."""
        if self.end is not None:
            raise ValueError(f"the rollout has ended: {self.end}")
        self._turns += 1
        self._generated += tokens
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
