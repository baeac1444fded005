"""What an agent did during one reply: its model calls and tool calls, their errors, and the steps they add up to.

Clients record failures and interruptions differently: by the span's status, by an event, by a result's state, or only
by the text of a result while the span ends as if all were well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

from flywheel.records.chat import (
    Message,
    chat_of,
    is_refusal,
    says_error,
    text_of,
    unread_in,
    unread_in_result,
    without_finish,
)
from flywheel.records.exclusion import TrainedModels
from flywheel.records.reprs import ReprError, is_result, parse_call
from flywheel.records.request_id import BASE_VERSION, mark_of
from flywheel.records.tool_calls import FINISH_FUNCTIONS, finished
from flywheel.records.trace import (
    TOOL_ERROR,
    ChatMessage,
    ModelCall,
    SpanStatus,
    ToolCall,
    ToolDefinition,
    get_path,
    reasoning_of,
)
from flywheel.sources.spans import attributes as at
from flywheel.sources.spans.attributes import ToolUse, first_text, value_of
from flywheel.sources.spans.recorded_calls import exact_prompt
from flywheel.sources.spans.span import NOTHING, QUESTIONS, Span, SpanKind, in_order
from flywheel.sources.spans.truncation import cuts_in

_STATE: Final = "state=<ToolResultState."
_FAILED: Final = f"{_STATE}ERROR"


class Trajectory:
    """The model calls and tool calls among an agent's own spans. Raises ReprError if a recorded answer is garbled."""

    def __init__(self, own: Sequence[Span]) -> None:
        self.own = own
        """The agent's spans in the order in which they began."""
        self.models: list[Span] = []
        self.answers: list[Message | None] = []
        """What each model call answered."""
        self.tools: list[ToolUse] = []
        self._aside: list[int] = []
        """Places of model calls, never the last, that only prepared later ones: the agent had them fill a structure,
        such as a search query or a summary, and none of it is part of its conversation with the user."""
        for span in own:
            if span.kind is SpanKind.LLM:
                if span.attributes.input.kwargs.structured_model != NOTHING:
                    self._aside.append(len(self.models))
                self.models.append(span)
                self.answers.append(at.model_output(span))
            elif span.kind is SpanKind.TOOL:
                self.tools.append(at.tool_use(span))
        last = len(self.models) - 1
        while self._aside and self._aside[-1] == last:
            self._aside.pop()
            last -= 1

    def of_models(self, models: TrainedModels) -> dict[str, Any]:
        """What the model calls say together, by the names of a reply's fields. The last call that answered names the
        model and, if it says so, the version of the alias."""
        model = adapter = source = ""
        calls = tuple(dict.fromkeys(span.request_id for span in self.models if span.request_id))
        joined = {span.request_id for span in self.models if span.call is not None}
        tools: tuple[ToolDefinition, ...] = ()
        inputs = outputs = prompt = 0
        for place, span in enumerate(self.models):
            metadata = span.attributes.metadata
            asked = span.attributes.gen_ai.request.model or first_text(get_path(value_of(metadata), "model_name"))
            if place not in self._aside and asked and (not model or self.answers[place]):
                model = asked
            tools = tools or at.tool_definitions(span)
            given, answered = at.tokens(span)
            inputs += given
            outputs += answered
            if span is self.first:
                prompt = given
            # An empty version stands for the base model.
            response = span.attributes.gen_ai.response
            if response.id and (mark := mark_of(response.id)) is not None:
                adapter, source = "" if mark.version == BASE_VERSION else mark.version, "id"
            elif "@" in response.model:
                adapter, source = response.model, "model"
            elif asked.partition("@")[0] in models.aliases and "@" in asked:
                adapter, source = asked, "model"
            elif response.model and response.model == models.base:
                adapter, source = "", "model"
        return {
            "model": model,
            "adapter": adapter,
            "adapter_source": source,
            "prompt_tokens": prompt,
            "tools": tools if self.recorded is None else self.recorded.tools,
            "prompt": exact_prompt(self.recorded) if self.recorded is not None else (),
            "parameters": self.recorded.parameters if self.recorded is not None else {},
            "calls": calls,
            "missing": tuple(call for call in calls if call not in joined),
            "input_tokens": inputs,
            "output_tokens": outputs,
        }

    @cached_property
    def recorded(self) -> ModelCall | None:
        """The first model call as the server has recorded it. Calls before it that failed do not count."""
        for place, span in enumerate(self.models):
            if place not in self._aside and (span.call is not None or span.status is not SpanStatus.ERROR):
                return span.call if span.call is not None and span.call.messages else None
        return None

    @cached_property
    def first(self) -> Span | None:
        """The first model call with a recorded input; the first of all if none has one."""
        spans = [span for place, span in enumerate(self.models) if place not in self._aside]
        if self.recorded is not None:
            return next(span for span in spans if span.call is self.recorded)
        return next((span for span in spans if at.conversation(span)), spans[0] if spans else None)

    @cached_property
    def asked(self) -> Span | None:
        """The first model call with a recorded input, also if that was cut."""
        spans = (span for place, span in enumerate(self.models) if place not in self._aside)
        return next((span for span in spans if span is self.first or span.cut & QUESTIONS), None)

    def returned(self) -> Message | None:
        """The answer of the last model call; None if it called a tool or said nothing.

        What it calls a finish function with is its answer.
        """
        answer = self.answers[-1] if self.answers else None
        said = chat_of(answer)[-1] if answer else {}
        for function in (call["function"] for call in said.get("tool_calls", ())):
            if function["name"] in FINISH_FUNCTIONS:
                return {"role": "assistant", "content": finished(function["name"], function["arguments"])}
        return answer if said.get("content") and "tool_calls" not in said else None

    def first_input(self) -> list[ChatMessage]:
        """The input of the first model call: the conversation so far, without empty messages at its end.

        AgentScope 2.x has one there if the model was sent something that the tracer hides.
        """
        given = list(at.conversation(self.first)) if self.first else []
        while given and given[-1] == {"role": "assistant", "content": ""}:
            given.pop()
        return without_finish(given)

    def steps(self, answer: str, before: Sequence[ChatMessage] = ()) -> tuple[ChatMessage, ...]:
        """The messages between request and answer: what the model said and called, and what the tools returned.

        A resumed reply begins with the steps `before`.
        """
        done = {step["tool_call_id"] for step in before if step["role"] == "tool"}
        said_by = {
            place: chat_of(said, with_reasoning=True)
            for place, said in enumerate(self.answers)
            if said and place not in self._aside
        }
        uses = _Uses(
            [tool for tool in self.tools if tool.id not in done],
            (call for chat in said_by.values() for message in chat for call in message.get("tool_calls", ())),
        )
        answer = answer.strip()
        steps: list[ChatMessage] = list(before)
        last = len(self.models) - 1
        for place, chat in said_by.items():
            until = self.models[place + 1].started_ns if place < last else None
            for message in chat:
                wanted = message.get("tool_calls", ())
                content = message["content"]
                own = message.get("reasoning_content", "")
                sent = self._reasoning_sent_after(place) if wanted or own else ""
                if sent and (wanted or sent.strip() == own.strip()):
                    message["reasoning_content"] = sent
                elif own:
                    message["reasoning_sent"] = False
                if wanted or (content and not (place == last and content.strip() == answer)):
                    steps.append(message)
                for call in wanted:
                    name = call["function"]["name"]
                    tool = uses.take(call, until)
                    if name in FINISH_FUNCTIONS:
                        continue
                    if (result := self._result(tool, place, call["id"])) is not None:
                        steps.append(_tool_step(call["id"], name, result))
        for tool in uses.left:
            # No recorded model call asked for it: the agent called it by itself.
            if tool.name not in FINISH_FUNCTIONS:
                steps.append({"role": "assistant", "content": "", "tool_calls": [tool.call]})
                if (result := tool.result) is not None:
                    steps.append(_tool_step(tool.id or tool.span.span_id, tool.name, result))
        return tuple(without_finish(steps)) if steps else ()

    def cut(self) -> Iterator[str]:
        """What of the model calls and tool calls was cut."""
        for span in self.own:
            yield from cuts_in(span)

    def unread(self) -> Iterator[str]:
        """The parts of answers and of tools' results that were not read."""
        for place, said in enumerate(self.answers):
            if said and place not in self._aside:
                yield from (f"a part of type {kind} in an answer of the model" for kind in unread_in(said))
        for tool in self.tools:
            if tool.name not in FINISH_FUNCTIONS:
                kinds = unread_in_result(tool.output)
                yield from (f"a part of type {kind} in a result of {tool.name}" for kind in kinds)

    def refuses(self, answer: str) -> bool:
        """Whether the answer is the refusal of the last model call."""
        said = self.answers[-1] if self.answers else None
        return said is not None and is_refusal(said) and text_of(said).strip() == answer.strip()

    @property
    def choices(self) -> int:
        """How many answers the last model call has, as the server or else the trace has recorded it."""
        if not self.models:
            return 0
        call = self.models[-1].call
        return len(call.answers) if call is not None else at.choices(self.models[-1])

    def reasoning_of(self, answer: str) -> str:
        """The reasoning before the reply's answer, if the last model call gave that; else empty."""
        recorded = self.answers[-1] if self.answers else None
        said = chat_of(recorded, with_reasoning=True)[-1] if recorded else {}
        is_answer = said.get("content", "").strip() == answer.strip() and "tool_calls" not in said
        return str(said.get("reasoning_content", "")).strip() if is_answer else ""

    def _reasoning_sent_after(self, place: int) -> str:
        """The reasoning of a model call's answer, if the recorded call after it was sent it again; else empty.
        The input of another call proves nothing: AgentScope traces reasoning there that it does not send."""
        later = (self.models[after] for after in range(place + 1, len(self.models)) if after not in self._aside)
        if (span := next(later, None)) is None or span.call is None:
            return ""
        sent = [message for message in span.call.messages if message.get("role") == "assistant"]
        return reasoning_of(sent[-1]) if sent else ""

    def _result(self, tool: ToolUse | None, place: int, call_id: str) -> str | None:
        """What a call of the model call at `place` returned. Which of several calls a tool use without an id carried
        out is not certain, so that what the model was sent counts before it."""
        if tool is not None and tool.id == call_id:
            return tool.result
        result = self._result_after(place, call_id)
        return tool.result if result is None and tool is not None else result

    def _result_after(self, place: int, call_id: str) -> str | None:
        """The result that the first model call behind `place` with any result of that call was given."""
        return next((result for last, result in self._results.get(call_id, ()) if last > place), None)

    @cached_property
    def _results(self) -> dict[str, list[tuple[int, str]]]:
        """By call id, the results in the inputs of the model calls, each with the place of the last of the calls in a
        row that were given it. They are read only if a tool call has no span of its own."""
        results: dict[str, list[tuple[int, str]]] = {}
        for place, span in enumerate(self.models):
            # The last of each id: some models number their calls from 0 in every answer.
            tools = (message for message in at.conversation(span) if message["role"] == "tool")
            for call_id, result in {tool["tool_call_id"]: str(tool["content"]) for tool in tools}.items():
                runs = results.setdefault(call_id, [])
                if runs and runs[-1][1] == result:
                    runs.pop()
                runs.append((place, result))
        return results

    def errors(self, steps: Sequence[ChatMessage]) -> tuple[str, ...]:
        """The model and tool calls that failed, with the reason. A failed call may have been repeated since."""
        failed = [(tool.span, f"tool {tool.name}: {why}") for tool in self.tools if (why := tool_failure(tool))]
        failed += [(span, f"model: {error_text(span)}") for span in self.models if span.status is SpanStatus.ERROR]
        failed.sort(key=lambda one: in_order(one[0]))
        errors = [why[:500] for _, why in failed]
        if results := [step for step in steps if step["role"] == "tool"]:
            # A call without a span of its own: 2.x makes none for a tool that does not exist.
            spans = {"", *(tool.id for tool in self.tools)}
            alone = [step for step in results if step["tool_call_id"] not in spans]
            refused = at.read_conversation(self.models[-1]).failed if alone and self.models else frozenset[str]()
            errors += [
                f"tool {step['name']}: {step['content'] or 'the tool says so'}"[:500]
                for step in alone
                if step["tool_call_id"] in refused or TOOL_ERROR.match(step["content"])
            ]
        return tuple(errors)


