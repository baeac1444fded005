"""Translates the attributes and events of other conventions into those of OpenTelemetry's GenAI convention.

A span is translated when it is received, so that everything behind the receiver knows one convention. An attribute of
the GenAI convention that the span has already is kept. `CONVENTIONS` says which attributes are read; the table that
`flywheel docs traces` shows is generated from it (`python -m scripts.reference_pages`).
https://opentelemetry.io/docs/specs/semconv/gen-ai/
https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md
https://langfuse.com/integrations/native/opentelemetry
https://www.traceloop.com/docs/openllmetry/contributing/semantic-conventions
https://ai-sdk.dev/docs/ai-sdk-core/telemetry
https://ai.pydantic.dev/logfire/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import orjson

from flywheel.records.chat import Message, chat_of, with_unread
from flywheel.records.reprs import ReprError
from flywheel.records.tool_calls import finished
from flywheel.records.trace import get_path
from flywheel.sources.otlp.recorded_messages import (
    EMPTY,
    Loaded,
    Nested,
    first_messages,
    in_events,
    messages_in,
    of_langchain,
    tools_in,
)
from flywheel.sources.spans.truncation import breaks_off

INPUT: Final = "gen_ai.input.messages"
OUTPUT: Final = "gen_ai.output.messages"
TOOLS: Final = "gen_ai.tool.definitions"
_NAME: Final = "gen_ai.tool.name"
_ID: Final = "gen_ai.tool.call.id"
_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
_RESULT: Final = "gen_ai.tool.call.result"
_USAGE: Final = "langfuse.observation.usage_details"
_PROPERTIES: Final = "traceloop.association.properties"
_AGENT, _CHAT, _TOOL = "invoke_agent", "chat", "execute_tool"
_VERCEL: Final = {
    **dict.fromkeys(("generatetext", "streamtext", "generateobject", "streamobject"), _AGENT),
    "generatetext.dogenerate": _CHAT,
    "streamtext.dostream": _CHAT,
    "generateobject.dogenerate": _CHAT,
    "streamobject.dostream": _CHAT,
    "toolcall": _TOOL,
}


_FLATTENED: Final = frozenset(
    {"llm.input_messages", "llm.output_messages", "llm.tools", "gen_ai.prompt", "gen_ai.completion",
     "llm.request.functions"}
)  # fmt: skip
"""Attributes that are several, each with a number and a field in its name."""
_NOT_SHOWN: Final = frozenset(
    {"gen_ai.request.model", "gen_ai.response.id", "gen_ai.response.model", "gen_ai.usage.input_tokens",
     "gen_ai.usage.output_tokens", _NAME, _ID, _ARGUMENTS, _RESULT}
)  # fmt: skip
"""What is read as well, but not in the documented table: models, counts of tokens, and the fields of tool calls."""


class Convention(NamedTuple):
    """One convention: its row in the documented table, and what is read of it by name.

    - `kinds`: attributes that show the operation of a span, each with the operations by its values in lower case, or
      with one operation where its presence shows it. Any other value shows none.
    - `values`: attributes of the GenAI convention, each with those of this one that are read in its place.
    - `also`: what is read besides, for people. `limits`: what is not. `tested`: the versions whose traces are tests.
    - `is_json`: a text that a tool returned is recorded as JSON.
    - `has_choices`: several messages that a model answered with are as many answers.
    """

    name: str
    kinds: Mapping[str, Mapping[str, str] | str]
    values: Mapping[str, tuple[str, ...]]
    also: tuple[str, ...]
    limits: str
    tested: str
    is_json: bool = False
    has_choices: bool = False

    @property
    def read_from(self) -> list[str]:
        """The attributes and events that show what a span is, its conversation and its messages, as Markdown."""
        shown = [name for key, names in self.values.items() if key not in _NOT_SHOWN for name in names]
        names = dict.fromkeys([*self.kinds, *shown, *self.also])
        numbered = [f"{name}.N.*" if name in _FLATTENED else name for name in names]
        return [name if "`" in name else f"`{name}`" for name in numbered]


CONVENTIONS: Final = (
    Convention(
        "OpenTelemetry GenAI, attributes",
        {},
        {},
        (
            INPUT,
            OUTPUT,
            "gen_ai.system_instructions",
            TOOLS,
            "gen_ai.tool.call.*",
            "the event `gen_ai.client.inference.operation.details`",
        ),
        f"without `{TOOLS}`, replies with tool calls are not trained on",
        "AgentScope 2.0, Pydantic AI 2.68.0, Vercel AI SDK 7.0.173, OpenLLMetry 0.62.4",
    ),
    Convention(
        "OpenTelemetry GenAI, messages in span events",
        {},
        {},
        (
            "gen_ai.system.message",
            "gen_ai.user.message",
            "gen_ai.assistant.message",
            "gen_ai.tool.message",
            "gen_ai.choice",
            "or as JSON in `gen_ai.event.content`",
        ),
        "not read when they are sent as logs; they have no tool definitions",
        "Pydantic AI 1.0.18 (version 1), by hand",
    ),
    Convention(
        "Microsoft Agent 365",
        {},
        {_RESULT: ("gen_ai.event.content",)},
        (f'`{{"version", "messages"}}` in `{INPUT}` and `{OUTPUT}`',),
        "the SDK records no tool definitions",
        "microsoft-agents-a365-observability-core 1.0.0",
    ),
    Convention(
        "OpenInference (Phoenix)",
        {"openinference.span.kind": {"agent": _AGENT, "llm": _CHAT, "tool": _TOOL}},
        {
            "gen_ai.agent.name": ("agent.name",),
            "gen_ai.request.model": ("llm.model_name",),
            "gen_ai.usage.input_tokens": ("llm.token_count.prompt",),
            "gen_ai.usage.output_tokens": ("llm.token_count.completion",),
            INPUT: ("llm.input_messages", "input.value"),
            OUTPUT: ("llm.output_messages", "output.value"),
            TOOLS: ("llm.tools", "input.value.tools"),
            _NAME: ("tool.name",),
            _ID: ("tool_call.id", "tool.id"),
            _ARGUMENTS: ("input.value",),
            _RESULT: ("output.value",),
        },
        (),
        "the Agents SDK's own spans name no tools: trace OpenAI's client as well",
        "openinference-instrumentation-openai-agents 2.6.0, -openai 0.1.66, -langchain 0.1.80",
    ),
    Convention(
        "Langfuse",
        {"langfuse.observation.type": {"agent": _AGENT, "generation": _CHAT, "tool": _TOOL}},
        {
            "session.id": ("langfuse.session.id",),
            "user.id": ("langfuse.user.id",),
            "gen_ai.request.model": ("langfuse.observation.model.name", "llm.request.model_name"),
            "gen_ai.usage.input_tokens": (f"{_USAGE}.input", f"{_USAGE}.prompt_tokens"),
            "gen_ai.usage.output_tokens": (f"{_USAGE}.output", f"{_USAGE}.completion_tokens"),
            INPUT: ("langfuse.observation.input",),
            OUTPUT: ("langfuse.observation.output",),
            TOOLS: ("langfuse.observation.input.tools",),
            _ARGUMENTS: ("langfuse.observation.input",),
            _RESULT: ("langfuse.observation.output",),
        },
        (),
        "tool definitions only from `langfuse.openai`, or an input with `tools`",
        "langfuse 3, 4 and 5",
    ),
    Convention(
        "Vercel AI SDK",
        {"ai.operationId": {f"ai.{name}": operation for name, operation in _VERCEL.items()}},
        {
            "session.id": ("ai.telemetry.metadata.sessionId",),
            "user.id": ("ai.telemetry.metadata.userId",),
            "gen_ai.agent.name": ("ai.telemetry.functionId",),
            "gen_ai.request.model": ("ai.model.id",),
            "gen_ai.response.id": ("ai.response.id",),
            "gen_ai.response.model": ("ai.response.model",),
            "gen_ai.usage.input_tokens": ("ai.usage.inputTokens", "ai.usage.promptTokens"),
            "gen_ai.usage.output_tokens": ("ai.usage.outputTokens", "ai.usage.completionTokens"),
            INPUT: ("ai.prompt", "ai.prompt.messages"),
            OUTPUT: ("ai.response.text", "ai.response.object", "ai.response.toolCalls", "ai.result"),
            TOOLS: ("ai.prompt.tools",),
            _NAME: ("ai.toolCall.name",),
            _ID: ("ai.toolCall.id",),
            _ARGUMENTS: ("ai.toolCall.args",),
            _RESULT: ("ai.toolCall.result",),
        },
        (),
        "each `generateText`, `streamText`, `generateObject` and `streamObject` is a reply",
        "ai 4.3.19, 5.0.277, 6.0.326 (7 sends the GenAI convention with `@ai-sdk/otel`)",
        is_json=True,
    ),
    Convention(
        "Pydantic AI",
        {"pydantic_ai.all_messages": _AGENT, "all_messages_events": _AGENT, _NAME: _TOOL},
        {
            "gen_ai.agent.name": ("agent_name",),
            INPUT: ("pydantic_ai.all_messages", "all_messages_events"),
            TOOLS: ("model_request_parameters",),
            _ARGUMENTS: ("tool_arguments",),
            _RESULT: ("tool_response",),
        },
        ("final_result", "events"),
        "the arguments of `final_result` (and of `rollout.finish_tools`) are the answer; version 1 with"
        " `event_mode: logs` is not read",
        "pydantic-ai 1.0.18 (versions 1, 2, 3), 2.68.0 (versions 5, 6)",
    ),
    Convention(
        "OpenLLMetry (Traceloop)",
        {
            "traceloop.span.kind": {"agent": _AGENT, "tool": _TOOL},
            "llm.request.type": {"chat": _CHAT, "completion": _CHAT},
        },
        {
            "session.id": tuple(f"{_PROPERTIES}.{name}" for name in ("session_id", "conversation_id", "thread_id")),
            "user.id": (f"{_PROPERTIES}.user_id",),
            "gen_ai.agent.name": ("traceloop.entity.name",),
            "gen_ai.usage.input_tokens": ("gen_ai.usage.prompt_tokens",),
            "gen_ai.usage.output_tokens": ("gen_ai.usage.completion_tokens",),
            INPUT: ("gen_ai.prompt", "traceloop.entity.input"),
            OUTPUT: ("gen_ai.completion", "traceloop.entity.output"),
            TOOLS: ("llm.request.functions",),
            _NAME: ("traceloop.entity.name",),
            _ARGUMENTS: ("traceloop.entity.input",),
            _RESULT: ("traceloop.entity.output",),
        },
        (),
        "a `workflow` or `task` is a reply only where no agent is. SDKs keep 128 attributes of a span, which makes"
        " prompts of long conversations inexact",
        "opentelemetry-instrumentation-openai and -langchain 0.47.5, 0.62.4, traceloop-sdk 0.47.5, 0.62.4",
        is_json=True,
        has_choices=True,
    ),
    Convention(
        "LangChain, serialised messages",
        {},
        {},
        ('`{"lc": 1, "type": "constructor", "id": […, "HumanMessage"], "kwargs": {…}}`, wherever messages are read',),
        "not what LangChain could not serialise",
        "langchain-core 0.3.86, 1.8.3",
    ),
)
"""Those that are read, the first before the others where a span has several."""
TEXTS: Final = (
    "llm.input_messages.",
    "llm.output_messages.",
    "input.value",
    "output.value",
    "langfuse.observation.input",
    "langfuse.observation.output",
    "gen_ai.prompt.",
    "gen_ai.completion.",
    "traceloop.entity.",
    "ai.response.text",
    "ai.response.object",
    "ai.result.text",
    "ai.result.object",
    "ai.toolCall.",
    "final_result",
    "tool_arguments",
    "tool_response",
)
"""How the attributes begin whose texts stay texts where they are JSON: each may be something that was said."""
TEXTS_OF_EVENTS: Final = frozenset({"content", "message", "body", "event.body", "gen_ai.event.content"})
"""The same of an event, where they are its whole names."""
_JSON: Final = "application/json"
_ALWAYS_JSON: Final = frozenset(
    {"ai.prompt", "ai.prompt.messages", "ai.response.object", "ai.response.toolCalls", "traceloop.entity.input",
     "traceloop.entity.output", "pydantic_ai.all_messages", "all_messages_events"}
)  # fmt: skip
"""Attributes with messages that are JSON text, whatever was said. `input.value` is where its type is that of JSON."""
_DEEP: Final = 3
"""How many keys of an attribute tell its convention."""
_BY_OPERATION: Final = frozenset({INPUT, OUTPUT, TOOLS, _NAME, _ID, _ARGUMENTS, _RESULT})
"""Attributes that are read in another way than by copying, according to the operation."""
_OPERATIONS: Final = {
    "chat": _CHAT,
    "textcompletion": _CHAT,
    "generatecontent": _CHAT,
    "invokeagent": _AGENT,
    "executetool": _TOOL,
}
"""Operations as the reader knows them, by their names without `_` and in lower case: Agent 365 writes `Chat`."""
_RETRY: Final = "Fix the errors and try again."
"""How Pydantic AI ends what it tells a model whose answer is not valid."""


def known_operation(written: Any) -> str:
    """An operation under the name that the reader knows, if it has one for it."""
    if written in (_CHAT, _AGENT, _TOOL):
        return str(written)
    return _OPERATIONS.get(str(written).replace("_", "").lower(), str(written))


def translate(attributes: Nested, name: str, loaded: Loaded, events: Sequence[Nested] = (), dropped: int = 0) -> None:
    """Add the attributes of the GenAI convention to the nested attributes of the span `name`.

    `events` are those of the span, nested as well; `dropped` is how many attributes and events the client dropped.
    """
    for key, role in ((INPUT, "user"), (OUTPUT, "assistant")):
        if written := _unpacked(get_path(attributes, *_path(key)), role):
            put(attributes, written, *_path(key))
    if isinstance(own := attributes.get("openinference"), dict):
        # A reader would take these for the function call that AgentScope records.
        own |= {key: attributes.pop(key) for key in ("input", "output", "metadata") if key in attributes}
    operation = get_path(attributes, "gen_ai", "operation", "name") or _kind(attributes)
    _add(attributes, {"gen_ai.operation.name": operation})
    operation = known_operation(operation)
    there = set(_heads(attributes))
    used = [convention for convention in CONVENTIONS if not _HEADS[convention.name].isdisjoint(there)]
    cut = {} if operation == _TOOL else _take_out_cut(attributes, used)
    had_messages = get_path(attributes, *_path(INPUT)) is not None
    for convention in used:
        _add(attributes, _said(attributes, convention, operation, name, loaded))
    _add(attributes, _of_events(events, operation))
    for path, (key, text) in cut.items():
        # A reader knows by it that messages were cut.
        _add(attributes, {key: text})
        put(attributes, text, *path)
    if operation == _TOOL:
        for key in (_ARGUMENTS, _RESULT):
            if (value := of_langchain(written := get_path(attributes, *_path(key)))) is not written:
                put(attributes, value, *_path(key))
    elif operation == _CHAT:
        sent, got = (get_path(attributes, *_path(key)) for key in (INPUT, OUTPUT))
        if sent and got:
            _drop_copies(attributes)
        if dropped and not had_messages and isinstance(sent, list) and sent:
            sent[-1] = with_unread(sent[-1], "dropped attribute or event")


def _heads(attributes: Nested, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The first keys of all attributes, as in `_HEADS`."""
    for key, value in attributes.items():
        yield (path := (*above, key))
        if isinstance(value, dict) and len(path) < _DEEP:
            yield from _heads(value, path)


