"""The seam between sessions and vLLM: an application that answers from a script, with vLLM's bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flywheel.training.data.rollout import LoadedAdapter
from flywheel.training.engine.served_application import Limits, ServedApplication
from flywheel.training.engine.session import Session

TOO_LONG = {
    "error": {
        "message": "This model's maximum context length is 8 tokens.",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }
}


def message(
    text: str | None = "It is 7.", *, calls: Sequence[tuple[str, str]] = (), reasoning: str | None = None
) -> Any:
    made: dict[str, Any] = {"role": "assistant", "content": text, "reasoning": reasoning}
    if calls:
        made["tool_calls"] = [
            {"id": f"call-{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ]
    return made


def answered(said: Any, *, logprobs: Sequence[float] = (-0.5, -0.25), finish: str = "stop") -> dict[str, Any]:
    """A response of vLLM to a request with `logprobs` and `return_token_ids`; its tokens are 8, 9, …"""
    tokens = [8 + at for at in range(len(logprobs))]
    drawn = [
        {"token": f"<{token}>", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "flywheel-base-model",
        "choices": [
            {
                "index": 0,
                "message": said,
                "logprobs": {"content": drawn},
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": tokens,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens), "total_tokens": 3 + len(tokens)},
        "prompt_token_ids": [5, 6, 7],
    }


class ScriptedApplication:
    """Answers with `script` in turn, then with its last entry. With `hold`, calls wait until `go` is set.

    Attributes:
        asked: The bodies that it was sent.
        limits: Those of each call.
        aborted: Number of calls that were cancelled.
        context: That of the engine, in tokens.
    """

    context = 1000

    def __init__(self, *script: dict[str, Any] | tuple[int, dict[str, Any]] | Exception, hold: bool = False) -> None:
        self._script = list(script) or [answered(message())]
        self.asked: list[dict[str, Any]] = []
        self.limits: list[Limits] = []
        self.aborted = 0
        self.go = asyncio.Event()
        if not hold:
            self.go.set()

    async def chat(self, body: Mapping[str, Any], limits: Limits) -> tuple[int, dict[str, Any]]:
        self.asked.append(json.loads(json.dumps(body)))
        self.limits.append(limits)
        told = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if isinstance(told, Exception):
            raise told
        status, content = told if isinstance(told, tuple) else (200, told)
        return status, json.loads(json.dumps(content))


class TalkativeApplication(ScriptedApplication):
    """Generates as many tokens as it may; its answers are numbered."""

    async def chat(self, body: Mapping[str, Any], limits: Limits) -> tuple[int, dict[str, Any]]:
        text = f"answer {len(self.asked)}"
        await super().chat(body, limits)
        most = min(each for each in (body.get("max_tokens"), limits.tokens) if each is not None)
        return 200, answered(message(text), logprobs=[-0.5] * most, finish="length")


QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


def session(app: ScriptedApplication, adapter: LoadedAdapter | None = None, **settings: Any) -> Session:
    given = {"as_served": False, "temperature": 0.7, "seed": 11, "context": 100, **settings}
    return Session(cast(ServedApplication, app), adapter, **given)


def asking(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "agent", "messages": [{"role": "user", "content": text}], **more}


async def started(app: ScriptedApplication, calls: int = 1) -> None:
    while len(app.asked) < calls:
        await asyncio.sleep(0)
