"""Decodes the attributes of a span and gives their meaning, for every client and server generation.

Each accessor takes the first of: the GenAI convention (`gen_ai.…`), the function call that AgentScope 1.x records
(`agentscope.function.…`), the layout of generation 1 (at the root). Nothing here knows of traces or replies.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from flywheel.records.chat import (
    Message,
    call_of,
    chat_of,
    failed_in,
    has_media,
    messages_of,
    result_text,
    tool_of,
    unread_in,
)
from flywheel.records.privacy import NOBODY, PrivateNames, is_refusal
from flywheel.records.reprs import is_result, parse_call
from flywheel.records.tool_calls import FINISH_FUNCTIONS
from flywheel.records.trace import ChatMessage, ToolCall, ToolDefinition, get_path
from flywheel.sources.spans.span import (
    ANSWERS,
    NOTHING,
    QUESTIONS,
    UNKNOWN,
    Arguments,
    Attributes,
    Function,
    Span,
    SpanKind,
    TextArguments,
)

S = TypeVar("S", bound=Struct)

_CACHED_BYTES: Final = 8_192
"""The longest message, and a quarter of the longest tool definitions, whose decoded form is cached."""
_MEDIA: Final = (
    b"image", b"audio", b"video", b'"blob"', b'"uri"', b'"file"', b'"data"', b"document", b"ile_data", b"ileData",
    b"inline", b'"resource"',
)  # fmt: skip
"""One of these words occurs in every message with media."""
_TEMPLATE: Final = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")


_decode_attributes = msgspec.json.Decoder(Attributes).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode = msgspec.json.Decoder().decode


def attributes_of(data: bytes) -> Attributes:
    """The attributes of a span. Raises ValueError for invalid JSON and TypeError for JSON that is no object."""
    try:
        found = _decode_attributes(data)
        if not data.isascii():
            data.decode()  # fields that were skipped have not been checked
    except (msgspec.MsgspecError, RecursionError):
        # A field has an unexpected type, or the JSON needs a lenient parser: lone surrogates, NaN.
        value = json.loads(data.decode())
        if not isinstance(value, dict):
            raise TypeError(f"a JSON {type(value).__name__}, not an object") from None
        found = _pruned(value, Attributes)
    function = found.agentscope.function
    return found if function is None else replace(found, input=function.input, output=function.output)


def with_first_argument(found: Attributes, data: bytes | None) -> Attributes:
    """An agent's attributes with its input as `msg`, if its own `reply` names that argument differently.

    Clients record arguments by name. The input is the first message among them, or else the first text.
    """
    kwargs = found.input.kwargs
    if kwargs.msg is not NOTHING or data is None or b'"kwargs"' not in data or items_of(found.input.args):
        return found
    try:
        recorded = _decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return found
    named = get_path(get_path(recorded, "agentscope", "function") or recorded, "input", "kwargs")
    values = list(named.values()) if isinstance(named, dict) else []
    firsts = [value[0] if isinstance(value, list) and value else value for value in values]
    messages = [value for value, first in zip(values, firsts, strict=True) if first_text(first).startswith("Msg(id=")]
    handed = messages[0] if messages else first_text(*values)
    if not handed:
        return found
    return replace(found, input=replace(found.input, kwargs=replace(kwargs, msg=Raw(msgspec.json.encode(handed)))))


def _pruned(value: dict[str, Any], kind: type[S]) -> S:
    """An object without the fields that have an unexpected type."""
    fields: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        found = value.get(name)
        wanted = Function if hint == Function | None else hint
        if found is None:
            continue
        if wanted is Raw:
            fields[name] = Raw(json.dumps(found).encode())
        elif wanted is str or wanted == str | int | float:
            # A number or a truth value was a text before a server read it as JSON.
            is_scalar = isinstance(found, bool | int | float)
            fields[name] = found if isinstance(found, str) else json.dumps(found) if is_scalar else ""
        elif isinstance(found, dict):
            fields[name] = _pruned(found, wanted)
        elif wanted is Arguments and isinstance(found, str):
            fields[name] = TextArguments(text=found)
    return kind(**fields)


def value_of(raw: Raw) -> Any:
    """A JSON value, decoded."""
    if raw is NOTHING:
        return None
    try:
        return _decode(raw)
    except msgspec.MsgspecError:
        return json.loads(bytes(raw))


def items_of(raw: Raw) -> list[Raw]:
    """The items of a JSON list; an empty list for any other value."""
    if raw is NOTHING:
        return []
    try:
        return _decode_items(raw)
    except msgspec.MsgspecError:
        value = value_of(raw)
        items = value if isinstance(value, list) else []
        return [Raw(json.dumps(item).encode()) for item in items]


def first_text(*candidates: Any) -> str:
    """The first of some values that is a text and not empty; else an empty text."""
    return next((value for value in candidates if isinstance(value, str) and value), "")


def first_argument(span: Span, named: Raw) -> Raw:
    """An argument of the recorded call: the named one, or else the first positional one."""
    return next(iter(items_of(span.attributes.input.args)), NOTHING) if named == NOTHING else named


def agent_name(span: Span) -> str:
    attributes = span.attributes
    return (
        attributes.gen_ai.agent.name
        or first_text(get_path(value_of(attributes.metadata), "name"))
        or span.name.removeprefix("invoke_agent ")
    )


def agent_id(span: Span) -> str:
    """The agent's own id, which identifies it whatever its name; empty where client or server left it out."""
    return span.attributes.gen_ai.agent.id or first_text(get_path(value_of(span.attributes.metadata), "id"))


