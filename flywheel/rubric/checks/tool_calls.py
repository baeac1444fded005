"""Checks of the steps: which tools were called, in which order, and whether one failed."""

from __future__ import annotations

from typing import Any

import orjson

from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks.found import Found, found
from flywheel.verdict import Exchange


def called(exchange: Exchange) -> list[str]:
    """Names of the tools that were called, in order."""
    names = []
    for turn in exchange.trajectory:
        calls = turn.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            names.append(str(function.get("name") if isinstance(function, dict) else None))
    return names


def _told(names: list[str]) -> str:
    return f"tools called: {', '.join(names) or 'none'}"


def were_called(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    names = called(exchange)
    count = sum(name in criterion.names for name in names)
    fewest = criterion.min if criterion.min is not None else 0 if criterion.max == 0 else 1
    return found(fewest <= count and (criterion.max is None or count <= criterion.max), _told(names))


def were_called_in_order(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    names, wanted = called(exchange), list(criterion.names)
    if criterion.match == "exact":
        return found(names == wanted, _told(names))
    left = iter(names)
    return found(all(name in left for name in wanted), _told(names))


def nothing_failed(_criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    """What failed is in the task's `metadata.errors_json`; a tool message may say so itself by its `status`."""
    failed = [
        f"tool {turn.get('name') or '?'}"
        for turn in exchange.trajectory
        if turn.get("role") == "tool" and turn.get("status") == "error"
    ]
    failed += [str(error) for error in _errors(exchange.line.get("metadata"))]
    return found(not failed, f"failed: {'; '.join(failed)}"[:300] if failed else "no step failed")


def _errors(metadata: Any) -> list[Any]:
    try:
        errors = orjson.loads(metadata["errors_json"])
    except (KeyError, TypeError, orjson.JSONDecodeError):
        return []
    return errors if isinstance(errors, list) else []
