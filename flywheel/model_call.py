"""A recorded call of a model, parsed. Plain data, no I/O."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class ModelAnswer(Struct, frozen=True):
    """One choice of a response; `tool_calls` in the OpenAI form, arguments as text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str = ""


class ModelCall(Struct, frozen=True):
    request_id: str
    path: str = "/v1/chat/completions"
    version: str = ""
    model: str = ""
    started_ns: int = 0
    ended_ns: int = 0
    status: int = 200
    error: str = ""
    is_interrupted: bool = False
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    parameters: dict[str, Any] = {}
    user: str = ""
    credential: str = ""
    retry: int = 0
    answers: tuple[ModelAnswer, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