def user_id(span: Span) -> str:
    """The user, if the application names one by OpenTelemetry's attributes."""
    people = (span.attributes.user, span.attributes.enduser)
    return next((str(person.id) for person in people if person.id != ""), "")


def is_private(span: Span, names: PrivateNames) -> bool:
    """Whether nothing of the span's trace may be stored."""
    if span.attributes.flywheel.record != NOTHING and is_refusal(value_of(span.attributes.flywheel.record)):
        return True
    if names == NOBODY:
        return False
    return names.cover(
        users=(user_id(span), span.call.user if span.call is not None else ""),
        conversations=() if span.conversation_id == UNKNOWN else (span.conversation_id,),
        agents=(agent_name(span) if span.kind is SpanKind.AGENT else span.attributes.gen_ai.agent.name,),
    )


def input_messages(span: Span) -> list[Message]:
    """The messages an agent or a model was called with. Raises ReprError."""
    kwargs = span.attributes.input.kwargs
    named = kwargs.msg if span.kind is SpanKind.AGENT else kwargs.messages
    written = messages_of(value_of(span.attributes.gen_ai.input.messages), encoded=True)
    return written or messages_of(value_of(first_argument(span, named)))


def agent_output(span: Span) -> Message | None:
    """The message an agent returned, None where it returned none. Raises ReprError."""
    if written := messages_of(value_of(span.attributes.gen_ai.output.messages), encoded=True):
        return written[-1]
    recorded = value_of(span.attributes.output)
    # Servers that convert old spans write an empty object where there was no output.
    if recorded is None or recorded in ({}, []):
        return None
    # A custom agent may return bare text, which is empty, or was decoded by the server because it was also JSON.
    found = messages_of(recorded)
    return found[-1] if found else {"role": "assistant", "content": [{"type": "text", "text": recorded}]}


def has_messages(agent: Span) -> bool:
    """Whether an agent's span records what it was called with or what it returned, whole or cut."""
    if agent.cut & (QUESTIONS | ANSWERS):
        return True
    attributes = agent.attributes
    recorded = (attributes.gen_ai.input.messages, attributes.gen_ai.output.messages, attributes.output)
    return any(raw != NOTHING for raw in recorded) or first_argument(agent, attributes.input.kwargs.msg) != NOTHING


def returned_metadata(span: Span) -> dict[str, Any]:
    """The metadata of the returned message, which only the repr of AgentScope 1.x has. Raises ReprError."""
    written = bytes(span.attributes.output)
    if written.startswith(b'"') and written.count(b"metadata={") == written.count(b"metadata={}"):
        return {}
    found = messages_of(value_of(span.attributes.output))
    metadata = found[-1].get("metadata") if found else None
    return metadata if isinstance(metadata, dict) else {}


class Conversation(NamedTuple):
    """The messages a model was called with, in the OpenAI form, and which parts of them were not read."""

    chat: list[ChatMessage]
    unread: tuple[str, ...]
    """Each `a part of type X at messages[N]`."""
    failed: frozenset[str]
    """The ids of the calls whose results say that they are errors."""
    has_media: bool
    """Whether they have an image, or anything else that is not text."""


def conversation(span: Span) -> list[ChatMessage]:
    """The messages a model was called with, in the OpenAI form; callers must not change them. Raises ReprError."""
    return read_conversation(span).chat


@lru_cache(maxsize=4)
def read_conversation(span: Span) -> Conversation:
    """What a model was called with; callers must not change it. Raises ReprError.

    The last few are cached, because one reply needs the conversation of its first call more than once.
    """
    chat: list[ChatMessage] = []
    unread: dict[str, str] = {}
    failed: set[str] = set()
    written = items_of(span.attributes.gen_ai.input.messages)
    items = [*map(bytes, written or items_of(first_argument(span, span.attributes.input.kwargs.messages)))]
    if not items or any(item[:1] == b"{" and b'"role"' not in item for item in items):
        # It is no list, or has items of the Responses API, of which several can be one message.
        items = [json.dumps(message).encode() for message in input_messages(span)]
    has_media = False
    for place, item in enumerate(items):
        read = _chat_item(item) if len(item) <= _CACHED_BYTES else _chat_item.__wrapped__(item)
        chat += read.chat
        has_media = has_media or read.has_media
        if read.failed:
            failed |= read.failed
        if read.unread:
            unread = dict.fromkeys(read.unread, f"messages[{place}]") | unread
    parts = tuple(f"a part of type {kind} at {where}" for kind, where in unread.items())
    return Conversation(chat, parts, frozenset(failed), has_media)