def _drop_copies(attributes: Nested) -> None:
    """Remove what has been read of a model call: it is not stored twice."""
    for key in ("prompt", "completion"):
        attributes["gen_ai"].pop(key, None)
    attributes.pop("llm", None)
    if isinstance(attributes.get("ai"), dict):
        attributes["ai"].pop("prompt", None)


def _take_out_cut(attributes: Nested, used: Iterable[Convention]) -> dict[tuple[str, ...], tuple[str, str]]:
    """Take JSON that a limit on the length of attributes has cut out of the attributes. The texts, each
    with the attribute of the GenAI convention that is read from them, by their paths."""
    found: dict[tuple[str, ...], tuple[str, str]] = {}
    recorded = ((key, name) for each in used for key in (INPUT, OUTPUT) for name in each.values.get(key, ()))
    for of, name in recorded:
        path = tuple(name.split("."))
        if name in ("input.value", "output.value"):
            path = ("openinference", *path)
            is_json = get_path(attributes, *path[:-1], "mime_type") == _JSON
        else:
            is_json = name in _ALWAYS_JSON
        text = get_path(attributes, *path)
        if is_json and isinstance(text, str) and breaks_off(text):
            found[path] = of, text
            del get_path(attributes, *path[:-1])[path[-1]]
    return found


