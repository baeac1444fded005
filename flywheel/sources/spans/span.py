"""A span in a form that does not depend on the schema it was stored in, and the types of its attributes. No logic.

Replies need a small part of what a span records. Attributes are therefore decoded into these types: fields that are
not named here are skipped, and values that may be long stay JSON (`Raw`) until they are needed. Building Python
objects of everything would take longer than all other work on a span.
"""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter
from typing import Any, Final

from msgspec import Raw, Struct

from flywheel.records.trace import ModelCall, SpanStatus

NOTHING: Final = Raw(b"null")
"""A value that is absent or null."""
UNKNOWN: Final = "unknown"
"""The conversation of a span that names none."""
QUESTIONS: Final = frozenset({"gen_ai.input.messages", "input"})
ANSWERS: Final = frozenset({"gen_ai.output.messages", "output"})
"""The attributes with what an agent or a model was asked, and with what it answered."""


class Operation(Struct, frozen=True):
    name: str = ""


class Agent(Struct, frozen=True):
    id: str = ""
    name: str = ""


class Messages(Struct, frozen=True):
    messages: Raw = NOTHING


class ModelRequest(Struct, frozen=True):
    model: str = ""


class ModelResponse(Struct, frozen=True):
    id: str = ""
    model: str = ""
    finish_reasons: Raw = NOTHING


class ToolAttributes(Struct, frozen=True):
    name: Raw = NOTHING
    definitions: Raw = NOTHING
    call: Raw = NOTHING


class GenAi(Struct, frozen=True):
    """OpenTelemetry's GenAI convention. AgentScope 1.0.9 and 2.x write it; servers convert old spans to it."""

    operation: Operation = Operation()
    agent: Agent = Agent()
    input: Messages = Messages()
    output: Messages = Messages()
    request: ModelRequest = ModelRequest()
    response: ModelResponse = ModelResponse()
    usage: Raw = NOTHING
    system_instructions: Raw = NOTHING
    tool: ToolAttributes = ToolAttributes()


class Keywords(Struct, frozen=True):
    """The keyword arguments of a recorded function call."""

    msg: Raw = NOTHING
    messages: Raw = NOTHING
    structured_model: Raw = NOTHING
    tools: Raw = NOTHING
    extra_body: Raw = NOTHING
    chat_template: Raw = NOTHING
    chat_template_kwargs: Raw = NOTHING
    documents: Raw = NOTHING
    reasoning_effort: Raw = NOTHING


class Arguments(Struct, frozen=True):
    args: Raw = NOTHING
    kwargs: Keywords = Keywords()
    tool_call: Raw = NOTHING


class TextArguments(Arguments, frozen=True):
    """Arguments that are recorded as a text: their JSON is not whole."""

    text: str = ""


class Function(Struct, frozen=True):
    """The function call that AgentScope 1.x records."""

    input: Arguments = Arguments()
    output: Raw = NOTHING


class Pause(Struct, frozen=True):
    """The tools for which a reply of AgentScope 2.x stopped until it is called again."""

    hitl_pending_tools: Raw = NOTHING
    external_execution_pending_tools: Raw = NOTHING


class AgentScope(Struct, frozen=True):
    function: Function | None = None
    agent: Pause = Pause()


class Longest(Struct, frozen=True):
    """The length of the longest text among some attributes, in characters, and the different ends of those texts of
    that length that may have been cut there."""

    length: int = 0
    endings: tuple[str, ...] = ()


class FlywheelAttributes(Struct, frozen=True):
    """Of an agent that was found in recorded calls, without a trace: the conversation whose split it takes, and why
    its reply becomes no task, if so. Of any span: whether its trace may be stored. Of one whose attributes were put
    together when it was received: the longest text among those that were sent."""

    root_conversation: str = ""
    skip: str = ""
    detail: str = ""
    record: Raw = NOTHING
    longest: Longest = Longest()


class Person(Struct, frozen=True):
    """Servers decode an id that looks like a number."""

    id: str | int | float = ""


class Attributes(Function, frozen=True):
    """All attributes that replies need.

    `input` and `output` are those of the recorded function. Generation 1 has it at the root; others have it under
    `agentscope.function`, from where `attributes_of` copies it.
    """

    gen_ai: GenAi = GenAi()
    agentscope: AgentScope = AgentScope()
    metadata: Raw = NOTHING
    user: Person = Person()
    enduser: Person = Person()
    flywheel: FlywheelAttributes = FlywheelAttributes()


class SpanKind(StrEnum):
    AGENT = "agent"
    LLM = "llm"
    TOOL = "tool"
    FORMATTER = "formatter"
    OTHER = "other"


class Span(Struct, frozen=True, eq=False):
    """One operation of a trace. `rowid` is its row in the source; times are nanoseconds since 1970 in UTC.
    `request_id` and `call` are those of a model call that `flywheel serve` has recorded. `resource` is what the span
    says of the process that recorded it, as JSON, and `recorded` its attributes as JSON."""

    rowid: int
    span_id: str
    trace_id: str
    parent_id: str
    name: str
    kind: SpanKind
    started_ns: int
    ended_ns: int
    status: SpanStatus
    status_message: str
    conversation_id: str
    attributes: Attributes
    events: tuple[dict[str, Any], ...] = ()
    service: str = ""
    request_id: str = ""
    call: ModelCall | None = None
    resource: str = ""
    recorded: bytes = b""
    cut: frozenset[str] = frozenset()
    """The attributes whose JSON breaks off; they are left out of `attributes`."""
    limit: int = 0
    """The length in characters at which texts of this resource were cut in this trace; 0 if none was seen."""


in_order = attrgetter("started_ns", "rowid")
"""Sort key: spans by start time. Converted rows have times in milliseconds, so many tie; rows are stored in the
order in which spans ended."""
