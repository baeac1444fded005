"""Translates the attributes and events of other conventions into those of OpenTelemetry's GenAI convention.

A span is translated when it is received, so that everything behind the receiver knows one convention. An attribute of
the GenAI convention that the span has already is kept. `CONVENTIONS` says which attributes are read; the table in
`docs/how-to/otlp.md` is generated from it (`python -m scripts.reference_pages`).
https://opentelemetry.io/docs/specs/semconv/gen-ai/
https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md
https://langfuse.com/integrations/native/opentelemetry
https://www.traceloop.com/docs/openllmetry/contributing/semantic-conventions
https://ai-sdk.dev/docs/ai-sdk-core/telemetry
https://ai.pydantic.dev/logfire/
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from flywheel.records.chat import Message, chat_of, constructed, is_parts, tool_of, with_unread
from flywheel.records.reprs import ReprError
from flywheel.records.tool_calls import finished
from flywheel.records.trace import get_path
from flywheel.sources.calls.responses_api import answer_of
from flywheel.sources.spans.recorded_calls import message_of

Nested = dict[str, Any]
"""Attributes as Studio nests them, or an object with such attributes."""
Loaded = Callable[[str], Any]
"""The value of JSON text; the text itself if it is no object, list or quoted text."""

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


class Convention(NamedTuple):
    """One convention: its row in the documented table, and what is read of it by name.

    - `kinds`: attributes that show the operation of a span, each with the operations by its values in lower case, or
      with one operation where its presence shows it. Any other value shows none.
    - `values`: attributes of the GenAI convention, each with those of this one that are read in its place.
    - `also`: what is read besides, for people. `limits`: what is not. `tested`: the versions whose traces are tests.
    - `is_json`: a text that a tool returned is recorded as JSON.
    """

    name: str
    kinds: Mapping[str, Mapping[str, str] | str]
    values: Mapping[str, tuple[str, ...]]
    also: tuple[str, ...]
    limits: str
    tested: str
    is_json: bool = False

    @property
    def read_from(self) -> list[str]:
        """The attributes and events that are read."""
        return list(
            dict.fromkeys([*self.kinds, *(name for names in self.values.values() for name in names), *self.also])
        )


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
        f"without `{TOOLS}`, replies with tool calls are left out of training: the trace has no tool definitions",
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
            "the body in attributes of the event, or as JSON in `gen_ai.event.content`",
        ),
        "the same events as logs are not read: Flywheel receives traces only. Events have no tool definitions",
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
            "session.id": (),
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
        "tool definitions are those of `langfuse.openai`; other generations have none",
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
        "each `generateText`, `streamText`, `generateObject` and `streamObject` is a reply; embeddings are not read",
        "ai 4.3.19, 5.0.277, 6.0.326 (7 sends the GenAI convention with `@ai-sdk/otel`)",
        is_json=True,
    ),
    Convention(
        "Pydantic AI",
        {"pydantic_ai.all_messages": _AGENT, "all_messages_events": _AGENT, _NAME: _TOOL},
        {
            "gen_ai.agent.name": ("agent_name",),
            TOOLS: ("model_request_parameters",),
            _ARGUMENTS: ("tool_arguments",),
            _RESULT: ("tool_response",),
        },
        ("final_result", "events"),
        "the arguments of `final_result` are the answer; name output tools with other names in `rollout.finish_tools`."
        " Version 1 with `event_mode: logs` is not read",
        "pydantic-ai 1.0.18 (versions 1, 2, 3), 2.68.0 (versions 3, 5, 6)",
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
        ("gen_ai.prompt.N.*", "gen_ai.completion.N.*", "llm.request.functions.N.*"),
        "a `workflow` or `task` is a reply only where no agent is. SDKs keep 128 attributes of a span: of a longer"
        " conversation messages are missing, which makes its prompt inexact",
        "opentelemetry-instrumentation-openai and -langchain 0.47.5, 0.62.4, traceloop-sdk 0.47.5, 0.62.4",
        is_json=True,
    ),
    Convention(
        "LangChain, serialised messages",
        {},
        {},
        (
            '`{"lc": 1, "type": "constructor", "id": […, "HumanMessage"], "kwargs": {…}}` wherever a message may stand',
        ),
        "classes of messages of your own, unless LangChain serialises them with a known type, are not read",
        "langchain-core 0.3, 1.8.3",
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
TEXTS_OF_EVENTS: Final = frozenset({"content", "message"})
"""The same of an event, where they are its whole names."""
_EMPTY: Final = (None, "", [], {})
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
_EVENT: Final = re.compile(r"gen_ai\.(system|developer|user|assistant|tool)\.message|gen_ai\.(choice)")
_OF_MESSAGE: Final = frozenset(
    {"role", "content", "contents", "name", "tool_call_id", "tool_calls", "function_call", "finish_reason", "id",
     "function_call_name", "function_call_arguments_json", "refusal", "reasoning", "reasoning_content", "status"}
)  # fmt: skip
"""The fields of a flattened message that are understood. Reasoning never counts as text."""
_RETRY: Final = "Fix the errors and try again."
"""How Pydantic AI ends what it tells a model whose answer is not valid."""


def known_operation(written: Any) -> str:
    """An operation under the name that the reader knows, if it has one for it."""
    return _OPERATIONS.get(str(written).replace("_", "").lower(), str(written))


def translate(attributes: Nested, name: str, loaded: Loaded, events: Sequence[Nested] = (), dropped: int = 0) -> None:
    """Add the attributes of the GenAI convention to the nested attributes of the span `name`.

    `events` are those of the span, nested as well; `dropped` is how many attributes the client has dropped.
    """
    for key, role in ((INPUT, "user"), (OUTPUT, "assistant")):
        if written := _unpacked(get_path(attributes, *key.split(".")), role):
            put(attributes, written, *key.split("."))
    if isinstance(own := attributes.get("openinference"), dict):
        # A reader would take these for the function call that AgentScope records.
        own |= {key: attributes.pop(key) for key in ("input", "output", "metadata") if key in attributes}
    operation = get_path(attributes, "gen_ai", "operation", "name") or _kind(attributes)
    _add(attributes, {"gen_ai.operation.name": operation})
    operation = known_operation(operation)
    had_messages = get_path(attributes, *INPUT.split(".")) is not None
    for convention in CONVENTIONS:
        _add(attributes, _said(attributes, convention, operation, name, loaded))
    _add(attributes, _in_events(events, operation, loaded))
    if operation == _TOOL:
        for key in (_ARGUMENTS, _RESULT):
            if (value := _of_langchain(written := get_path(attributes, *key.split(".")))) is not written:
                put(attributes, value, *key.split("."))
    elif operation == _CHAT:
        # What was read is not stored twice.
        attributes.pop("llm", None)
        for key in ("prompt", "completion"):
            attributes["gen_ai"].pop(key, None)
        sent = get_path(attributes, *INPUT.split("."))
        if dropped and not had_messages and isinstance(sent, list) and sent:
            sent[-1] = with_unread(sent[-1], "dropped attribute")


def _kind(attributes: Nested) -> str | None:
    """The operation of a span that does not name it by the GenAI convention."""
    for convention in CONVENTIONS:
        for path, kinds in convention.kinds.items():
            value = get_path(attributes, *path.split("."))
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
    keys = path.split(".")
    value = get_path(attributes, *(["openinference"] if keys[0] in ("input", "output") else []), *keys)
    return None if value in _EMPTY else value


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
        said |= _executed(given, returned, loaded, is_json=convention.is_json)
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
            got = _first(answered, "assistant")
            if not got and convention.name == "Langfuse":
                # An answer of Langfuse may be JSON that is no message.
                got = _first(read[OUTPUT], "assistant")
            said |= {
                INPUT: _first(asked, "user"),
                OUTPUT: got,
                "gen_ai.response.id": get_path(answered[-1], "id") if answered else None,
                "gen_ai.response.model": get_path(answered[-1], "model") if answered else None,
            }
            read[TOOLS] = [*read.get(TOOLS, ()), *(get_path(value, "tools") for value in asked)]
        else:
            for question in asked or [None]:
                for answer in answered:
                    said = _conversation(question, answer) | said
    if operation == _CHAT and (
        tools := next(filter(None, (_tools(value, loaded) for value in read.get(TOOLS, ()))), [])
    ):
        said[TOOLS] = tools
        if any(tool is None for tool in tools) and said.get(INPUT):
            said[INPUT][-1] = with_unread(said[INPUT][-1], "missing tool definition")
    return said


def _add(attributes: Nested, said: dict[str, Any]) -> None:
    """Add what is said by dotted names, and not there yet."""
    for key, value in said.items():
        path = key.split(".")
        if value not in _EMPTY and get_path(attributes, *path) is None:
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
    called, message = _of_langchain(asked), _of_langchain(answered)
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


def _of_langchain(value: Any) -> Any:
    """What LangChain's callbacks were given or returned, without what they add to it; any other value as it is."""
    if isinstance(value, dict) and value.keys() & {"tags", "metadata", "kwargs"}:
        for key in ("inputs", "outputs", "output", "input_str"):
            if key in value:
                inner = value[key]
                if key == "input_str" and isinstance(inner, str):
                    try:
                        inner = literal_eval(inner)
                    except (ValueError, SyntaxError, MemoryError, RecursionError):
                        pass
                return constructed(inner)
    return constructed(value)


