"""The check `call-format`: the arguments of tool calls are JSON that the tools' definitions allow."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, ValidationInfo, WithJsonSchema, field_validator
from pydantic.config import JsonDict

from flywheel.errors import CostlyCheckError
from flywheel.judge.rubric.checks.degenerate import written_call
from flywheel.judge.rubric.checks.tool_calls import Steps, calls_of
from flywheel.judge.rubric.criterion import Files, checked, penalty, reward
from flywheel.judge.rubric.text import split
from flywheel.records.tool_calls import functions_by_name
from flywheel.records.trace import get_path
from flywheel.records.verdict import Exchange
from flywheel.system.json_schema import problems
from flywheel.system.limited_call import CostlyCallError, FunctionError

VALID: Final = "valid"
INVALID: Final = "invalid"
"""Whether it counts the calls that are right, or finds one that is not."""
_RULES: Final[JsonDict] = {
    "if": {"properties": {"value": {"const": INVALID}}, "required": ["value"]},
    "then": {"properties": {"weight": {"maximum": 0}}, "required": ["weight"]},
    "else": {"properties": {"weight": {"minimum": 0}}},
}


def _check_format(value: Any) -> None:
    if value not in (VALID, INVALID):
        raise ValueError(f"it must be `{VALID}` or `{INVALID}`, not {value!r}")


class CallFormat(Steps):
    """The share of calls whose arguments are JSON that the tool's definition allows; or that one is not."""

    model_config = ConfigDict(json_schema_extra=_RULES)
    type: Literal["call-format"] = "call-format"
    value: Annotated[str, checked(_check_format, optional=True), WithJsonSchema({"enum": [VALID, INVALID]})] = ""

    @field_validator("weight")
    @classmethod
    def _fits(cls, weight: float, info: ValidationInfo) -> float:
        return (penalty if info.data.get("value") == INVALID else reward)(weight, info)

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        """Calls that a parser did not recognise are found as texts, in the steps and in the answer."""
        calls = calls_of(exchange)
        definitions = functions_by_name(exchange.tools)
        found: list[str] = []
        arguments: defaultdict[str, list[Any]] = defaultdict(list)
        for call in calls:
            # Without any definition, names and schemas are not checked.
            if definitions and call.name not in definitions:
                found.append(f"{call.name or 'a call without a name'}: no such tool")
                continue
            try:
                arguments[call.name].append(call.parsed)
            except ValueError as error:
                found.append(f"{call.name}: its arguments are not JSON: {error}")
        for name, values in arguments.items():
            if isinstance(schema := get_path(definitions.get(name), "parameters"), dict):
                found += [f"{name}: {problem}" for problem in _problems(self.id, name, schema, values) if problem]
        said = [turn.get("content") for turn in exchange.trajectory if turn.get("role") == "assistant"]
        written = [mark for text in (*said, exchange.answer) if isinstance(text, str) and (mark := _written(text))]
        found += [f"the text of a tool call: {mark}" for mark in written]
        count = len(calls) + len(written)
        value = float(bool(found)) if self.value == INVALID else 1 - len(found) / count if count else 1.0
        return value, "; ".join(found)[:300] or f"{count} calls, all valid"


def _written(text: str) -> str:
    prose, _ = split(text)
    return written_call(prose)


def _problems(criterion: str, name: str, schema: dict[str, Any], values: list[Any]) -> list[str]:
    try:
        return problems(schema, values)
    except CostlyCallError as error:
        raise CostlyCheckError(
            f"decide criterion {criterion}", f"the schema of the tool {name!r} {error}", "Drop the task."
        ) from None
    except FunctionError:  # which is no fault of the call
        return []
