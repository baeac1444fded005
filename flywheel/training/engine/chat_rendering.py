"""Renders chat requests as the agent's server does: prompt tokens, sampling parameters, and parsed answers.

vLLM does more than apply the chat template: it parses the JSON text of earlier tool calls' arguments, reorders tool
definitions, takes defaults from the model's generation_config.json, and parses reasoning and tool calls out of
completions. This module calls vLLM's own code with the server's settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NoReturn

from flywheel.errors import TrainError
from flywheel.records.round import RoundTask
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import Exchange
from flywheel.training.data.samples import CallTokens, RecordedReply, Sample, identity_of, message_identity, timelines
from flywheel.training.engine.target_message import NoSampleError, Target, as_context

PART: Final = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of a token that is only a part of a character."""
MOST_PARTS: Final = 8
"""More tokens than one character has."""
NO_REASONING: Final = "its reasoning: the chat template writes none"
"""What a sample lacks whose template has no place for the reasoning of its message."""
_READS_THINKING: Final = re.compile(r"message(\.thinking\b|\[['\"]thinking['\"]\])")
_THINKING_TOO: Final = (
    "{%- set with = namespace(thinking=[]) -%}{%- for message in messages -%}"
    "{%- set same = not (loop.last and message.reasoning) -%}"
    "{%- set with.thinking = with.thinking + [message if same else dict(message, thinking=message.reasoning)] -%}"
    "{%- endfor -%}{%- set messages = with.thinking -%}{{- '' }}"
)
"""Before a template: the last message has its reasoning as `thinking`, too."""