def _conversation(asked: Any, answered: Any) -> dict[str, Any]:
    """The messages of an agent, if its answer is recorded as text or messages; else those of its model calls count.

    Of several arguments, only one that is a text or messages is surely the question.
    """
    if not (output := _messages(answered, "assistant")):
        return {}
    if not (messages := _messages(asked, "user")) and isinstance(asked, dict):
        arguments = [*asked.values()]
        if isinstance(asked.get("args"), list) and isinstance(asked.get("kwargs"), dict):
            arguments = [*asked["args"], *asked["kwargs"].values()]
        found = [said for each in arguments if (said := _messages(each, "user"))]
        messages = found[0] if len(found) == 1 else []
    return {INPUT: messages, OUTPUT: output}


def _first(values: Iterable[Any], role: str) -> list[Message]:
    """The messages of the first value that has any."""
    return next(filter(None, (_messages(value, role) for value in values)), [])


def _messages(value: Any, role: str) -> list[Message]:
    """The messages in a recorded value: a text, messages, also flattened, or a request or response of OpenAI's or
    LangChain's interfaces."""
    value = _of_langchain(value)
    match value:
        case str():
            return [{"role": role, "content": value}] if value else []
        case {"role": str(), "content": _} | {"role": str(), "tool_calls": _}:
            return [value]
        case {"output": list()} | [{"output": list()}]:
            return [message_of(answer_of(value[0] if isinstance(value, list) else value))]
        case {"generations": [[{"message": dict(message)}, *_], *_]}:
            return _messages(message, role)
        case {"messages": list(messages)} | list(messages):
            if len(messages) == 1 and isinstance(messages[0], list) and not _is_pair(messages[0]):
                (messages,) = messages  # LangChain's models are given lists of conversations.
            said = [_paired(message) for message in messages]
            return said if any(map(_has_role, said)) and all(map(_is_said, said)) else []
    items, has_gap = _listed(value)
    said = [_message(inner, role) for item in items if isinstance(inner := _inner(item, "message"), dict)]
    if said and has_gap:
        said[0] = with_unread(said[0], "missing message")
    return said


