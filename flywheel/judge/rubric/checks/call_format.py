"""The check `call-format`: the arguments of tool calls are JSON that the tools' definitions allow."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from flywheel.errors import CostlyCheckError
from flywheel.judge.rubric.checks.degenerate import written_call
from flywheel.judge.rubric.checks.tool_calls import calls_of, definitions_of
from flywheel.judge.rubric.rubric import INVALID, Criterion, Rubric
from flywheel.judge.rubric.text import split
from flywheel.records.trace import get_path
from flywheel.records.verdict import Exchange
from flywheel.system.json_schema import problems
from flywheel.system.limited_call import CostlyCallError, FunctionError


def check_call_format(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[float, str]:
    """Calls that a parser did not recognise are found as texts, in the steps and in the answer."""
    calls = calls_of(exchange)
    definitions = definitions_of(exchange)
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
            found += [f"{name}: {problem}" for problem in _problems(criterion, name, schema, values) if problem]
    said = [turn.get("content") for turn in exchange.trajectory if turn.get("role") == "assistant"]
    written = [mark for text in (*said, exchange.answer) if isinstance(text, str) and (mark := _written(text))]
    found += [f"the text of a tool call: {mark}" for mark in written]
    count = len(calls) + len(written)
    value = float(bool(found)) if criterion.value == INVALID else 1 - len(found) / count if count else 1.0
    return value, "; ".join(found)[:300] or f"{count} calls, all valid"


def _written(text: str) -> str:
    prose, _ = split(text)
    return written_call(prose)


def _problems(criterion: Criterion, name: str, schema: dict[str, Any], values: list[Any]) -> list[str]:
    try:
        return problems(schema, values)
    except CostlyCallError as error:
        raise CostlyCheckError(
            f"decide criterion {criterion.id}", f"the schema of the tool {name!r} {error}", "Drop the task."
        ) from None
    except FunctionError:  # which is no fault of the call
        return []
