"""vLLM's own OpenAI application on the engine's `AsyncLLM`, called in process.

It has the template, the parsers and the defaults of `flywheel serve`. No socket: a request is an ASGI call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
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
CHAT_PATH: Final = "/v1/chat/completions"
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
    arguments.model, arguments.served_model_name, arguments.disable_fastapi_docs = model, [BASE_MODEL], True
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

    def __init__(self, llm: Any, app: Any) -> None:
        self._llm, self._app = llm, app
        self._numbers = itertools.count()
        self._adapters: dict[str, Any] = app.state.openai_serving_models.lora_requests
        self.context = int(llm.model_config.max_model_len)

    @classmethod
    async def build(cls, llm: Any, arguments: Namespace) -> ServedApplication:
        """`arguments` are those of `server_arguments`."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = ("generate",)
        app = build_app(arguments, tasks, llm.model_config)
        await init_app_state(llm, app.state, arguments, tasks)
        # Handlers of engine errors stop the server by this attribute. The engine's actor decides about its own end.
        app.state.server = SimpleNamespace(should_exit=False)
        _limit_calls(app.state.openai_serving_chat)
        return cls(llm, app)

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
        asking = self._ask(json.dumps({**body, "request_id": number}).encode(), limits)
        status, answer = await unless_dead(self._llm, asking, request_id=f"chatcmpl-{number}", until=limits.until)
        if status >= 500 and self._llm.errored:
            raise self._llm.dead_error
        found = json.loads(answer)
        if limits.until is not None and status == 200 and not found["choices"][0]["token_ids"]:
            raise TimeoutError
        return status, found

    async def _ask(self, body: bytes, limits: Limits) -> tuple[int, bytes]:
        status, parts = 500, list[bytes]()
        unread, gone = [body], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": "POST",
            "path": CHAT_PATH,
            "raw_path": CHAT_PATH.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
            "state": {},
        }
        before = _limits.set(limits)
        try:
            call = asyncio.ensure_future(self._app(scope, receive, send))
        finally:
            _limits.reset(before)
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            # vLLM aborts a request when its client disconnects; a cancelled route would leave it running.
            gone.set()
            with contextlib.suppress(Exception):
                await call
            raise
        except Exception:
            # The application has answered, and raised the error again for the server's log.
            if not parts:
                raise
        return status, b"".join(parts)


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