def _is_pair(value: Any) -> bool:
    """Whether a value is LangChain's short form of a message: its role and its text."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(text, str) for text in value)
        and value[0] in ("system", "user", "human", "assistant", "ai", "tool", "developer")
    )


def _paired(value: Any) -> Any:
    if not _is_pair(value):
        return constructed(value)
    role = {"human": "user", "ai": "assistant"}.get(value[0], value[0])
    return {"role": role, "content": value[1]}


def _has_role(value: Any) -> bool:
    return bool(get_path(value, "role"))


def _is_said(value: Any) -> bool:
    """Whether a value is a message, or an item that stands among messages in OpenAI's Responses API."""
    kind = get_path(value, "type")
    return _has_role(value) or (
        isinstance(kind, str) and (kind == "reasoning" or kind.endswith(("_call", "_output")))
    )


def _message(fields: Nested, role: str) -> Message:
    """A flattened message of OpenInference or OpenLLMetry, or the body of an event, in the OpenAI form.

    What is not understood of it, or missing in it, is a part that was not read.
    """
    message: Message = {
        key: fields[key]
        for key in ("name", "tool_call_id", "finish_reason", "refusal")
        if fields.get(key) is not None
    }
    message["role"] = fields["role"] if isinstance(fields.get("role"), str) else role
    unread = sorted(fields.keys() - _OF_MESSAGE)
    content = fields.get("content")
    parts, has_gap = _listed(fields["contents"] if "contents" in fields else content)
    if isinstance(content, str):
        message["content"] = content if (written := _parts(content)) is None else written
    elif parts:
        message["content"] = [_part(_inner(part, "message_content")) for part in parts]
    elif isinstance(content, dict):
        message["content"] = [content]
    elif content is not None and not isinstance(content, list):
        message["content"] = str(content)
    unread += ["missing part"] if has_gap else []
    calls, has_gap = _listed(fields.get("tool_calls"))
    calls = [call for each in calls if isinstance(call := _inner(each, "tool_call"), dict)]
    called = fields.get("function_call")
    if isinstance(fields.get("function_call_name"), str):
        called = {"name": fields["function_call_name"], "arguments": fields.get("function_call_arguments_json")}
    if isinstance(called, dict) and called.get("name"):
        calls.append(called)
    if calls:
        message["tool_calls"] = calls
    unread += ["missing tool call"] if has_gap else []
    if not message.keys() & {"content", "tool_calls", "refusal"} and not fields.keys() & {"content", "reasoning"}:
        unread.append("message without content")
    for kind in unread:
        message = with_unread(message, kind)
    return message


