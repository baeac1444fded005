"""Renders prompts and recorded replies as the agent's server does, and says what of a recorded message, a target of
training, a rendered text lacks.

vLLM does more than apply the chat template: it parses the JSON text of earlier tool calls' arguments, and reorders
tool definitions. This module calls vLLM's own code with the server's arguments.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from flywheel.errors import TrainError
from flywheel.records.round import RoundTask
from flywheel.records.tool_calls import arguments_text
from flywheel.records.trace import ChatMessage, ToolCall, get_path, reasoning_of
from flywheel.records.verdict import Exchange
from flywheel.serving.server.model_parsers import template_words
from flywheel.training.data.samples import CallTokens, RecordedReply, Sample, identity_of, message_identity, timelines

_TAGGED: Final = re.compile(r"\s*<think>(.*?)</think>(.*)\Z", re.DOTALL)
_OURS: Final = frozenset({"weight", "reasoning", "reasoning_content", "thinking", "reasoning_sent"})
"""Keys of a message that say what is trained, and those of the reasoning."""


class NoSampleError(Exception):
    """A recorded reply that cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A message of the model. `calls` are names with parsed arguments; `rest` are its other keys, as recorded."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, Any], ...]
    rest: ChatMessage

    @classmethod
    def of(cls, message: ChatMessage) -> Self:
        """Reasoning in tags at the beginning of the text is no part of it. Raises NoSampleError for a message that
        says nothing, and for calls whose arguments are no JSON object."""
        text, reasoning, calls = str(message.get("content") or ""), reasoning_of(message), []
        if not reasoning and (tagged := _TAGGED.match(text)) is not None:
            reasoning, text = tagged[1].strip(), tagged[2].lstrip()
        for call in message.get("tool_calls") or ():
            name, arguments = str(get_path(call, "function", "name")), arguments_of(call)
            if arguments is None:
                raise NoSampleError(f"the arguments of its call of {name} are no JSON object")
            calls.append((name, arguments))
        if not (text.strip() or reasoning.strip() or calls):
            raise NoSampleError("a message of the model says nothing")
        return cls(text, reasoning, tuple(calls), {key: message[key] for key in message.keys() - _OURS})

    @property
    def message(self) -> ChatMessage:
        """It as a server gets it."""
        given = self.rest.get("tool_calls") or ()
        calls = [_with(call, *called) for call, called in zip(given, self.calls, strict=True)]
        return {
            **self.rest,
            "content": self.text or (self.rest.get("content") and ""),
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning": self.reasoning} if self.reasoning else {}),
        }

    @property
    def without_reasoning(self) -> Self:
        return replace(self, reasoning="")

    @property
    def forms(self) -> list[tuple[Self, str]]:
        """The forms in which a template may write it, the best one first: with its reasoning under a key, with its
        text as recorded, of which tags with the reasoning may be a part, and without its reasoning. Where the part
        beside a form is missing, the next one is tried."""
        if not self.reasoning:
            return [(self, "")]
        text = str(self.rest.get("content") or "")
        tagged = [(replace(self, text=text, reasoning=""), "text")] if text != self.text else []
        return [(self, "reasoning"), *tagged, (self.without_reasoning, "")]

    @property
    def strings(self) -> Iterator[str]:
        """All texts in it, those of the arguments decoded."""
        yield from (self.text, self.reasoning)
        # Some templates write the ids of calls.
        yield from (str(call.get("id") or "") for call in self.rest.get("tool_calls") or ())
        for name, arguments in self.calls:
            yield name
            yield from (each for each in _leaves(arguments) if isinstance(each, str))

    def marked(self, *, reasoning: bool) -> Self:
        """A message of the same form whose texts and numbers are each there only once."""
        numbers = itertools.count(734_000)

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                return f"mark{next(numbers)}x" if value.strip() else value
            return value if isinstance(value, bool | None) else type(value)(next(numbers))

        calls = tuple((name, _mapped(arguments, mark)) for name, arguments in self.calls)
        return replace(self, text=mark(self.text), reasoning=mark("a") if reasoning else "", calls=calls)

    def missing_in(self, written: str) -> str:
        """The first part that a text does not have: `text`, `calls` or `reasoning`; empty if it has all."""
        if self.reasoning.strip() not in written:
            return "reasoning"
        if self.text.strip() not in written:
            return "text"
        for name, arguments in self.calls:
            if name not in written or not all(_is_in(each, written) for each in _leaves(arguments)):
                return "calls"
        return ""


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object."""
    try:
        value = json.loads(arguments_text(get_path(call, "function", "arguments")))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_context(message: ChatMessage) -> ChatMessage:
    """A message of a reply as the agent sends it with its next request."""
    shown = {key: value for key, value in message.items() if key not in _OURS}
    if message.get("reasoning_sent", True) and (reasoning := reasoning_of(message)):
        shown["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        parsed = [(call, arguments_of(call)) for call in calls]
        shown["tool_calls"] = [
            call if arguments is None else _with(call, call["function"]["name"], arguments)
            for call, arguments in parsed
        ]
    return shown


def _with(call: ToolCall, name: str, arguments: dict[str, Any]) -> ToolCall:
    return {**call, "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of JSON with its leaves changed."""
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list) else change(value)


def _leaves(value: Any) -> Iterator[Any]:
    """The names and the leaves of a value of JSON."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _is_in(value: Any, written: str) -> bool:
    """Whether a leaf is in a text: as it is, as JSON, or as Python writes it."""
    if isinstance(value, str):
        forms = (
            value.strip(),
            *(json.dumps(value, ensure_ascii=flag)[1:-1] for flag in (False, True)),
            repr(value)[1:-1],
        )
    else:
        forms = json.dumps(value), str(value)
    return any(form in written for form in forms)


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


class ServedChat:
    """The server's rendering of chats, with its `arguments` (`server_arguments`). `template` is its chat template in
    words, for an error. Raises TrainError for one that vLLM does not read."""

    def __init__(self, arguments: Namespace, model_config: Any, renderer: Any) -> None:
        self._arguments, self._model_config, self._renderer = arguments, model_config, renderer
        self._template = _template_of(arguments.chat_template)
        self.template = template_words(model_config.model, arguments.chat_template)
        if self._template is None and not renderer.get_tokenizer().chat_template:
            raise TrainError(
                f"render prompts for {model_config.model}",
                "its tokenizer has no chat template",
                "Use an instruction-tuned model, or add a chat template to its directory.",
            )
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
        added = tokenizer.added_tokens_decoder.values()
        special = {*(str(token) for token in added if token.special), *end_texts}
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
        raise TrainError(
            f"train on recorded replies with {self.template}",
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

    def _about(self, request: Any) -> Any:
        from vllm.entrypoints.launchers.cli_args import resolve_default_chat_template_kwargs

        offered = [tool.model_dump() for tool in request.tools] if request.tools else None
        defaults = resolve_default_chat_template_kwargs(self._arguments)
        return request.build_chat_params(self._template, self._arguments.chat_template_content_format).with_defaults(
            {**defaults, "tools": offered, "tokenize": False}
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


def _template_of(given: str | None) -> str | None:
    """The text of the server's configured template; None is the model's own."""
    from vllm.renderers.chat_utils import load_chat_template

    try:
        text: str | None = load_chat_template(given)
    except Exception as error:  # vLLM raises its own error classes, which differ between versions
        raise TrainError(
            f"read the chat template {given}",
            " ".join(str(error).split())[:300],
            "Correct --chat-template in serving.extra_args; it must be readable for the worker too.",
        ) from error
    return text
