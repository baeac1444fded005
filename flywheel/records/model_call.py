"""One call of a model as `flywheel serve` recorded it, parsed. Plain data, no I/O."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from flywheel.records.trace import ChatMessage, ToolCall, ToolDefinition


class ModelAnswer(Struct, frozen=True):
    """One choice of a response. `tool_calls` are in the OpenAI chat form, with arguments as text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""


class ModelCall(Struct, frozen=True):
    """The request and the assembled response.

    - `version`: the adapter that answered, or `base`. `model`: the model as requested.
    - `status`: of the HTTP response, 0 if none began. `error`: why there is no answer, or why it ended early.
    - `is_interrupted`: the response was not sent to its end; `answers` have what was sent.
    - `messages`: as sent, in the OpenAI chat form; those of `/v1/responses` are converted, with the instructions.
    - `tools`: in the OpenAI chat form. `parameters`: the other keys of the request.
    - `user`: the `user` of the request. `credential`: a hash of the Authorization header, empty without one.
    - `retry`: which repetition by the client this is, 0 for the first request.
    - `answers`: by choice. The numbers of tokens are None where the response does not say them.
    """

    request_id: str
    path: str = "/v1/chat/completions"
    version: str = ""
    model: str = ""
    started_ns: int = 0
    ended_ns: int = 0
    status: int = 200
    error: str = ""
    is_interrupted: bool = False
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    parameters: dict[str, Any] = {}
    user: str = ""
    credential: str = ""
    retry: int = 0
    answers: tuple[ModelAnswer, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