def _part(part: Any) -> Any:
    """A part of a content. Pydantic AI's events call its type a kind."""
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("image"), dict) and "image" in part["image"]:
        return {
            "type": "image_url",
            "image_url": part["image"]["image"].get("url", "")
            if isinstance(part["image"]["image"], dict)
            else part["image"]["image"],
        }
    if isinstance(kind := part.get("kind"), str) and "type" not in part:
        key = "thinking" if kind == "thinking" else "text"
        return {"type": kind, key: part.get("text")} if kind in ("text", "thinking") else {**part, "type": kind}
    return part


def _parts(text: str) -> list[Any] | None:
    """The parts in a text that is JSON of parts of a message; None for any other text, JSON too."""
    if not text.startswith("["):
        return None
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if is_parts(value) else None


def _inner(item: Any, name: str) -> Any:
    """What OpenInference has one level deeper, under a name."""
    return item[name] if isinstance(item, dict) and isinstance(item.get(name), dict) else item


def _listed(value: Any) -> tuple[list[Any], bool]:
    """The items of a list whose indices may be parts of attribute names, in their order, and whether some are missing.

    Indices may be of any size.
    """
    if isinstance(value, list):
        return value, False
    if not isinstance(value, dict):
        return [], False
    keys = sorted(filter(str.isdecimal, value), key=lambda key: (len(key), key))
    return [value[key] for key in keys], keys != [str(place) for place in range(len(keys))]


def _tools(value: Any, loaded: Loaded) -> list[Any]:
    """Definitions of tools: OpenAI's, JSON texts, flattened, or the parameters of a request by Pydantic AI. None
    stands for a missing one."""
    if isinstance(value, dict) and "function_tools" in value:
        value = [*(value["function_tools"] or ()), *(value.get("output_tools") or ())]
        return [tool_of(each) for each in value if isinstance(each, dict)]
    items, has_gap = _listed(value)
    tools = []
    for item in items:
        tool = get_path(_inner(item, "tool"), "json_schema") or item
        tool = loaded(tool) if isinstance(tool, str) else tool
        if isinstance(tool, dict):
            schema = tool.get("parameters")
            tools.append({**tool, "parameters": loaded(schema)} if isinstance(schema, str) else tool)
    return [*tools, *([None] if has_gap else [])]


