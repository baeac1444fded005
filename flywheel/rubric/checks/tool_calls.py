"""The checks of the steps: `tool-called`, `tool-sequence` and `no-error-span`."""

from __future__ import annotations

from typing import Any

import orjson

from flywheel.rubric.criterion import Criterion
from flywheel.rubric.rubric import Rubric
from flywheel.trace import get_path
from flywheel.verdict import Exchange


def called_tools(exchange: Exchange) -> list[str]:
    """Names of the tools that were called, in order."""
    turns = (turn.get("tool_calls") for turn in exchange.trajectory)
    return [str(get_path(call, "function", "name")) for calls in turns if isinstance(calls, list) for call in calls]


def check_tool_called(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    names = called_tools(exchange)
    count = sum(name in criterion.names for name in names)
    least = criterion.min if criterion.min is not None else 0 if criterion.max == 0 else 1
    return least <= count and (criterion.max is None or count <= criterion.max), _listed(names)


def check_tool_sequence(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    names, wanted = called_tools(exchange), list(criterion.names)
    if criterion.match == "exact":
        return names == wanted, _listed(names)
    remaining = iter(names)
    return all(name in remaining for name in wanted), _listed(names)


def _listed(names: list[str]) -> str:
    return f"tools called: {', '.join(names) or 'none'}"


def check_no_error(_criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    """Errors are in the task's `metadata.errors_json`; a tool message can also carry the status `error`."""
    failed = [
        f"tool {turn.get('name') or '?'}"
        for turn in exchange.trajectory
        if turn.get("role") == "tool" and turn.get("status") == "error"
    ]
    failed += [str(error) for error in _errors(exchange.line.get("metadata"))]
    return not failed, f"failed: {'; '.join(failed)}"[:300] if failed else "no step failed"


def _errors(metadata: Any) -> list[Any]:
    try:
        errors = orjson.loads(metadata["errors_json"])
    except (KeyError, TypeError, orjson.JSONDecodeError):
        return []
    return errors if isinstance(errors, list) else []
