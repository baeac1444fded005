"""A scripted model behind the HTTP interface of vLLM 0.32: it multiplies with a tool, and answers from the result.

Chat completions, plain and streamed, with response ids made of `X-Request-Id` as vLLM makes them. The recorder notes
what the agents send in front of the middleware.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Coroutine, Iterator
from typing import Any

from starlette.requests import Request

from flywheel.system.server_limits import App, Receive, Scope, Send
from tests.serving.fake_vllm import answer

Json = dict[str, Any]


class ScriptedModel:
    """`pause`: seconds between the events of a stream. `failures`: how many of the next requests fail."""

    def __init__(self) -> None:
        self.pause = 0.0
        self.failures = 0
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        if self.failures:
            self.failures -= 1
            await answer(send, 503, {"error": {"message": "overloaded", "code": 503}})
        elif scope["path"] == "/v1/chat/completions":
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            await until_the_client_leaves(receive, self.chat(json.loads(body), headers.get("x-request-id", ""), send))
        else:
            await answer(send, 404, {"error": {"message": "Not Found"}})

    async def chat(self, wanted: Json, request_id: str, send: Send) -> None:
        message = self.reply(wanted)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": len(str(wanted["messages"])) // 4, "completion_tokens": 7, "total_tokens": 0}
        head = {"id": f"chatcmpl-{request_id}", "created": 0, "model": wanted["model"]}
        if not wanted.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
            await answer(send, 200, {**head, "object": "chat.completion", "choices": [choice], "usage": usage})
            return
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        )
        for delta in deltas(message):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            await event(send, {**head, "object": "chat.completion.chunk", "choices": [choice]})
            await asyncio.sleep(self.pause)
        choice = {"index": 0, "delta": {}, "finish_reason": reason}
        await event(send, {**head, "object": "chat.completion.chunk", "choices": [choice]})
        if (wanted.get("stream_options") or {}).get("include_usage"):
            await event(send, {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def reply(self, wanted: Json) -> Json:
        """The first number of the last question is multiplied by each other one with the tool, if it is offered, in
        one answer; an agent that is a tool is asked the question, and one to hand over to is called. Else the model
        guesses.
        """
        last = wanted["messages"][-1]
        if last["role"] == "tool":
            return {"content": f"The result is {text_of(last)}."}
        questions = [text_of(message) for message in wanted["messages"] if message["role"] == "user"]
        asked = next(text for text in reversed(questions) if "<system-reminder>" not in text)
        numbers = [int(number) for number in re.findall(r"\d+", asked)]
        if len(numbers) >= 2 and wanted.get("tools"):
            function = wanted["tools"][0]["function"]
            named = function.get("parameters", {}).get("properties", {})
            given = [{"input": asked}] if "input" in named else [{"a": numbers[0], "b": b} for b in numbers[1:]]
            calls = [
                {
                    "id": f"chatcmpl-tool-{next(self._numbers):08x}",
                    "type": "function",
                    "function": {"name": function["name"], "arguments": json.dumps(each if named else {})},
                }
                for each in (given if named else [{}])
            ]
            return {"content": None, "tool_calls": calls}
        return {"content": f"You asked: {asked}"}


def deltas(message: Json) -> Iterator[Json]:
    """A message in the pieces of a stream, as vLLM sends them."""
    yield {"role": "assistant", "content": ""}
    for index, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": {"name": name}}]}
        for piece in re.findall(".{1,5}", arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
    for piece in re.findall(r"(?s).{1,6}", message.get("content") or ""):
        yield {"content": piece}


def text_of(message: Json) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


async def until_the_client_leaves(receive: Receive, answering: Coroutine[Any, Any, None]) -> None:
    """vLLM stops to generate when its client disconnects."""
    tasks = [asyncio.ensure_future(answering), asyncio.ensure_future(receive())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def event(send: Send, content: Json) -> None:
    await send({"type": "http.response.body", "body": f"data: {json.dumps(content)}\n\n".encode(), "more_body": True})


class Recorder:
    """Passes everything on to `app`, and keeps the bodies of chat requests in `requests`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.requests: list[Json] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""

        async def heard() -> Any:
            nonlocal body
            message = await receive()
            if message["type"] == "http.request" and scope["path"] == "/v1/chat/completions":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    self.requests.append(json.loads(body))
            return message

        await self._app(scope, heard, send)