def _kind(attributes: Nested) -> str | None:
    """The operation of a span that does not name it by the GenAI convention."""
    for convention in CONVENTIONS:
        for path, kinds in convention.kinds.items():
            value = get_path(attributes, *_path(path))
            found = kinds if isinstance(kinds, str) else kinds.get(str(value).lower())
            if value is not None and found is not None:
                return found
    return None


def _unpacked(value: Any, role: str) -> list[Message]:
    """Messages in the envelope of Agent 365, and texts as messages; none if a value is neither."""
    if isinstance(value, dict) and "role" not in value and isinstance(value.get("messages"), list):
        value = value["messages"]
    elif not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return []
    return [{"role": role, "content": item} if isinstance(item, str) else item for item in value]


def _value(attributes: Nested, path: str) -> Any:
    """The attribute at a path; None if it says nothing."""
    value = get_path(attributes, *_keys(path))
    return None if value in EMPTY else value


@cache
def _path(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))


@cache
def _keys(name: str) -> tuple[str, ...]:
    """Where an attribute is, as nested attributes have it while they are translated."""
    keys = _path(name)
    return ("openinference", *keys) if keys[0] in ("input", "output") else keys


def _said(attributes: Nested, convention: Convention, operation: str, name: str, loaded: Loaded) -> dict[str, Any]:
    """What a span says in one convention, by the attributes of the GenAI convention."""
    read = {
        key: [value for path in paths if (value := _value(attributes, path)) is not None]
        for key, paths in convention.values.items()
    }
    said = {key: found[0] for key, found in read.items() if found and key not in _BY_OPERATION}
    if operation in (_CHAT, _TOOL):
        said.pop("gen_ai.agent.name", None)
    if operation == _TOOL:
        given, returned = (next(iter(read.get(key, ())), None) for key in (_ARGUMENTS, _RESULT))
        said |= {key: read[key][0] for key in (_NAME, _ID) if read.get(key)}
        said = _executed(given, returned, loaded, is_json=convention.is_json) | said
        if isinstance(get_path(attributes, "langfuse", "observation"), dict):
            said.setdefault(_NAME, name)
    elif convention.name in _READERS:
        said |= _READERS[convention.name](attributes, operation)
    elif read.get(INPUT) or read.get(OUTPUT):
        asked, answered = (
            [loaded(value) if isinstance(value, str) else value for value in read.get(key, ())]
            for key in (INPUT, OUTPUT)
        )
        if operation == _CHAT:
            got = first_messages(answered, "assistant")
            if not got and convention.name == "Langfuse":
                # An answer of Langfuse may be JSON that is no message.
                got = first_messages(read[OUTPUT], "assistant")
            if convention.has_choices and len(got) > 1:
                got = [{"finish_reason": "stop", **message} for message in got]
            said |= {
                INPUT: first_messages(asked, "user"),
                OUTPUT: got,
                "gen_ai.response.id": get_path(answered[-1], "id") if answered else None,
                "gen_ai.response.model": get_path(answered[-1], "model") if answered else None,
            }
            read[TOOLS] = [*read.get(TOOLS, ()), *(get_path(value, "tools") for value in asked)]
        else:
            said |= _conversation(next(iter(asked), None), next(iter(answered), None))
    for tools, has_gap in (tools_in(value, loaded) for value in read.get(TOOLS, ()) if operation == _CHAT):
        said.setdefault(TOOLS, tools or None)
        if has_gap and said.get(INPUT):
            said[INPUT] = [*said[INPUT][:-1], with_unread(said[INPUT][-1], "missing tool definition")]
    return said