def _vercel(attributes: Nested, operation: str) -> dict[str, Any]:
    """The messages of the Vercel AI SDK: a prompt in three fields, and an answer in as many."""
    prompt, response = attributes["ai"].get("prompt"), attributes["ai"].get("response")
    if get_path(response, "text") is None and get_path(response, "object") is None:
        response = response if get_path(response, "toolCalls") else attributes["ai"].get("result") or response
    asked = _messages(get_path(prompt, "messages"), "user") or _messages(get_path(prompt, "prompt"), "user")
    if asked and isinstance(system := get_path(prompt, "system"), str) and system:
        asked = [{"role": "system", "content": system}, *asked]
    if isinstance(prompt, str):
        asked = _messages(prompt, "user")
    parts = [
        {"type": "text", "text": text if isinstance(text, str) else orjson.dumps(text).decode()}
        for key in ("text", "object")
        if (text := get_path(response, key)) not in _EMPTY
    ]
    if operation == _CHAT:
        called = get_path(response, "toolCalls")
        parts += [{**call, "type": "tool-call"} for call in called or () if isinstance(call, dict)]
    return {INPUT: asked, OUTPUT: [{"role": "assistant", "content": parts}] if parts else []}


def _pydantic(attributes: Nested, operation: str) -> dict[str, Any]:
    """The messages of Pydantic AI: of an agent those of its whole conversation, of a model call version 1's events."""
    if operation == _CHAT:
        return _in_events(attributes.get("events"), operation, lambda text: text)
    messages = get_path(attributes, "pydantic_ai", "all_messages")
    if not isinstance(messages, list):
        said = _in_events(attributes.get("all_messages_events"), operation, lambda text: text)
        messages = [*said.get(INPUT, ()), *said.get(OUTPUT, ())]
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
    return {INPUT: asked[-1:], OUTPUT: _messages(answer, "assistant")}


def _in_events(events: Any, operation: str, loaded: Loaded) -> dict[str, Any]:
    """The messages in events: those of a span, or those that Pydantic AI writes into an attribute."""
    sent: list[Message] = []
    choices: list[tuple[int, Message]] = []
    for event in events if isinstance(events, list | tuple) else ():
        if not isinstance(event, dict):
            continue
        written = event.get("event.name") or get_path(event, "event", "name") or event.get("name")
        if (found := _EVENT.fullmatch(str(written))) is None:
            continue
        held = event.get("attributes")
        body = _body(held if isinstance(held, dict) else event, loaded)
        if found[2]:
            place = body.get("index")
            message = body.get(
                "message", body.get("content", body if body.keys() & {"tool_calls", "refusal"} else None)
            )
            message = loaded(message) if isinstance(message, str) else message
            message = message if isinstance(message, dict) and not _is_block(message) else {"content": message}
            reason = {"finish_reason": str(body.get("finish_reason") or "stop")}
            if any(message.get(key) not in _EMPTY for key in ("content", "tool_calls", "refusal", "function_call")):
                place = place if isinstance(place, int) else len(choices)
                choices.append((place, {**reason, **_message(message, "assistant")}))
        else:
            fields = {key: value for key, value in body.items() if key in _OF_MESSAGE}
            if found[1] == "tool":
                fields.setdefault("tool_call_id", fields.get("id"))
            sent.append(_message(fields, found[1]))
    got = [message for _, message in sorted(choices, key=lambda choice: choice[0])]
    if operation == _TOOL:
        given, returned = sent[:1], got[:1]
        return {
            _ARGUMENTS: given[0].get("content") if given else None,
            _RESULT: returned[0].get("content") if returned else None,
        }
    return {INPUT: sent, OUTPUT: got}


def _is_block(value: Nested) -> bool:
    return "role" not in value and is_parts([value])


def _body(held: Nested, loaded: Loaded) -> Nested:
    """The body of an event: a JSON object in one of its attributes, or else its attributes."""
    for value in (get_path(held, "gen_ai", "event", "content"), get_path(held, "event", "body"), held.get("body")):
        value = loaded(value) if isinstance(value, str) else value
        if isinstance(value, dict):
            return value
        if isinstance(value, str | list) and value:
            return {**held, "content": value}
    return held


_READERS: Final[Mapping[str, Callable[[Nested, str], dict[str, Any]]]] = {
    "Vercel AI SDK": lambda attributes, operation: (
        _vercel(attributes, operation) if isinstance(attributes.get("ai"), dict) else {}
    ),
    "Pydantic AI": _pydantic,
}
"""What reads the messages of those conventions whose fields are not messages each."""