class _Uses:
    """Tool uses, and the calls that they carry out: which one is whose.

    Ids may repeat, some clients give none, and some spans have no name. Clocks of several hosts differ, so that time
    rules out no use of a call that is alone in its id. Among calls with equal ids arguments decide, then the order,
    and only where there are fewer uses than calls time: a use began before the model was called again.
    """

    def __init__(self, uses: Sequence[ToolUse], calls: Iterable[ToolCall]) -> None:
        self.left = [*uses]
        """Those that no call has taken."""
        self._waiting: dict[tuple[str, str], list[list[str]]] = {}
        """The arguments of the calls that have taken none yet, by id and name."""
        for call in calls:
            self._waiting.setdefault((call["id"], call["function"]["name"]), []).append(_words(call))

    def take(self, call: ToolCall, until_ns: int | None) -> ToolUse | None:
        """Remove and return the use of this call, which is the first of those that wait under its id and name."""
        name = call["function"]["name"]
        waiting = self._waiting[call["id"], name]
        wanted = waiting.pop(0)
        own = [use for use in self.left if use.id == call["id"] and use.name in (name, "")]
        if found := [use for use in own if _words(use.call) == wanted]:
            rivals = waiting.count(wanted)
        else:
            found = [use for use in own if _words(use.call) not in waiting]
            rivals = len(waiting)
        if len(found) <= rivals:
            found = [use for use in found if until_ns is None or use.span.started_ns <= until_ns]
        if not found:
            unnumbered = [use for use in self.left if not use.id and use.name in (name, "")]
            found = sorted(unnumbered, key=lambda use: _words(use.call) != wanted)
        if not found:
            return None
        self.left.remove(found[0])
        return found[0]