def _add(attributes: Nested, said: dict[str, Any]) -> None:
    """Add what is said by dotted names, and not there yet."""
    for key, value in said.items():
        path = _path(key)
        if value not in EMPTY and get_path(attributes, *path) is None:
            put(attributes, value, *path)


def put(attributes: Nested, value: Any, *path: str) -> None:
    """Set the attribute at a path."""
    for key in path[:-1]:
        if not isinstance(attributes.get(key), dict):
            attributes[key] = {}
        attributes = attributes[key]
    attributes[path[-1]] = value


def _executed(given: Any, returned: Any, loaded: Loaded, *, is_json: bool) -> dict[str, Any]:
    """What a tool was given and returned. `is_json` if texts are recorded as JSON, too."""
    asked, answered = (loaded(value) if isinstance(value, str) else value for value in (given, returned))
    called, message = of_langchain(asked), of_langchain(answered)
    if message is answered:
        # LangChain's tools return a message, which OpenInference records as data.
        message = get_path(answered, "data")
        returned = answered if is_json and isinstance(answered, str) else returned
        message = returned if get_path(message, "content") is None else message
    return {
        _ID: get_path(message, "tool_call_id"),
        _ARGUMENTS: get_path(asked, "kwargs")
        if get_path(asked, "args") == []
        else given
        if called is asked
        else called,
        _RESULT: message,
    }


