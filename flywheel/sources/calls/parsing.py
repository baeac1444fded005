"""Parses recorded calls: the request, and the answers assembled from a response or a stream of events.

Chat completions, completions, responses and messages, as vLLM, OpenAI and Anthropic write them. Nothing that a client
or a server sends raises an error: what cannot be parsed is said in `ModelCall.error`.
https://platform.openai.com/docs/api-reference/chat-streaming
https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from types import ModuleType
from typing import Any, Final

import orjson
from msgspec import Struct

from flywheel.records.trace import ChatMessage, ModelAnswer, ModelCall, ToolDefinition, get_path, refusal_of
from flywheel.serving.calls.call_log import RecordedCall
from flywheel.sources.calls import messages_api, responses_api

_TRANSLATIONS: Final = {"/v1/responses": responses_api, "/v1/messages": messages_api}
"""Of the interfaces that differ from that of chat completions, by the ends of their paths."""
MAX_BRACKETS: Final = 1_000_000
"""An empty list takes 2 bytes as JSON, and 64 as an object."""
_NO_PARAMETERS: Final = frozenset({"model", "messages", "tools", "stream", "stream_options", "user", "request_id"})
_ERROR_CHARACTERS: Final = 500


def parse(call: RecordedCall) -> ModelCall:
    """The call with its messages and its answers."""
    path = call.path.rstrip("/")
    api = next((each for end, each in _TRANSLATIONS.items() if path.endswith(end)), None)
    request = _json(call.request)
    problem = ""
    if not isinstance(request, dict):
        request, problem = {}, "the request is not a JSON object"
    messages, tools = (api.prompt_of if api else _prompt_of)(request)
    if messages is None:
        messages, problem = (), "the request's messages are not a list of objects"
    user = api.user_of(request) if api else request.get("user")
    not_parameters = api.PROMPT | _NO_PARAMETERS if api else _NO_PARAMETERS
    parameters = {key: value for key, value in request.items() if key not in not_parameters}
    answer = _response(call, request, api)
    return ModelCall(
        request_id=call.request_id,
        path=call.path,
        version=call.version,
        model=_text(request.get("model")),
        started_ns=call.started_ns,
        ended_ns=call.ended_ns,
        status=call.status,
        error=(answer.error or problem)[:_ERROR_CHARACTERS],
        is_interrupted=not answer.is_whole and not (answer.error and call.is_complete),
        messages=messages,
        tools=tools,
        parameters=parameters | api.parameters_of(request) if api else parameters,
        user="" if user is None else _text(user),
        credential=call.credential,
        retry=call.retry,
        answers=tuple(answer.choices[index].answer() for index in sorted(answer.choices)),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
    )


def _prompt_of(request: dict[str, Any]) -> tuple[tuple[ChatMessage, ...] | None, tuple[ToolDefinition, ...]]:
    """Messages (None if they are not messages) and tools of a request for chat or for completions."""
    messages = request.get("messages")
    if messages is None:
        messages = []
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    return tuple(messages) if is_list else None, tuple(_objects(request.get("tools")))


class _ToolCall(Struct):
    id: str = ""
    name: str = ""
    arguments: str = ""


class _Choice(Struct):
    """A choice while it is assembled, with its tool calls and their indexes in the order in which they began."""

    content: str = ""
    refusal: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[int, _ToolCall]] = []
    finish_reason: str = ""

    def add(self, said: dict[str, Any], *, is_whole: bool) -> None:
        """Add a message, or a part of one."""
        content = said.get("content")
        if refused := refusal_of(said):
            self.refusal += refused
            content = [part for part in _objects(content) if part.get("type") != "refusal"] or None
        self.content += _text(content)
        # vLLM has renamed the key; some versions send both.
        self.reasoning += _text(said.get("reasoning")) or _text(said.get("reasoning_content"))
        for part in _objects(said.get("tool_calls")):
            self._add_tool_call(part, is_whole=is_whole)

    def _add_tool_call(self, part: dict[str, Any], *, is_whole: bool) -> None:
        """Add a tool call of a message. A part of a message goes on with the last call at its index, or with the last
        one if it has no index, unless it has another id."""
        index, call_id = part.get("index"), _text(part.get("id"))
        if isinstance(index, int):
            call = next((call for at, call in reversed(self.tool_calls) if at == index), None)
        else:
            index, call = self.tool_calls[-1] if self.tool_calls else (-1, None)
        if call is None or is_whole or (call_id and call_id != call.id != ""):
            index += not isinstance(part.get("index"), int)
            call = _ToolCall()
            self.tool_calls.append((index, call))
        # Some servers repeat id and name in each part.
        call.id = call.id or call_id
        call.name = call.name or _text(get_path(part, "function", "name"))
        call.arguments += _text(get_path(part, "function", "arguments"))

    def answer(self) -> ModelAnswer:
        calls = [call for _, call in sorted(self.tool_calls, key=itemgetter(0))]
        is_refusal = bool(self.refusal.strip()) and not self.content.strip() and not calls
        return ModelAnswer(
            "\n".join(filter(None, (self.content, self.refusal))),
            self.reasoning,
            tuple(
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ),
            self.finish_reason,
            is_refusal=is_refusal,
        )


class _Response(Struct):
    """A response while it is assembled. `is_whole`: nothing of it is missing."""

    choices: dict[int, _Choice] = {}
    is_whole: bool = False
    error: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def add(self, body: dict[str, Any]) -> None:
        """Add the body of a response, or an event of a stream."""
        self.error = self.error or error_in(body)
        for choice in _objects(body.get("choices")):
            index = choice.get("index")
            assembled = self.choices.setdefault(index if isinstance(index, int) else 0, _Choice())
            for key in ("message", "delta"):
                if isinstance(said := choice.get(key), dict):
                    assembled.add(said, is_whole=key == "message")
            assembled.content += _text(choice.get("text"))
            assembled.finish_reason = _text(choice.get("finish_reason")) or assembled.finish_reason
        self.count(body.get("usage"))

    def count(self, usage: Any) -> None:
        """Take over numbers of tokens, under the names of either interface."""
        for name in ("prompt_tokens", "input_tokens"):
            self.prompt_tokens = _count(get_path(usage, name), self.prompt_tokens)
        # Messages count the tokens of the cache separately.
        for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):
            if self.prompt_tokens is not None:
                self.prompt_tokens += _count(get_path(usage, name), 0) or 0
        for name in ("completion_tokens", "output_tokens"):
            self.completion_tokens = _count(get_path(usage, name), self.completion_tokens)


def _response(call: RecordedCall, request: dict[str, Any], api: ModuleType | None) -> _Response:
    if call.status == 0:
        return _Response(error="" if not call.is_complete else "no response began")
    response = _Response()
    if call.media_type.partition(";")[0].strip().lower() == "text/event-stream":
        _add_stream(response, call, request, api)
    else:
        body = _json(call.response)
        if isinstance(body, dict):
            response.is_whole = call.is_complete
            if api is not None:
                _add_items(response, body, api)
            else:
                response.add(body)
        elif call.is_complete and call.status < 400:
            response.error = "the response is not a JSON object"
    if call.status >= 400 and not response.error:
        text = call.response.decode("utf-8", "replace").strip()
        response.error = f"HTTP {call.status}{': ' if text else ''}{text}"
    return response


def _add_stream(response: _Response, call: RecordedCall, request: dict[str, Any], api: ModuleType | None) -> None:
    stream = api.Stream() if api is not None else None
    is_done = False
    for data in events(call.response):
        if data == b"[DONE]":
            is_done = True
        elif isinstance(event := _json(data), dict):
            if stream is None:
                response.add(event)
            else:
                response.error = response.error or error_in(event)
                stream.add(event)
    if stream is not None and api is not None:
        _add_items(response, stream.response(), api)
        response.is_whole = stream.is_whole
        return
    asked = request.get("n")
    count = asked if isinstance(asked, int) else 1
    ended = sum(bool(choice.finish_reason) for choice in response.choices.values())
    # Some clients close the connection as soon as they have seen the end of the answer.
    response.is_whole = is_done or ended >= max(count, len(response.choices), 1)


def _add_items(response: _Response, body: dict[str, Any], api: ModuleType) -> None:
    """Add the body of a response of another interface."""
    response.error = response.error or error_in(body)
    if isinstance(body.get(api.OUTPUT), list):
        answer: ModelAnswer = api.answer_of(body)
        said = {"refusal" if answer.is_refusal else "content": answer.content, "reasoning": answer.reasoning}
        choice = response.choices[0] = _Choice(finish_reason=answer.finish_reason)
        choice.add({**said, "tool_calls": list(answer.tool_calls)}, is_whole=True)
    response.count(body.get("usage"))


def events(stream: bytes) -> Iterator[bytes]:
    """The data of the events of a stream. Comments and other fields are left out; the last one may be cut off."""
    data: list[bytes] = []
    for line in stream.removeprefix(b"\xef\xbb\xbf").splitlines():
        if not line:
            if data:
                yield b"\n".join(data)
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    if data:
        yield b"\n".join(data)


def error_in(body: dict[str, Any]) -> str:
    """The text of the error that a body or an event reports; empty if it reports none."""
    error = body.get("error")
    if isinstance(error, dict):
        return _text(error.get("message")) or _text(error.get("code")) or _text(error.get("type")) or "an error"
    if body.get("object") == "error" or body.get("type") == "error":
        return _text(body.get("message")) or "an error"
    if error:
        return _text(error)
    detail = body.get("detail")
    return _text(detail) if detail and "choices" not in body else ""


def _json(body: bytes) -> Any:
    """The value of a JSON text; None if it is none. Lone surrogates are allowed."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        return None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    """A text, the texts of a list of parts, or other values as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
        return "\n".join(_text(part["text"]) for part in value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""


def _count(value: Any, before: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else before
