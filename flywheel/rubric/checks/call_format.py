"""The check `call-format`: the arguments of tool calls are JSON that the tools' definitions allow."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import regex
from jsonschema import SchemaError
from jsonschema.protocols import Validator
from referencing.exceptions import Unresolvable

from flywheel.rubric.checks.degenerate import written_call
from flywheel.rubric.checks.json_schema import validator_of
from flywheel.rubric.checks.markdown import split
from flywheel.rubric.checks.tool_calls import calls_of, definitions_of
from flywheel.rubric.criterion import INVALID, Criterion
from flywheel.rubric.rubric import Rubric
from flywheel.tool_calls import Call
from flywheel.trace import get_path
from flywheel.verdict import Exchange


def check_call_format(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[float, str]:
    """Calls that a parser did not recognise are found as texts, in the steps and in the answer."""
    calls = calls_of(exchange)
    definitions = definitions_of(exchange)
    problems = [problem for call in calls if (problem := _problem(call, definitions))]
    said = [turn.get("content") for turn in exchange.trajectory if turn.get("role") == "assistant"]
    written = [mark for text in (*said, exchange.answer) if isinstance(text, str) and (mark := _written(text))]
    problems += [f"the text of a tool call: {mark}" for mark in written]
    count = len(calls) + len(written)
    value = float(bool(problems)) if criterion.value == INVALID else 1 - len(problems) / count if count else 1.0
    return value, "; ".join(problems)[:300] or f"{count} calls, all valid"


def _written(text: str) -> str:
    prose, _ = split(text)
    return written_call(prose)


def _problem(call: Call, definitions: dict[str, dict[str, Any]]) -> str:
    """What is wrong with a call; empty if nothing is. Without any definition, names and schemas are not checked."""
    if definitions and call.name not in definitions:
        return f"{call.name or 'a call without a name'}: no such tool"
    try:
        arguments = call.parsed
    except ValueError as error:
        return f"{call.name}: its arguments are not JSON: {error}"
    schema = get_path(definitions.get(call.name), "parameters")
    if not isinstance(schema, dict) or (validator := _validator(json.dumps(schema, sort_keys=True))) is None:
        return ""
    try:
        problem = next(validator.iter_errors(arguments), None)
    except (Unresolvable, RecursionError, TimeoutError, regex.error):
        # The definition cannot be applied, which is no fault of the call.
        return ""
    return f"{call.name}: at {problem.json_path}: {problem.message}" if problem else ""


@lru_cache(maxsize=256)
def _validator(schema: str) -> Validator | None:
    """None for parameters that are no JSON Schema: that is no fault of the call."""
    validator = validator_of(json.loads(schema))
    try:
        validator.check_schema(validator.schema)
    except (SchemaError, RecursionError):
        return None
    return validator
