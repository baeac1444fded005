"""How the server makes tokens of a chat request, so that the policy is trained on the very prompts that it is sent.

vLLM does more than to apply the chat template: it reads the JSON text of earlier tool calls' arguments, and puts tool
definitions into an order of its own. Its own code does it here too. What the server was told of templates counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flywheel.errors import TrainError
from flywheel.trace import ChatMessage


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What `flywheel serve` tells vLLM about chat prompts. `template` is a file or the template itself; None is the
    model's own. `arguments` are given to the template with every request."""

    template: str | None = None
    content: str = "auto"
    arguments: dict[str, Any] = field(default_factory=dict)


def served_format(extra_args: Sequence[str]) -> ChatFormat:
    """The part of `serving.extra_args` that shapes prompts. Raises TrainError when it cannot be read."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--chat-template")
    parser.add_argument("--chat-template-content-format", default="auto")
    parser.add_argument("--default-chat-template-kwargs", type=json.loads, default={})
    found, _ = parser.parse_known_args([_dashed(argument) for argument in extra_args])
    if not isinstance(found.default_chat_template_kwargs, dict):
        parser.error("argument --default-chat-template-kwargs: it is no JSON object")
    return ChatFormat(found.chat_template, found.chat_template_content_format, found.default_chat_template_kwargs)


def template_of(chat: ChatFormat) -> str | None:
    """The text of the template that the server was told to use; None is the model's own. Raises TrainError."""
    from vllm.renderers.chat_utils import load_chat_template

    try:
        text: str | None = load_chat_template(chat.template)
    except Exception as error:  # vLLM's errors have a class of their own, and not always the same
        raise TrainError(
            f"read the chat template {chat.template}",
            " ".join(str(error).split())[:300],
            "Correct --chat-template in serving.extra_args; it must be readable for the worker too.",
        ) from error
    return text


async def token_ids(
    renderer: Any,
    prompt: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]],
    chat: ChatFormat,
    template: str | None,
) -> tuple[int, ...]:
    """What the engine is given for a chat request with these messages. Raises whatever vLLM or the template does."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.params import TokenizeParams

    request = ChatCompletionRequest(model="", messages=list(prompt), **({"tools": list(tools)} if tools else {}))
    offered = [tool.model_dump() for tool in request.tools] if request.tools else None
    about = request.build_chat_params(template, chat.content).with_defaults(
        {**chat.arguments, "tools": offered, "tokenize": False}
    )
    _, rendered = await renderer.render_messages_async(request.messages, about)
    # Whoever asks looks at the length: a prompt is never cut.
    whole = TokenizeParams(max_total_tokens=None, add_special_tokens=request.add_special_tokens)
    return tuple((await renderer.tokenize_prompt_async(rendered, whole))["prompt_token_ids"])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TrainError("render prompts as the server does", message, "Correct serving.extra_args.")


def _dashed(argument: str) -> str:
    """As vLLM does: `--chat_template` is `--chat-template`."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
