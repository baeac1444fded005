"""A rollout of the policy with recorded tools: its messages come from a session of the engine's chat endpoint, the
answers of its tools from recordings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from flywheel.records.tool_results import SharedRecordings
from flywheel.records.trace import ChatMessage, get_path
from flywheel.training.data.answered_calls import AnsweredCall
from flywheel.training.data.rollout import Completion, RolloutRequest
from flywheel.training.data.timelines import CallTokens, timelines
from flywheel.training.recorded.recorded_tools import OnMiss, RecordedTools, ToolTurn
from flywheel.training.recorded.recordings import trace_results


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


MAX_CALL_TEXT: Final = 200
"""Characters of a call in an error."""


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


class ModelReply(Protocol):
    """A response of the chat endpoint: `error` has the server's message. `is_too_long`: the prompt leaves no room in
    the context."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> dict[str, Any]: ...

    @property
    def error(self) -> str: ...

    @property
    def is_too_long(self) -> bool: ...


class ChatSession(Protocol):
    """The policy as one rollout reaches it (`Session`). It keeps to the context. `calls` are those that it answered,
    `generated` is their number of tokens."""

    generated: int

    @property
    def calls(self) -> Sequence[CallTokens]: ...

    async def complete(self, body: Mapping[str, Any], *, max_tokens: int | None = None) -> ModelReply: ...


async def roll_out(request: RolloutRequest, session: ChatSession, setup: ToolSetup) -> Completion:
    """The completion of a request whose task has recordings.

    A rollout `as_served` has the server's limits of tokens. After its `seconds` it is cut: the message that is being
    generated is lost.
    """
    task = request.prompt.task
    tools = RecordedTools(
        task.tools,
        trace_results(task.tools, task.steps, task.errors, setup.finish_tools),
        shared=setup.shared,
        on_miss=setup.on_miss,
        finish_tools=setup.finish_tools,
    )
    budgets = Budgets(setup.max_turns, None if request.as_served else request.max_tokens)
    loop = RecordedLoop(task.prompt, tools, budgets)
    limit = asyncio.timeout(request.seconds)
    try:
        async with limit:
            error = await _take_turns(loop, request, session)
    except TimeoutError:
        if not limit.expired():
            raise
        error = ""
        loop.cut()
    calls = session.calls
    if not calls and not error:
        error = f"no message within {request.seconds:g} s" if limit.expired() else "its prompt fills the context"
    made = timelines(calls)
    return Completion(
        text=loop.answer,
        samples=made.samples,
        texts=made.texts,
        steps=tuple(loop.steps),
        calls=tuple(loop.calls),
        missed=loop.end is End.MISS,
        turns=len(calls),
        forks=made.forks,
        truncated=not error and loop.end is End.TRUNCATED,
        error=error,
    )


async def _take_turns(loop: RecordedLoop, request: RolloutRequest, session: ChatSession) -> str:
    """Take turns until the loop ends. Returns why the rollout has nothing to grade; empty if it has."""
    task = request.prompt.task
    # The endpoint renders the prompts, and keeps to the context.
    while loop.goes_on():
        body: dict[str, Any] = {"messages": list(loop.messages)}
        if task.tools:
            body["tools"] = list(task.tools)
        before, answered = session.generated, len(loop.calls)
        reply = await session.complete(body, max_tokens=loop.room)
        if reply.is_too_long:
            loop.cut()
            break
        if reply.status != 200:
            return f"the engine refused a message: {' '.join(reply.error.split())[:300]} (HTTP status {reply.status})"
        [choice] = reply.body["choices"]
        message = _sent_again(choice["message"], with_reasoning=task.sends_reasoning)
        loop.advance(message, tokens=session.generated - before, truncated=choice["finish_reason"] == "length")
        if loop.end is End.MISS:
            calls = zip(message["tool_calls"], loop.calls[answered:], strict=False)
            return f"no recorded result for {next(_text(call) for call, each in calls if each.is_miss)}"
    return ""


def _sent_again(message: Mapping[str, Any], *, with_reasoning: bool) -> ChatMessage:
    """A message of the policy in the form in which the agent sends it again."""
    again: ChatMessage = {"role": "assistant", "content": message.get("content")}
    if with_reasoning and (reasoning := message.get("reasoning")):
        again["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        again["tool_calls"] = calls
    return again


def _text(call: Mapping[str, Any]) -> str:
    name, arguments = get_path(call, "function", "name"), get_path(call, "function", "arguments")
    return f"{name}({' '.join(str(arguments).split())})"[:MAX_CALL_TEXT]
