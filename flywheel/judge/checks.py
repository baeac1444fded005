"""Criteria that need no judge: checks of the answer's text and of the steps."""

from __future__ import annotations

import re

from flywheel.rubric import Criterion
from flywheel.verdict import CriterionResult, Exchange


def check(criterion: Criterion, exchange: Exchange) -> CriterionResult:
    """The result of a criterion that does not ask the judge."""
    holds, reason = _holds(criterion, exchange)
    value = 1.0 if holds else 0.0
    return CriterionResult(criterion.id, "yes" if holds else "no", value, criterion.passes(value), reason)


def _holds(criterion: Criterion, exchange: Exchange) -> tuple[bool, str]:
    answer, value = exchange.answer, criterion.value
    if criterion.type in ("regex", "not-regex"):
        found = re.search(str(value), answer, re.DOTALL) is not None
        return found is (criterion.type == "regex"), f"the pattern is {'found' if found else 'not found'}"
    if criterion.type == "contains":
        found = str(value) in answer
        return found, f"the text is {'found' if found else 'not found'}"
    if criterion.type == "min-length":
        return len(answer) >= int(value), f"{len(answer)} characters"
    if criterion.type == "max-length":
        return len(answer) <= int(value), f"{len(answer)} characters"
    assert criterion.type == "tool-called"
    called = [
        call.get("function", {}).get("name") for turn in exchange.trajectory for call in turn.get("tool_calls") or ()
    ]
    return value in called, f"tools called: {', '.join(map(str, called)) or 'none'}"