POLICY_SAMPLING: Final[Mapping[str, float]] = MappingProxyType(
    {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
)
"""Parameters of rollouts to learn from, whatever the server's defaults are: the logprobs are then the policy's."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The settings of `flywheel serve` that concern chats.

    `template` is a file or the template itself; None is the model's own. `arguments` are given to the template with
    every request. An empty parser is none; a plugin is a file that adds some. `generation` is where defaults of
    sampling come from (`auto`: the model's folder), `overrides` what takes their place. A `max_model_len` of None is
    the model's own context.
    """

    template: str | None = None
    content: str = "auto"
    arguments: dict[str, Any] = field(default_factory=dict)
    tool_parser: str = ""
    reasoning_parser: str = ""
    tool_plugin: str = ""
    reasoning_plugin: str = ""
    generation: str = "auto"
    overrides: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None

    def template_of(self, model: str) -> str:
        """The chat template in words, for an error."""
        return (
            f"the chat template {' '.join(self.template.split())[:200]}"
            if self.template
            else f"{model}'s chat template"
        )


def served_format(arguments: Sequence[str], *, max_model_len: int | None = None) -> ChatFormat:
    """The server's arguments that determine prompts, sampling and answers. Raises TrainError when it cannot
    be read."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--chat-template")
    parser.add_argument("--chat-template-content-format", default="auto")
    parser.add_argument("--default-chat-template-kwargs", type=json.loads, default={})
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    parser.add_argument("--tool-call-parser", default="")
    parser.add_argument("--reasoning-parser", default="")
    parser.add_argument("--tool-parser-plugin", default="")
    parser.add_argument("--reasoning-parser-plugin", default="")
    parser.add_argument("--generation-config", default="auto")
    parser.add_argument("--override-generation-config", type=json.loads, default={})
    found, _ = parser.parse_known_args([_dashed(argument) for argument in arguments])
    for name in ("default_chat_template_kwargs", "override_generation_config"):
        if not isinstance(getattr(found, name), dict):
            parser.error(f"argument {_dashed(f'--{name}')}: it is no JSON object")
    return ChatFormat(
        template=found.chat_template,
        content=found.chat_template_content_format,
        arguments=found.default_chat_template_kwargs,
        # Without the switch, vLLM leaves tool calls in the text.
        tool_parser=found.tool_call_parser if found.enable_auto_tool_choice else "",
        reasoning_parser=found.reasoning_parser,
        tool_plugin=found.tool_parser_plugin,
        reasoning_plugin=found.reasoning_parser_plugin,
        generation=found.generation_config,
        overrides=found.override_generation_config,
        max_model_len=max_model_len,
    )


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A completion as an agent receives it: `text` without reasoning, and the names of the called `tools`."""

    text: str
    tools: tuple[str, ...] = ()


class ServedChat:
    """The chat endpoint of the server, as far as it depends on neither weights nor HTTP, with a `context` of so many
    tokens. Raises TrainError for a template or a parser that vLLM does not have."""

    def __init__(self, chat: ChatFormat, model_config: Any, renderer: Any, context: int) -> None:
        self._context = context
        self._chat, self._model_config, self._renderer = chat, model_config, renderer
        self._template = _template_of(chat)
        if self._template is None and not renderer.get_tokenizer().chat_template:
            raise TrainError(
                f"render prompts for {model_config.model}",
                "its tokenizer has no chat template",
                "Use an instruction-tuned model, or add a chat template to its directory.",
            )
        self._parser = self._parsers()
        self._defaults = model_config.get_diff_sampling_param()
        self._texts: dict[int, str] = {}

    async def encode(self, task: RoundTask) -> tuple[int, ...]:
        """What the engine is given for the task's prompt. Raises whatever vLLM or the template does."""
        return (await self._rendered(_request(task)))[1]

    async def writes_tools(self, task: RoundTask) -> bool:
        """Whether the task's prompt depends on its tools."""
        bare = task.model_copy(update={"exchange": replace(task.exchange, tools=())})
        return await self.encode(task) != await self.encode(bare)

    async def _rendered(self, request: Any) -> tuple[str, tuple[int, ...]]:
        """The messages of a request as text and as tokens."""
        text = await self._text(request, self._about(request))
        return text, await self._tokens(text, request)

    async def _text(self, request: Any, about: Any) -> str:
        _, rendered = await self._renderer.render_messages_async(request.messages, about)
        return str(rendered["prompt"])

    async def _tokens(self, text: str, request: Any) -> tuple[int, ...]:
        from vllm.renderers.params import TokenizeParams

        # Callers check the length: a prompt is never truncated.
        whole = TokenizeParams(max_total_tokens=None, add_special_tokens=request.add_special_tokens)
        return tuple((await self._renderer.tokenize_prompt_async({"prompt": text}, whole))["prompt_token_ids"])

    async def recorded_reply(self, task: RoundTask, *, empty_reasoning: bool) -> RecordedReply:
        """The task's reply as training samples: each message of the model, up to and including the first token that
        ends its turn, follows the prompt that the server would have rendered for it. Messages with the weight 0 are
        context.

        `empty_reasoning` permits messages without reasoning where the template writes some. Raises NoSampleError for
        a reply that cannot be trained on, and whatever vLLM or the template raises.
        """
        calls: list[CallTokens] = []
        without: tuple[str, ...] = ()
        for place, message in enumerate(task.reply):
            if message.get("role") == "assistant" and message.get("weight") != 0:
                before = [*task.prompt, *map(as_context, task.reply[:place])]
                call, is_whole = await self._recorded_message(task, before, Target.of(message), empty_reasoning)
                calls.append(call)
                without = without if is_whole else (NO_REASONING,)
        if not calls:
            raise NoSampleError("it has no message of the model to train on")
        samples = (Sample(sample.token_ids, sample.loss_mask) for sample in timelines(calls).samples)
        return RecordedReply(task.task_id, tuple(samples), without)

    async def _recorded_message(
        self, task: RoundTask, before: Sequence[ChatMessage], recorded: Target, empty_reasoning: bool
    ) -> tuple[CallTokens, bool]:
        """A message behind others, and whether all that was recorded of it is in its tokens."""
        tokenizer, ends = self._renderer.get_tokenizer(), self._end_of_turn()
        end_texts = tokenizer.convert_ids_to_tokens(sorted(ends))
        special = {*_special_tokens(tokenizer), *end_texts}
        if found := next((token for text in recorded.strings for token in special if token in text), None):
            raise NoSampleError(f"its text holds the special token {found}")
        request = _request(task, before)
        prompt, prompt_ids = await self._rendered(request)

        async def written(target: Target) -> str:
            """What the template writes behind the prompt until the turn ends; empty if it changes the prompt."""
            asked = _request(task, [*before, target.message], add_generation_prompt=False)
            whole = await self._text(asked, self._reading_thinking(self._about(asked)))
            own = whole.removeprefix(prompt) if whole.startswith(prompt) else ""
            return min((own[: own.find(end) + len(end)] for end in end_texts if end in own), key=len, default=own)

        target, text, missing = await _as_written(recorded, written)
        if not (recorded.reasoning or empty_reasoning):
            reasoned, shown = target.marked(reasoning=True), ""
            with contextlib.suppress(Exception):  # a template may refuse reasoning in such a message
                shown = await written(reasoned)
            if reasoned.reasoning in shown:
                raise NoSampleError("its reasoning was not recorded (training.sft.reasoning)")
        if not text:
            closed = _request(task, before, add_generation_prompt=False)
            tail = prompt.removeprefix(await self._text(closed, self._about(closed)))
            raise NoSampleError(f"the chat template does not write it behind its prompt, which ends in {tail!r}")
        if missing:
            raise NoSampleError(f"the chat template does not write its {missing}")
        whole_ids = await self._tokens(prompt + text, request)
        if whole_ids[: len(prompt_ids)] == prompt_ids:
            own = whole_ids[len(prompt_ids) :]
        else:  # a token of the prompt goes on into the text
            own = tuple(tokenizer.encode(text, add_special_tokens=False))
        end = next((place for place, token in enumerate(own) if token in ends), None)
        if end is None:
            raise NoSampleError("the chat template ends it with no token at which the server stops")
        own = own[: end + 1]
        about = identity_of({"tools": task.exchange.tools, "messages": before}), message_identity(target.message)
        nothing = (None,) * len(own)
        is_whole = not recorded.reasoning or target != recorded.without_reasoning
        return CallTokens(prompt_ids, own, nothing, nothing, *about), is_whole

    def _reading_thinking(self, about: Any) -> Any:
        """The same for a template that reads reasoning as `thinking`, a key that vLLM drops: the last message has its
        reasoning under both."""
        from vllm.renderers.hf import resolve_chat_template_content_format

        tokenizer, tools = self._renderer.get_tokenizer(), about.chat_template_kwargs.get("tools")
        template = tokenizer.get_chat_template(about.chat_template, tools=tools)
        if _READS_THINKING.search(template) is None:
            return about
        form = resolve_chat_template_content_format(
            template, tools, about.chat_template_content_format, tokenizer, model_config=self._model_config
        )
        return replace(about, chat_template=_THINKING_TOO + template, chat_template_content_format=form)

    async def check_targets(self) -> None:
        """Raise TrainError for a template with which no recorded message can be a sample, whatever it says."""
        asked = {"role": "user", "content": "Hello"}
        refused = []
        for reasoning in ("", "A greeting."):
            answer = {"role": "assistant", "content": "Hi", "reasoning": reasoning}
            task = RoundTask(task_id="", exchange=Exchange("Hello", ""), prompt=[asked], reply=(answer,))
            try:
                await self.recorded_reply(task, empty_reasoning=True)
            except NoSampleError as reason:
                refused.append(str(reason))
            except Exception:  # it refuses this question or answer, and perhaps no other
                return
            else:
                return
        model = self._model_config.model
        raise TrainError(
            f"train on recorded replies with {self._chat.template_of(model)}",
            f"no reply can be a sample: {refused[0]}",
            "Name another template with --chat-template in serving.extra_args, or train with GRPO.",
        )

    def _end_of_turn(self) -> set[int]:
        """The tokens at which the server ends an answer."""
        configured = self._model_config.try_get_generation_config().get("eos_token_id")
        others = configured if isinstance(configured, list) else [configured]
        return {token for token in (self._renderer.get_tokenizer().eos_token_id, *others) if token is not None}

    def length(self, text: str) -> int:
        """Number of tokens of an answer with this text, including the end of the turn; 0 for no text."""
        return len(self._renderer.get_tokenizer().encode(text, add_special_tokens=False)) + 1 if text else 0

    def texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each token. Of tokens that only together are a character, the last one has its text."""
        from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

        tokenizer = self._renderer.get_tokenizer()
        if unknown := list(set(token_ids) - self._texts.keys()):
            self._texts.update(zip(unknown, convert_ids_list_to_tokens(tokenizer, unknown), strict=True))
        texts = [self._texts[token] for token in token_ids]
        begin = 0
        for place, text in enumerate(texts):
            if PART not in text:
                begin = place + 1
                continue
            begin = max(begin, place + 1 - MOST_PARTS)
            if PART not in (whole := tokenizer.decode(list(token_ids[begin : place + 1]))):
                texts[begin : place + 1] = [*[""] * (place - begin), whole]
                begin = place + 1
        return tuple(texts)

    def sampling(self, task: RoundTask, prompt_tokens: int, *, temperature: float | None, seed: int) -> Any:
        """vLLM's parameters for the task as an agent asks it: with the server's defaults and its limits.
        `temperature` None is the server's."""
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

        request = self._adjusted(_request(task, temperature=temperature, seed=seed))
        model_config = self._model_config
        # As in vLLM's chat endpoint: a limit set for the server applies, the model's own default does not.
        if model_config.generation_config in ("auto", "vllm"):
            bound = (model_config.override_generation_config or {}).get("max_new_tokens")
        else:
            bound = self._defaults.get("max_tokens")
        longest = get_max_tokens(self._context, None, prompt_tokens, self._defaults, bound)
        return request.to_sampling_params(longest, self._defaults)

    def keeps_special_tokens(self, task: RoundTask) -> bool:
        """Whether the parsers need the special tokens in the text of an answer."""
        return not self._adjusted(_request(task)).skip_special_tokens

    def answer(self, task: RoundTask, prompt: Sequence[int], text: str, tokens: Sequence[int]) -> ParsedAnswer:
        """The parsed completion of the task's prompt, as the server returns it."""
        if self._parser is None:
            return ParsedAnswer(text)
        request = _request(task)
        parser = self._parser_for(request)
        parser.set_prompt_token_ids(list(prompt))
        _, content, calls = parser.parse(
            text, request, enable_auto_tools=bool(self._chat.tool_parser), model_output_token_ids=tokens
        )
        return ParsedAnswer(content or "", tuple(call.name for call in calls or ()))

    def _parsers(self) -> Any:
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        chat = self._chat
        try:
            if chat.tool_plugin:
                ToolParserManager.import_tool_parser(chat.tool_plugin)
            if chat.reasoning_plugin:
                ReasoningParserManager.import_reasoning_parser(chat.reasoning_plugin)
            return ParserManager.get_parser(
                tool_parser_name=chat.tool_parser or None,
                reasoning_parser_name=chat.reasoning_parser or None,
                enable_auto_tools=bool(chat.tool_parser),
                model_name=self._model_config.model,
                tokenizer=self._renderer.get_tokenizer(),
            )
        except TypeError as error:
            raise TrainError(
                "parse answers as the server does",
                " ".join(str(error).split())[:300],
                "Correct serving.tool_call_parser and serving.reasoning_parser, or serving.extra_args.",
            ) from error

    def _adjusted(self, request: Any) -> Any:
        # vLLM adjusts requests without tools for reasoning parsers alone.
        parsers = self._parser
        if parsers is None or not (request.tools or parsers.reasoning_parser_cls or parsers.always_adjust_request):
            return request
        return self._parser_for(request).adjust_request(request)

    def _parser_for(self, request: Any) -> Any:
        return self._parser(
            self._renderer.get_tokenizer(),
            request.tools,
            chat_template_kwargs=self._about(request).chat_template_kwargs,
            model_config=self._model_config,
        )

    def _about(self, request: Any) -> Any:
        offered = [tool.model_dump() for tool in request.tools] if request.tools else None
        return request.build_chat_params(self._template, self._chat.content).with_defaults(
            {**self._chat.arguments, "tools": offered, "tokenize": False}
        )


def _request(task: RoundTask, messages: Sequence[ChatMessage] | None = None, **values: Any) -> Any:
    """A chat request of the task's prompt, or of other `messages`, with its tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tools = {"tools": list(task.exchange.tools)} if task.exchange.tools else {}
    # vLLM renames keys of the messages that it is given.
    own = [{**message} for message in messages or task.prompt]
    return ChatCompletionRequest(model="", messages=own, **tools, **values)


async def _as_written(recorded: Target, written: Callable[[Target], Awaitable[str]]) -> tuple[Target, str, str]:
    """The form of a message that a template writes, its text, and the part that this lacks. The text is empty if the
    template writes no form behind the prompt."""
    for target, may_lack in recorded.forms:
        text, missing = await written(target), ""
        if text:
            # A value may be in the text by chance, and a mark is not.
            marked = target.marked(reasoning=bool(target.reasoning))
            missing = target.missing_in(text) or marked.missing_in(await written(marked))
            if missing != may_lack:
                break
    return target, text, missing


def _special_tokens(tokenizer: Any) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def _template_of(chat: ChatFormat) -> str | None:
    """The text of the server's configured template; None is the model's own."""
    from vllm.renderers.chat_utils import load_chat_template

    try:
        text: str | None = load_chat_template(chat.template)
    except Exception as error:  # vLLM raises its own error classes, which differ between versions
        raise TrainError(
            f"read the chat template {chat.template}",
            " ".join(str(error).split())[:300],
            "Correct --chat-template in serving.extra_args; it must be readable for the worker too.",
        ) from error
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TrainError("answer as the server does", message, "Correct serving.extra_args.")


def _dashed(argument: str) -> str:
    """As vLLM does: `--chat_template` is `--chat-template`."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
