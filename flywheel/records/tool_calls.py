"""Tools in the steps of a reply: offered, called, returned or failed; finish functions. Plain data, no I/O."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from flywheel.records.trace import TOOL_ERROR, ChatMessage, get_path, reasoning_of


@dataclass(frozen=True, slots=True)
class Tool:
    """An offered function. `digest` is a hash of its definition, which includes its name and its description."""

    name: str
    definition: Mapping[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returned. An error is a result, too. `task_id` is a task whose trace has it; empty if unknown."""

    content: str
    failed: bool = False
    task_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SharedRecordings:
    """What rollouts may use of other traces: results by key of the call."""

    results: Mapping[str, ToolResult] = field(default_factory=dict)


def functions_by_name(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The definitions of offered tools, in the OpenAI chat form or flat, as the GenAI convention writes them. If two
    have the same name, the last counts. Definitions without a name are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            function = {key: value for key, value in tool.items() if key != "type"}
        if isinstance(name := function.get("name"), str) and name:
            found[name] = function
    return found


FINISH_FUNCTIONS: Final = frozenset({"generate_response", "GenerateStructuredOutput", "final_result"})
"""Those of AgentScope and Pydantic AI, which always end a rollout. `rollout.finish_tools` names others."""


def finish_answer(name: str, arguments: Mapping[str, Any]) -> str:
    """The answer in the arguments of a finish function: its `response`, or its only argument if that is a text, else
    all of them as JSON. Those of `FINISH_FUNCTIONS` are a structured answer without a `response`: always JSON."""
    if isinstance(response := arguments.get("response"), str):
        return response
    values = list(arguments.values())
    if name not in FINISH_FUNCTIONS and len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(arguments, ensure_ascii=False)


def finished(name: str, arguments: str) -> str:
    """The answer in the arguments of a finish function; the arguments themselves if they are no JSON object."""
    try:
        given = json.loads(arguments)
        return finish_answer(name, given) if isinstance(given, dict) else arguments
    except (ValueError, RecursionError):
        return arguments


def arguments_text(given: Any) -> str:
    """The arguments of a call as JSON text: an object, its text, or that encoded again. None at all are `{}`. What is
    no object stays as it is, as text."""
    written = inner = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        while isinstance(value := json.loads(inner or "{}"), str):
            inner = value.strip()
    except (ValueError, RecursionError):
        return written if written.strip() else "{}"
    return inner if isinstance(value, dict) and inner else "{}" if value in (None, {}) else written


def is_object(arguments: Any) -> bool:
    """Whether the arguments of a call are given, as a JSON object or its text."""
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(parse_json(arguments) if isinstance(arguments, str) else arguments, dict)
    return False


def said_in(messages: Iterable[ChatMessage]) -> list[tuple[str, ...]]:
    """What messages say: role, text, reasoning, and the names and arguments of calls, whatever the ids of these."""
    return [
        (
            str(message.get("role")),
            str(message.get("content") or "").strip(),
            reasoning_of(message).strip(),
            *(text for call in calls_in([message]) for text in (call.name, _sorted(call))),
        )
        for message in messages
    ]


def _sorted(call: Call) -> str:
    with contextlib.suppress(ValueError):
        return json.dumps(call.parsed, sort_keys=True)
    return str(call.arguments)


MAX_DIGITS: Final = 308
"""Of a whole number. More are beyond the range of a double, in which other programs keep numbers."""


@dataclass(slots=True)
class Call:
    """A tool call of the steps.

    Attributes:
        arguments: As the step has them: a JSON text, or what was parsed of it.
        result: None if the steps have none.
        failed: Whether the steps or the task's errors say that it failed.
    """

    id: str
    name: str
    arguments: Any
    result: str | None = None
    failed: bool = False

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises ValueError if they are not a JSON object; no text at all is an empty one."""
        try:
            value = parse_json(self.arguments or "{}") if isinstance(self.arguments, str) else self.arguments
        except RecursionError:
            raise ValueError("they are nested too deeply") from None
        if not isinstance(value, dict | None):
            raise ValueError("they are not an object")
        return value or {}


def calls_in(steps: Iterable[ChatMessage], failures: Iterable[object] = ()) -> list[Call]:
    """The tool calls of steps with their results, in order. `failures` are the
    errors that their task lists."""
    calls: list[Call] = []
    latest: list[Call] = []
    errors = {str(failure) for failure in failures}
    for turn in steps:
        if isinstance(made := turn.get("tool_calls"), list) and made:
            latest = [_call(each) for each in made]
            calls += latest
        if turn.get("role") != "tool":
            continue
        # The latest calls first: some models number their calls from 0 in every answer.
        waiting = (each for each in (*latest, *reversed(calls)) if each.result is None)
        call = next((each for each in waiting if each.id == str(turn.get("tool_call_id"))), None)
        if call is not None:
            call.result = str(turn.get("content"))
            error_text = f"tool {call.name}: {' '.join(call.result.split())}"[:500]
            call.failed = turn.get("status") == "error" or bool(TOOL_ERROR.match(call.result)) or error_text in errors
    for call in calls:
        if call.result is None:
            call.failed = any(error.startswith(f"tool {call.name}: ") for error in errors)
    return calls


def _call(step: Any) -> Call:
    name = get_path(step, "function", "name")
    arguments = get_path(step, "function", "arguments")
    return Call(str(get_path(step, "id")), name if isinstance(name, str) else "", arguments)


def parse_json(text: str) -> Any:
    """JSON without NaN, Infinity and numbers that a double cannot hold.

    Raises ValueError, and RecursionError if it is nested too deeply.
    """
    return json.loads(text, parse_constant=_reject_constant, parse_int=_integer, parse_float=_float)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too large")
    return int(digits)


def _float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError("a number is too large")
    return number


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid in JSON")