def _of_events(events: Any, operation: str) -> dict[str, Any]:
    """What events say of a model call or an agent, or of a tool, whose arguments and result they are."""
    sent, got = in_events(events)
    if operation == _TOOL:
        return {key: some[0].get("content") for key, some in ((_ARGUMENTS, sent), (_RESULT, got)) if some}
    return {INPUT: sent, OUTPUT: got}


def _conversation(asked: Any, answered: Any) -> dict[str, Any]:
    """The messages of an agent, if its answer is recorded as text or messages; else those of its model calls count.

    Of several arguments, only one that is a text or messages is surely the question.
    """
    if not (output := messages_in(answered, "assistant")):
        return {}
    if not (messages := messages_in(asked, "user")) and isinstance(asked, dict):
        arguments = [*asked.values()]
        if isinstance(asked.get("args"), list) and isinstance(asked.get("kwargs"), dict):
            arguments = [*asked["args"], *asked["kwargs"].values()]
        found = [said for each in arguments if (said := messages_in(each, "user"))]
        messages = found[0] if len(found) == 1 else []
    return {INPUT: messages, OUTPUT: output}


def _vercel(attributes: Nested, operation: str) -> dict[str, Any]:
    """The messages of the Vercel AI SDK: a prompt in three fields, and an answer in as many."""
    prompt, response = attributes["ai"].get("prompt"), attributes["ai"].get("response")
    if get_path(response, "text") is None and get_path(response, "object") is None:
        response = response if get_path(response, "toolCalls") else attributes["ai"].get("result") or response
    asked = messages_in(get_path(prompt, "messages"), "user") or messages_in(get_path(prompt, "prompt"), "user")
    if asked and isinstance(system := get_path(prompt, "system"), str) and system:
        asked = [{"role": "system", "content": system}, *asked]
    if isinstance(prompt, str):
        asked = messages_in(prompt, "user")
    parts = [
        {"type": "text", "text": text if isinstance(text, str) else orjson.dumps(text).decode()}
        for key in ("text", "object")
        if (text := get_path(response, key)) not in EMPTY
    ]
    if operation == _CHAT:
        called = get_path(response, "toolCalls")
        parts += [
            {**call, "type": "tool-call"}
            for call in (called if isinstance(called, list) else ())
            if isinstance(call, dict)
        ]
    return {INPUT: asked, OUTPUT: [{"role": "assistant", "content": parts}] if parts else []}


