"""A policy whose messages are written beforehand, behind a chat template of one token per character."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from flywheel.records.round import RoundTask
from flywheel.records.trace import ChatMessage
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, RolloutRequest
from flywheel.training.engine.rollout_engine import RolloutEngine
from flywheel.training.engine.served_application import Limits
from flywheel.training.recorded.recorded_rollout import ToolSetup
from tests.factories.task import round_task
from tests.training.engine.scripted_application import TOO_LONG

ROLES = {role: 1000 + place for place, role in enumerate(("system", "user", "assistant", "tool"))}
END = 1999


def render(messages: Sequence[ChatMessage]) -> tuple[int, ...]:
    """With the beginning of the next message. Reasoning is rendered where it is sent."""
    ids: list[int] = []
    for message in messages:
        ids += (ROLES[message["role"]], *written(message), END)
    return (*ids, ROLES["assistant"])


def written(message: ChatMessage) -> tuple[int, ...]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    text = (message.get("reasoning") or "") + (message.get("content") or "") + (json.dumps(calls) if calls else "")
    return tuple(map(ord, text))


class ScriptedPolicy(RolloutEngine):
    """An engine that says the messages one after the other, within the limits of each call. A number is a status of
    HTTP; with None, the time is up if it is limited, else it never answers.

    Attributes:
        bodies: The requests.
        limits: The limit of tokens of each.
        lengths: The number of tokens of each message.
    """

    def __init__(self, messages: Sequence[ChatMessage | int | None], context: int = 10_000) -> None:
        super().__init__()
        self._application = self
        self.context = context
        self.bodies: list[dict[str, Any]] = []
        self.limits: list[int | None] = []
        self.lengths: list[int] = []
        self._messages = messages

    def roll_out(
        self, request: RolloutRequest, setup: ToolSetup, gate: ToolSetup | None = None
    ) -> Coroutine[Any, Any, Completion]:
        self.use_tools(setup, gate or setup)
        return self._with_recorded_tools(request)

    async def chat(self, body: Mapping[str, Any], limits: Limits) -> tuple[int, dict[str, Any]]:
        message = self._messages[len(self.bodies)]
        self.bodies.append({**body})
        self.limits.append(limits.tokens)
        if message is None and limits.until is not None:
            raise TimeoutError
        if message is None:
            await asyncio.Event().wait()
        if not isinstance(message, dict):
            return message or 500, {"error": {"message": "it is\nwrong"}}
        prompt = render(body["messages"])
        if (room := self.context - len(prompt)) <= 0:
            return 400, TOO_LONG
        room = room if limits.tokens is None else min(room, limits.tokens)
        ids, reason = (*written(message), END), "tool_calls" if message.get("tool_calls") else "stop"
        if len(ids) > room:
            ids, reason = ids[:room], "length"
            message = {"role": "assistant", "content": "".join(map(chr, ids))}
        self.lengths.append(len(ids))
        drawn = [{"token": str(token), "logprob": -0.1} for token in ids]
        choice = {"message": message, "finish_reason": reason, "token_ids": ids, "logprobs": {"content": drawn}}
        return 200, {"choices": [choice], "prompt_token_ids": prompt}

    def _tokens_of_context(self, request: RolloutRequest) -> int:
        return self.context

    def _texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        return [str(token) for token in token_ids]


_tasks = itertools.count()


def recorded_task(steps: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], **values: Any) -> RoundTask:
    question = "What is 1 and 0?"
    given = {
        "query": question,
        "reference": "1",
        "history": (),
        "prompt": [{"role": "user", "content": question}],
        "tools": tuple(tools),
        "agent": "recorded",
        "steps": tuple(steps),
    }
    return round_task(f"t-{next(_tasks)}", **{**given, **values})


def rollout_request(task: RoundTask, max_tokens: int | None = 1000, **values: Any) -> RolloutRequest:
    prompt = Prompt(task, render(task.prompt), max_tokens=max_tokens or 0)
    return RolloutRequest(prompt, 0, 1, 1.0, max_tokens, None, **values)