def _words(call: ToolCall) -> list[str]:
    """The arguments of a call, however they are spaced."""
    return call["function"]["arguments"].split()


def _tool_step(call_id: str, name: str, content: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def exception(span: Span) -> tuple[str, str]:
    """Type and message of the last exception recorded in a span; two empty texts if there is none."""
    for event in reversed(span.events):
        if event.get("name") == "exception":
            details = event.get("attributes")
            kind = first_text(get_path(details, "exception", "type"), get_path(details, "exception.type"))
            return kind, first_text(get_path(details, "exception", "message"), get_path(details, "exception.message"))
    return "", ""


def error_text(span: Span) -> str:
    """Why a span failed, in one line; empty if it did not."""
    kind, message = exception(span)
    if span.status is not SpanStatus.ERROR and not kind:
        return ""
    cause = span.status_message or message
    return " ".join(f"{kind.rpartition('.')[2]}: {cause}".strip(": ").split()) or "the span ended with an error"


def tool_failure(tool: ToolUse) -> str:
    """Why a tool call failed, in one line; empty if it did not.

    2.x records it in the result's state. 1.x returns the error as a text that begins with its type. In both the span
    ends as if all were well.
    """
    if error := error_text(tool.span):
        return error
    output = tool.output
    if output is None or (
        isinstance(output, str) and "Error:" not in output and "Exception:" not in output and _FAILED not in output
    ):
        # Nearly all results end here, without being parsed.
        return ""
    state = _state(output)
    text = " ".join((tool.result or "").split())
    if state == "error":
        return text or "the tool says so"
    return text if not isinstance(state, str) and TOOL_ERROR.match(text) else ""


def _state(returned: Any) -> Any:
    """The state that 2.x gives a tool's result, up to 2.0.6 in a repr, or `error` where other
    dialects say so; None if there is none."""
    if isinstance(returned, dict) and "content" in returned and "state" not in returned:
        return "error" if says_error(returned) else None
    if not isinstance(returned, str):
        return get_path(returned, "state")
    if not is_result(returned) or _STATE not in returned:
        return None
    try:
        written = parse_call(returned).get("state")
    except ReprError:
        return None
    return written.removeprefix("<").rpartition(": ")[2].strip("'>") if isinstance(written, str) else None


def is_interrupted(span: Span) -> bool:
    """Whether a model call or a tool records that it was interrupted."""
    if span.events and exception(span)[0].endswith("CancelledError"):
        return True
    attributes = span.attributes
    reasons, call, output = attributes.gen_ai.response.finish_reasons, attributes.gen_ai.tool.call, attributes.output
    if b"interrupted" not in b" ".join((reasons, call, output)):
        # Nearly all spans end here, without being parsed.
        return False
    found = value_of(reasons)
    if isinstance(found, list) and "interrupted" in found:
        return True
    returned = get_path(value_of(call), "result")
    returned = value_of(output) if returned is None else returned
    if _state(returned) == "interrupted":
        return True
    if isinstance(returned, str) and is_result(returned):
        try:
            return "is_interrupted=True" in returned and parse_call(returned).get("is_interrupted") is True
        except ReprError:
            return False
    return get_path(returned, "is_interrupted") is True