def _pydantic(attributes: Nested, operation: str) -> dict[str, Any]:
    """The messages of Pydantic AI: of a model call those in version 1's events; of an agent, of whom it records the
    whole conversation, the question and the answer."""
    if operation == _CHAT:
        return _of_events(attributes.get("events"), operation)
    messages = get_path(attributes, "pydantic_ai", "all_messages")
    if not isinstance(messages, list):
        messages = [each for some in in_events(attributes.get("all_messages_events")) for each in some]
    if not messages:
        return {}
    try:
        chat = [(message, each) for message in messages for each in chat_of(message)]
    except (ReprError, AttributeError):
        return {}
    asked = [
        message
        for message, each in chat
        if each["role"] == "user" and each["content"] and not each["content"].rstrip().endswith(_RETRY)
    ]
    while chat and chat[-1][1]["role"] == "tool":
        chat.pop()
    answer = attributes.get("final_result")
    if chat and chat[-1][1]["role"] == "assistant":
        last = chat[-1][1]
        functions = [call["function"] for call in last.get("tool_calls", ())]
        handed_in = [each for each in functions if each["name"].startswith("final_result")]
        if handed_in:
            answer = finished("final_result", handed_in[0]["arguments"])
        elif not functions:
            answer = last["content"] or answer
    if answer is not None and not isinstance(answer, str):
        answer = orjson.dumps(answer).decode()
    return {INPUT: asked[-1:], OUTPUT: messages_in(answer, "assistant")}


_READERS: Final[Mapping[str, Callable[[Nested, str], dict[str, Any]]]] = {
    "Vercel AI SDK": lambda attributes, operation: (
        _vercel(attributes, operation) if isinstance(attributes.get("ai"), dict) else {}
    ),
    "Pydantic AI": _pydantic,
}
"""What reads the messages of those conventions whose fields are not messages each."""
_HEADS: Final = {
    each.name: frozenset(
        _keys(name)[:_DEEP]
        for name in (*each.kinds, *(path for paths in each.values.values() for path in paths), *each.also)
    )
    for each in CONVENTIONS
}
"""The first keys of the attributes of each convention. Most spans have those of none."""
