"""What a span recorded, as far as replies need it: the attributes of every client and server generation, as types.

Most of what a row holds is never asked for (formatted prompts, reprs beside messages), and making Python objects of
it would take longer than everything else about a span. So JSON is read into these types: what is not named here is
checked and passed over, and what may be long stays JSON until somebody asks. Nothing here knows what it means.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

NOTHING: Final = Raw(b"null")
"""A value that is not there, which is the same here as one that is null."""

S = TypeVar("S", bound=Struct)


class Operation(Struct, frozen=True):
    name: str = ""


class Agent(Struct, frozen=True):
    id: str = ""
    name: str = ""


class Messages(Struct, frozen=True):
    messages: Raw = NOTHING


class Asked(Struct, frozen=True):
    model: str = ""


class Answered(Struct, frozen=True):
    id: str = ""
    model: str = ""
    finish_reasons: Raw = NOTHING


class Tool(Struct, frozen=True):
    name: Raw = NOTHING
    definitions: Raw = NOTHING
    call: Raw = NOTHING


class GenAi(Struct, frozen=True):
    """The GenAI convention, which AgentScope 1.0.9 and 2.x write and servers convert old spans to."""

    operation: Operation = Operation()
    agent: Agent = Agent()
    input: Messages = Messages()
    output: Messages = Messages()
    request: Asked = Asked()
    response: Answered = Answered()
    usage: Raw = NOTHING
    tool: Tool = Tool()


class Keywords(Struct, frozen=True):
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


class Person(Struct, frozen=True):
    """Servers decode what looks like a number."""

    id: str | int | float = ""


class Attributes(Function, frozen=True):
    """All of them. Generation 1 of the server has the recorded function at the root."""

    gen_ai: GenAi = GenAi()
    agentscope: AgentScope = AgentScope()
    metadata: Raw = NOTHING
    user: Person = Person()
    enduser: Person = Person()

    @property
    def recorded(self) -> Function:
        """The recorded function, wherever it is."""
        return self.agentscope.function or self


class _NamedArguments(Struct, frozen=True):
    kwargs: dict[str, Raw] = {}


class _NamedFunction(Struct, frozen=True):
    input: _NamedArguments = _NamedArguments()


class _NamedScope(Struct, frozen=True):
    function: _NamedFunction | None = None


class _Named(_NamedFunction, frozen=True):
    agentscope: _NamedScope = _NamedScope()


_attributes = msgspec.json.Decoder(Attributes).decode
_named = msgspec.json.Decoder(_Named).decode
_items = msgspec.json.Decoder(list[Raw]).decode
_anything = msgspec.json.Decoder().decode


def attributes_of(data: bytes) -> Attributes:
    """The attributes of a span. Raises ValueError for what is no JSON and TypeError for what is no object."""
    try:
        found = _attributes(data)
        if not data.isascii():
            data.decode()  # what was passed over was not looked at so closely
        return found
    except (msgspec.MsgspecError, RecursionError):
        pass
    # Something has another type than it should have, or is JSON that only lenient readers take: lone surrogates, NaN.
    value = json.loads(data.decode())
    if not isinstance(value, dict):
        raise TypeError(f"a JSON {type(value).__name__}, not an object")
    return _pruned(value, Attributes)


def with_first_argument(found: Attributes, data: bytes | None) -> Attributes:
    """An agent's attributes, with what it was handed as `msg` where its own `reply` calls that otherwise.

    Clients record arguments by name. The first message is it, else the first text.
    """
    recorded = found.recorded
    if recorded.input.kwargs.msg is not NOTHING or data is None or b'"kwargs"' not in data:
        return found
    try:
        named = _named(data)
    except (msgspec.MsgspecError, RecursionError):
        return found
    values = [bytes(value) for value in (named.agentscope.function or named).input.kwargs.values()]
    messages = (value for value in values if value.startswith((b'"Msg(id=', b'["Msg(id=')))
    handed = next(messages, None) or next((value for value in values if value[:1] == b'"' and len(value) > 2), None)
    if handed is None or items_of(recorded.input.args):
        return found
    kwargs = replace(recorded.input.kwargs, msg=Raw(handed))
    function = Function(replace(recorded.input, kwargs=kwargs), recorded.output)
    if found.agentscope.function is None:
        return replace(found, input=function.input)
    return replace(found, agentscope=replace(found.agentscope, function=function))


def _pruned(value: dict[str, Any], kind: type[S]) -> S:
    """An object without what is not of the type it should have."""
    fields: dict[str, Any] = {}
    for name, wanted in _fields(kind).items():
        found = value.get(name)
        if found is None:
            continue
        if wanted is Raw:
            fields[name] = Raw(json.dumps(found).encode())
        elif wanted is str or wanted == str | int | float:
            fields[name] = found if isinstance(found, str) else _scalar(found)
        elif isinstance(found, dict):
            fields[name] = _pruned(found, wanted)
    return kind(**fields)


def _scalar(value: Any) -> str:
    """The text that a number or a truth value was before a server read it as JSON; else an empty one."""
    return json.dumps(value) if isinstance(value, bool | int | float) else ""


def _fields(kind: type[Struct]) -> dict[str, Any]:
    return {name: Function if hint == Function | None else hint for name, hint in get_type_hints(kind).items()}


def value_of(raw: Raw) -> Any:
    """What some JSON says."""
    if raw is NOTHING:
        return None
    try:
        return _anything(raw)
    except msgspec.MsgspecError:
        return json.loads(bytes(raw))


def items_of(raw: Raw) -> list[Raw]:
    """The items of a JSON list; none of anything else."""
    if raw is NOTHING:
        return []
    try:
        return _items(raw)
    except msgspec.MsgspecError:
        value = value_of(raw)
        items = value if isinstance(value, list) else []
        return [Raw(json.dumps(item).encode()) for item in items]


def first_of(raw: Raw) -> Raw:
    """The first item of a JSON list; nothing of anything else."""
    items = items_of(raw)
    return items[0] if items else NOTHING
