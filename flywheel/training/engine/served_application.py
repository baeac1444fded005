"""The chat handler of vLLM's own OpenAI server on the engine's `AsyncLLM`, called in process.

It has the template, the parsers and the defaults of `flywheel serve`. Neither a socket nor vLLM's web application is
between: the latter takes longer than the rest of a short reply.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from argparse import Namespace
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NoReturn, TypeVar

from flywheel.errors import TrainError

LOOK_SECONDS: Final = 2.0

T = TypeVar("T")


async def unless_dead(
    llm: Any, work: Coroutine[Any, Any, T], *, request_id: str = "", until: float | None = None
) -> T:
    """The result of a request to an `AsyncLLM`. From `until` (the loop's time) on it is aborted, and its result is
    what was generated before. Raises vLLM's EngineDeadError if the engine is dead: when its process is killed, vLLM
    0.32 knows it, but leaves requests in flight waiting for ever."""
    task, now = asyncio.ensure_future(work), asyncio.get_running_loop().time
    try:
        left = LOOK_SECONDS if until is None else until - now()
        while not (await asyncio.wait((task,), timeout=min(left, LOOK_SECONDS)))[0]:
            if llm.errored:
                raise llm.dead_error
            if until is not None and (left := until - now()) <= 0:
                # Again, because a request that is still being rendered is not known yet.
                await llm.abort(request_id)
                left = LOOK_SECONDS
        return await task
    finally:
        task.cancel()


BASE_MODEL: Final = "flywheel-base-model"
"""The name of the base model in requests to the application. No adapter has it."""
TIME_UP: Final = "abort"
"""vLLM's finish reason of a message that was cut when its time was up."""
OF_CHATS: Final = (
    "chat_template", "chat_template_content_format", "default_chat_template_kwargs", "cohere_format", "response_role",
    "enable_auto_tool_choice", "exclude_tools_when_tool_choice_none", "tool_call_parser", "tool_parser_plugin",
    "tool_strict_level", "reasoning_parser", "reasoning_parser_plugin", "generation_config",
    "override_generation_config", "max_model_len",
)  # fmt: skip
"""The server's arguments that determine prompts, sampling and answers."""


def server_arguments(given: Sequence[str], model: str) -> Namespace:
    """vLLM's arguments, of which those `OF_CHATS` are the given ones of a server of this model; its plugins for
    parsers are loaded. Raises TrainError for arguments that the server refuses."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.parser import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc, unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = make_arg_parser(Parser(add_help=False))
    arguments: Namespace
    try:
        asked, arguments = parser.parse_args([*given]), parser.parse_args([])
        for name in OF_CHATS:
            setattr(arguments, name, getattr(asked, name))
        for name in ("default_chat_template_kwargs", "override_generation_config"):
            if not isinstance(getattr(arguments, name) or {}, dict):
                parser.error(f"argument --{name.replace('_', '-')}: it is no JSON object")
        if arguments.tool_parser_plugin:
            ToolParserManager.import_tool_parser(arguments.tool_parser_plugin)
        if arguments.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(arguments.reasoning_parser_plugin)
        auto = arguments.enable_auto_tool_choice
        ParserManager.get_parser(arguments.tool_call_parser, arguments.reasoning_parser, auto, model)
    except Exception as error:  # plugins raise anything
        raise TrainError(
            "answer as the server does",
            " ".join(str(error).split())[:300] or type(error).__name__,
            "Correct serving.extra_args, serving.tool_call_parser and serving.reasoning_parser.",
        ) from error
    arguments.structured_outputs_config.reasoning_parser = arguments.reasoning_parser or ""
    arguments.model, arguments.served_model_name = model, [BASE_MODEL]
    return arguments


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call, in tokens. `tokens` are those that it may generate (None: as many as fit), `context` has
    prompt and completion together. With `server_default`, a request without a limit has the server's. `until` (the
    loop's time) the message may grow; it is then cut."""

    context: int
    tokens: int | None = None
    server_default: bool = True
    until: float | None = None


_limits: ContextVar[Limits | None] = ContextVar("limits", default=None)


class ServedApplication:
    """Build it with `build`.

    Attributes:
        context: The engine's context in tokens.
    """

    def __init__(self, llm: Any, state: Any) -> None:
        self._llm, self._chat = llm, state.openai_serving_chat
        self._numbers = itertools.count()
        self._adapters: dict[str, Any] = state.openai_serving_models.lora_requests
        # What vLLM's answer to an invalid request asks of the request.
        self._asked_here: Any = SimpleNamespace(app=SimpleNamespace(state=state), state=SimpleNamespace())
        self.context = int(llm.model_config.max_model_len)
        _limit_calls(self._chat)

    @classmethod
    async def build(cls, llm: Any, arguments: Namespace) -> ServedApplication:
        """`arguments` are those of `server_arguments`."""
        from starlette.datastructures import State
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state

        state = State()
        await init_app_state(llm, state, arguments, ("generate",))
        return cls(llm, state)

    def add(self, adapter: Any) -> None:
        """Serve an adapter (a `LoRARequest`) that the engine has loaded, under its name."""
        self._adapters[adapter.lora_name] = adapter

    def remove(self, name: str) -> None:
        self._adapters.pop(name, None)

    async def chat(self, body: Mapping[str, Any], limits: Limits) -> tuple[int, dict[str, Any]]:
        """Status and body of the response to a chat request. Cancelling this aborts the generation. Raises vLLM's
        EngineDeadError if the engine is dead, and TimeoutError if the time was up before the first token."""
        if limits.until is not None and asyncio.get_running_loop().time() >= limits.until:
            raise TimeoutError
        number = f"{next(self._numbers)}"
        # A copy: vLLM changes the messages that it renders.
        asking = self._ask(json.loads(json.dumps({**body, "request_id": number})), limits)
        status, found = await unless_dead(self._llm, asking, request_id=f"chatcmpl-{number}", until=limits.until)
        if status >= 500 and self._llm.errored:
            raise self._llm.dead_error
        if limits.until is not None and status == 200 and not found["choices"][0]["token_ids"]:
            raise TimeoutError
        return status, found

    async def _ask(self, body: dict[str, Any], limits: Limits) -> tuple[int, dict[str, Any]]:
        """What vLLM's route of chat requests would answer: validation, handler, and the responses to their errors."""
        from fastapi.exceptions import RequestValidationError
        from pydantic import ValidationError
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
        from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler

        _limits.set(limits)
        try:
            found = await self._chat.create_chat_completion(ChatCompletionRequest.model_validate(body))
            _refuse_not_finite(found)
        except ValidationError as error:
            # FastAPI's name of a place begins with the part of the request.
            wrong = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            response = await validation_exception_handler(self._asked_here, RequestValidationError(wrong))
            return response.status_code, json.loads(response.body)
        except Exception as error:
            found = create_error_response(error)
        status = found.error.code if isinstance(found, ErrorResponse) else 200
        return status, found.model_dump()


def _refuse_not_finite(found: Any) -> None:
    """Raise ValueError where a token's logprob is not a number, which JSON cannot have: vLLM's route refuses it."""
    for choice in getattr(found, "choices", ()):
        drawn = choice.logprobs.content if choice.logprobs is not None else ()
        if not all(math.isfinite(token.logprob) for token in drawn):
            raise ValueError("Out of range float values are not JSON compliant")


def _limit_calls(chat: Any) -> None:
    """Make the chat handler keep to `Limits`, which depend on the length of the rendered prompt."""
    from vllm.exceptions import VLLMValidationError

    render = chat.render_chat_request
    default = chat.default_sampling_params.get("max_tokens")

    async def render_within_limits(request: Any) -> Any:
        rendered = await render(request)
        limits = _limits.get()
        if limits is None or not isinstance(rendered, tuple):
            return rendered
        length = len(rendered[1][0]["prompt_token_ids"])
        room = limits.context - length
        if room <= 0:
            raise VLLMValidationError(
                f"This model's maximum context length is {limits.context} tokens. However, your prompt contains"
                f" {length} input tokens, which exceeds this limit even without any output tokens. Please reduce the"
                " length of the input prompt.",
                parameter="input_tokens",
                value=length,
            )
        asked = request.max_completion_tokens
        if asked is None:
            asked = request.max_tokens
        if asked is None and limits.server_default:
            asked = default
        request.max_completion_tokens = min(each for each in (asked, limits.tokens, room) if each is not None)
        return rendered

    chat.render_chat_request = render_within_limits