@lru_cache(maxsize=1024)
def _chat_item(data: bytes) -> Conversation:
    """One item of a list of messages; of `unread` the types alone. Each model call repeats most items of the one
    before it."""
    value = value_of(Raw(data))
    messages = [value] if isinstance(value, dict) and "role" in value else messages_of(value)
    return Conversation(
        [chat for message in messages for chat in chat_of(message)],
        tuple(kind for message in messages for kind in unread_in(message)),
        frozenset(name for message in messages for name in failed_in(message)) if b"rror" in data else frozenset(),
        any(word in data for word in _MEDIA) and any(map(has_media, messages)),
    )


def speaker(span: Span) -> str:
    """The agent's name, from its own messages in a model call's input. Raises ReprError."""
    said = [message for message in reversed(input_messages(span)) if message.get("role") == "assistant"]
    return next((message["name"] for message in said if isinstance(message.get("name"), str)), "")


def model_output(span: Span) -> Message | None:
    """The message a model answered with."""
    if written := messages_of(value_of(span.attributes.gen_ai.output.messages), encoded=True):
        return {"role": "assistant", **written[0 if _are_choices(written) else -1]}
    output = value_of(span.attributes.output)
    if isinstance(output, str) and is_result(output):
        output = parse_call(output)
    content = get_path(output, "content")
    return None if content is None else {"role": "assistant", "content": content}


def _are_choices(answered: list[Message]) -> bool:
    """Whether the messages that a model answered with are as many answers, of which the first counts."""
    return len(answered) > 1 and all("finish_reason" in message for message in answered)


def choices(span: Span) -> int:
    """How many answers a model call has, as the trace says. Raises ReprError."""
    written = messages_of(value_of(span.attributes.gen_ai.output.messages), encoded=True)
    return len(written) if _are_choices(written) else min(len(written), 1)


def sets_template_parameters(span: Span) -> bool:
    """Whether a request passes parameters to the chat template, which a task's prompt cannot repeat."""
    kwargs = span.attributes.input.kwargs
    body = value_of(kwargs.extra_body)
    named = {name: value_of(raw) for name in _TEMPLATE if (raw := getattr(kwargs, name)) is not NOTHING}
    if isinstance(body, dict):
        named |= {name: body[name] for name in (*_TEMPLATE, "enable_thinking") if name in body}
    return any(value not in (None, "", {}, []) for value in named.values())


def tokens(span: Span) -> tuple[int, int]:
    """Input and output tokens of a model call; 0 where they are not recorded."""
    usage = value_of(span.attributes.gen_ai.usage) or get_path(value_of(span.attributes.output), "usage")
    counts = (usage.get("input_tokens"), usage.get("output_tokens")) if isinstance(usage, dict) else (0, 0)
    given, answered = (count if isinstance(count, int) and 0 < count < 2**63 else 0 for count in counts)
    return given, answered


def tool_definitions(span: Span) -> tuple[ToolDefinition, ...]:
    """The tools a model was offered, in the OpenAI form, without finish functions; callers must not change them."""
    for raw in (span.attributes.gen_ai.tool.definitions, span.attributes.input.kwargs.tools):
        data = bytes(raw)
        tools = _tools(data) if len(data) <= 4 * _CACHED_BYTES else _tools.__wrapped__(data)
        if tools is not None:
            return tools
    return ()


@lru_cache(maxsize=64)
def _tools(data: bytes) -> tuple[ToolDefinition, ...] | None:
    """Tools in the OpenAI form; None if no tools are recorded."""
    written = value_of(Raw(data))
    if not written:
        return None
    if not isinstance(written, list):
        return ()
    tools = [tool_of(definition) for definition in written if isinstance(definition, dict)]
    return tuple(tool for tool in tools if tool["function"].get("name") not in FINISH_FUNCTIONS)


class ToolUse(Struct):
    """What a tool span executed: the call in the OpenAI form, its arguments and its output, both as recorded."""

    span: Span
    call: ToolCall
    arguments: Any
    output: Any
    id: str
    name: str

    @property
    def result(self) -> str | None:
        """The text it returned; None where it returned nothing."""
        return None if self.output is None else result_text(self.output)


def tool_use(span: Span) -> ToolUse:
    """What a tool span executed."""
    tool = span.attributes.gen_ai.tool
    name = value_of(tool.name)
    written = value_of(tool.call)
    called = value_of(span.attributes.input.tool_call)
    arguments = output = None
    if isinstance(written, dict):
        call = call_of({**written, "name": name})
        arguments, output = written.get("arguments"), written.get("result")
    else:
        old = called or value_of(span.attributes.metadata)
        call = call_of(old if isinstance(old, dict) else {"name": name})
    if arguments is None:
        arguments = get_path(called, "input")
    output = value_of(span.attributes.output) if output is None else output
    return ToolUse(span, call, arguments, output, call["id"], call["function"]["name"])
