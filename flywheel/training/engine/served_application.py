"""vLLM's own OpenAI application on the engine's `AsyncLLM`, called in process.

It has the template, the parsers and the defaults of `flywheel serve`. No socket: a request is an ASGI call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from flywheel.training.engine.chat_rendering import ChatFormat

LOOK_SECONDS: Final = 2.0

T = TypeVar("T")


async def unless_dead(llm: Any, work: Coroutine[Any, Any, T]) -> T:
    """The result of a request to an `AsyncLLM`. Raises vLLM's EngineDeadError if the engine is dead: when its process
    is killed, vLLM 0.32 knows it, but leaves requests in flight waiting for ever."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=LOOK_SECONDS))[0]:
            if llm.errored:
                raise llm.dead_error
        return await task
    finally:
        task.cancel()


BASE_MODEL: Final = "flywheel-base-model"
"""The name of the base model in requests to the application. No adapter has it."""
CHAT_PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call, in tokens. `tokens` are those that it may generate (None: as many as fit), `context` has
    prompt and completion together. With `server_default`, a request without a limit has the server's."""

    context: int
    tokens: int | None = None
    server_default: bool = True


_limits: ContextVar[Limits | None] = ContextVar("limits", default=None)


class ServedApplication:
    """Build it with `build`.

    Attributes:
        context: The engine's context in tokens.
    """

    def __init__(self, llm: Any, app: Any) -> None:
        self._llm, self._app = llm, app
        self._adapters: dict[str, Any] = app.state.openai_serving_models.lora_requests
        self.context = int(llm.model_config.max_model_len)

    @classmethod
    async def build(cls, llm: Any, chat: ChatFormat) -> ServedApplication:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = ("generate",)
        arguments = _arguments(llm, chat)
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
        EngineDeadError if the engine is dead."""
        status, answer = await unless_dead(self._llm, self._ask(json.dumps(body).encode(), limits))
        if status >= 500 and self._llm.errored:
            raise self._llm.dead_error
        return status, json.loads(answer)

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


def _arguments(llm: Any, chat: ChatFormat) -> Any:
    """The server's arguments, as its command line gives them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.model = llm.model_config.model
    arguments.served_model_name = [BASE_MODEL]
    arguments.chat_template = chat.template
    arguments.chat_template_content_format = chat.content
    arguments.default_chat_template_kwargs = chat.arguments or None
    arguments.enable_auto_tool_choice = bool(chat.tool_parser)
    arguments.tool_call_parser = chat.tool_parser or None
    arguments.structured_outputs_config.reasoning_parser = chat.reasoning_parser
    arguments.disable_fastapi_docs = True
    return arguments


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
