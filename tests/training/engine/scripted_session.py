"""A policy whose messages are written beforehand, behind a chat template of one token per character."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flywheel.records.round import RoundTask
from flywheel.records.trace import ChatMessage
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import RolloutRequest
from flywheel.training.data.samples import CallTokens, identity_of, message_identity
from tests.factories.task import round_task

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


@dataclass(frozen=True)
class Reply:
    status: int
    body: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_too_long: bool = False


@dataclass
class ScriptedSession:
    """Says the messages one after the other. A number is a status of HTTP, None hangs, until every limit of time has
    run out. A message longer than `max_tokens` or the `context` is cut, and has no calls."""

    messages: Sequence[ChatMessage | int | None]
    context: int = 10_000
    generated: int = 0
    calls: list[CallTokens] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)

    async def complete(self, body: Mapping[str, Any], *, max_tokens: int | None = None) -> Reply:
        message = self.messages[len(self.bodies)]
        self.bodies.append({**body})
        self.limits.append(max_tokens)
        if message is None:
            loop = asyncio.get_running_loop()
            now = loop.time
            loop.time = lambda: now() + 1e6  # type: ignore[method-assign]
            await asyncio.Event().wait()
        if not isinstance(message, dict):
            return Reply(message or 500, error="it is\nwrong")
        prompt = render(body["messages"])
        if (room := self.context - len(prompt)) <= 0:
            return Reply(400, error="it is too long", is_too_long=True)
        room = room if max_tokens is None else min(room, max_tokens)
        ids, reason = (*written(message), END), "tool_calls" if message.get("tool_calls") else "stop"
        if len(ids) > room:
            ids, reason = ids[:room], "length"
            message = {"role": "assistant", "content": "".join(map(chr, ids))}
        self.generated += len(ids)
        self.calls.append(
            CallTokens(
                prompt,
                ids,
                tuple(-0.1 for _ in ids),
                tuple(map(str, ids)),
                identity_of(body),
                message_identity(message),
                finish_reason=reason,
                answer=message,
            )
        )
        return Reply(200, {"choices": [{"message": message, "finish_reason": reason}]})


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
