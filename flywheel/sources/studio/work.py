"""What an agent did inside one reply: its model calls and tool calls, each read once, and what they say together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from flywheel.exclusion import TrainedModels
from flywheel.request_id import BASE_VERSION, mark_of
from flywheel.sources.studio import attributes as at
from flywheel.sources.studio import outcome
from flywheel.sources.studio.messages import FINISH_FUNCTIONS, Message, chat_of, text_of, without_finish
from flywheel.sources.studio.span import Span, SpanKind, in_order
from flywheel.trace import ChatMessage, SpanStatus


class Work:
    """The spans of one agent in the order they began. Making it raises ReprError where what was said is garbled."""

    def __init__(self, own: Sequence[Span]) -> None:
        self.own = own
        self.models: list[Span] = []
        self.said: list[Message | None] = []
        """What each model call answered."""
        self.tools: list[at.ToolUse] = []
        self._aside: list[int] = []
        """The model calls that only prepared for later ones: the agent had them fill a structure (a search query made
        of the question, a summary of what no longer fits), and no part of that is its conversation with the user."""
        for span in own:
            if span.kind is SpanKind.LLM:
                if at.wants_structure(span):
                    self._aside.append(len(self.models))
                self.models.append(span)
                self.said.append(at.model_output(span))
            elif span.kind is SpanKind.TOOL:
                self.tools.append(at.tool_use(span))
        last = len(self.models) - 1
        while self._aside and self._aside[-1] == last:
            self._aside.pop()
            last -= 1
        self._results = _Results(self.models)

    def of_models(self, models: TrainedModels) -> dict[str, Any]:
        """What the model calls say together, by the names of a reply's fields; the last one to answer names the model
        and, as far as it says, the version of the alias."""
        model = adapter = source = ""
        tools: tuple[dict[str, Any], ...] = ()
        inputs = outputs = 0
        for place, span in enumerate(self.models):
            asked = at.model_name(span)
            if place not in self._aside and asked and (not model or self.said[place]):
                model = asked
            tools = tools or at.tool_definitions(span)
            given, answered = at.tokens(span)
            inputs += given
            outputs += answered
            if (told := _answerer(span, asked, models)) is not None:
                adapter, source = told
        first = self.first
        return {
            "model": model,
            "adapter": adapter,
            "adapter_source": source,
            "prompt_tokens": at.tokens(first)[0] if first else 0,
            "tools": tools,
            "input_tokens": inputs,
            "output_tokens": outputs,
        }

    @cached_property
    def first(self) -> Span | None:
        """The first model call that tells what it was given; the first of all where none does."""
        spans = [span for place, span in enumerate(self.models) if place not in self._aside]
        return next((span for span in spans if at.conversation(span)), spans[0] if spans else None)

    def first_input(self) -> list[ChatMessage]:
        """What the first model call was given: the conversation so far, without empty messages at its end.

        AgentScope 2.x has one there where the model was sent something that the tracer hides.
        """
        given = at.conversation(self.first) if self.first else []
        while given and given[-1] == {"role": "assistant", "content": ""}:
            given.pop()
        return without_finish(given)

    def speaker(self) -> str:
        """The agent's name, as its own messages in the model calls' inputs carry it."""
        return next((name for span in self.models if (name := at.speaker(span))), "")

    def trajectory(self, answer: str, before: Sequence[ChatMessage] = ()) -> tuple[ChatMessage, ...]:
        """The steps between request and answer: what the model said and called, and what the tools returned.

        A reply that goes on where it had stopped begins with the steps `before`.
        """
        unused = list(self.tools)
        if before:
            done = {step["tool_call_id"] for step in before if step["role"] == "tool"}
            unused = [tool for tool in unused if tool.id not in done]
        answer = answer.strip()
        steps: list[ChatMessage] = list(before)
        last = len(self.models) - 1
        for place, said in enumerate(self.said):
            if place in self._aside:
                continue
            until = self.models[place + 1].started_ns if place < last else None
            for message in chat_of(said) if said else ():
                wanted = message.get("tool_calls", ())
                content = message["content"]
                if wanted or (content and not (place == last and content.strip() == answer)):
                    steps.append(message)
                for one in wanted:
                    name = one["function"]["name"]
                    tool = _taken(unused, one["id"], name, until)
                    if name in FINISH_FUNCTIONS:
                        continue
                    result = tool.result if tool is not None else self._results.after(place, one["id"])
                    if result is not None:
                        steps.append(_tool_step(one["id"], name, result))
        for tool in unused:
            # No recorded model call asked for it: the agent called it by itself.
            if tool.name not in FINISH_FUNCTIONS:
                steps.append({"role": "assistant", "content": "", "tool_calls": [tool.call]})
                if (result := tool.result) is not None:
                    steps.append(_tool_step(tool.id or tool.span.span_id, tool.name, result))
        return tuple(without_finish(steps)) if steps else ()

    def errors(self, steps: Sequence[ChatMessage]) -> tuple[str, ...]:
        """The model and tool calls that failed, with the reason; a failed call may have been made again since."""
        failed = [
            (tool.span, f"tool {tool.name}: {why}") for tool in self.tools if (why := outcome.tool_failure(tool))
        ]
        failed += [
            (span, f"model: {outcome.error_text(span)}") for span in self.models if span.status is SpanStatus.ERROR
        ]
        failed.sort(key=lambda one: in_order(one[0]))
        told = [why[:500] for _, why in failed]
        results = [step for step in steps if step["role"] == "tool"]
        if results:
            # A call without a span of its own: 2.x makes none for a tool that is not there.
            spans = {"", *(tool.id for tool in self.tools)}
            alone = [step for step in results if step["tool_call_id"] not in spans]
            told += [f"tool {s['name']}: {s['content']}"[:500] for s in alone if outcome.is_error_text(s["content"])]
        return tuple(told)

    def structured(self) -> dict[str, Any] | None:
        """The arguments of the finish function, by which 2.x hands in structured output."""
        for tool in reversed(self.tools):
            if tool.name in FINISH_FUNCTIONS:
                arguments = tool.arguments
                # Without a structure to fill, 1.x hands in the bare answer under this name.
                if isinstance(arguments, dict) and arguments and arguments.keys() != {"response"}:
                    return arguments
        return None

    def was_cut_short(self) -> bool:
        """Whether its last model call or tool says that it was interrupted."""
        for span in reversed(self.own):
            if span.kind is SpanKind.LLM or span.kind is SpanKind.TOOL:
                return outcome.was_cut_short(span)
        return False

    def texts(self) -> list[str]:
        """The text of each answer of a model."""
        return [text_of(message) for message in self.said if message]


def _answerer(span: Span, asked: str, models: TrainedModels) -> tuple[str, str] | None:
    """Which version of the alias answered a call, empty for the base model, and what tells it; None: nothing does."""
    if (mark := mark_of(at.response_id(span))) is not None:
        return "" if mark.version == BASE_VERSION else mark.version, "id"
    name = at.answering_model(span)
    if "@" in name:
        return name, "model"
    if models.alias and asked.startswith(f"{models.alias}@"):
        return asked, "model"
    return ("", "model") if name and name == models.base else None


class _Results:
    """What calls without a span of their own returned: from what the next model calls were given.

    Each of these is looked at once, and only when it is needed: there may be thousands, each repeating the last.
    """

    def __init__(self, models: Sequence[Span]) -> None:
        self._models = models
        self._read = 0
        self._runs: dict[str, list[tuple[int, str]]] = {}
        """By the id of a call: the last of the model calls that were given one result, and that result."""

    def after(self, place: int, call_id: str) -> str | None:
        """What the first model call behind `place` that was given a result of that call was given. To be asked for
        places that do not go down."""
        self._read = max(self._read, place + 1)
        while (found := self._known(place, call_id)) is None and self._read < len(self._models):
            # The last of each id: some models number their calls from 0 in every answer.
            given = {
                message["tool_call_id"]: str(message["content"])
                for message in at.conversation(self._models[self._read])
                if message["role"] == "tool"
            }
            for one, result in given.items():
                runs = self._runs.setdefault(one, [])
                if runs and runs[-1][1] == result:
                    runs.pop()
                runs.append((self._read, result))
            self._read += 1
        return found

    def _known(self, place: int, call_id: str) -> str | None:
        runs = self._runs.get(call_id, ())
        behind = bisect_right(runs, place, key=itemgetter(0))
        return runs[behind][1] if behind < len(runs) else None


def _taken(tools: list[at.ToolUse], call_id: str, name: str, until_ns: int | None) -> at.ToolUse | None:
    """The first tool that was called so before the next model call, taken out of the list.

    Ids may repeat, some clients give none, and some spans have no name.
    """
    for tool in tools:
        is_in_time = until_ns is None or tool.span.started_ns <= until_ns
        if tool.id == call_id and tool.name in (name, "") and is_in_time:
            tools.remove(tool)
            return tool
    return None


def _tool_step(call_id: str, name: str, content: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}
