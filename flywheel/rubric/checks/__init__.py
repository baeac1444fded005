"""Criteria that need no judge: checks of the answer and of the steps that led to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from flywheel.errors import CheckError
from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks.bound import bounded
from flywheel.rubric.checks.degenerate import is_sound
from flywheel.rubric.checks.found import Found
from flywheel.rubric.checks.json_schema import fits_schema
from flywheel.rubric.checks.language import is_in_language
from flywheel.rubric.checks.math_equal import equals_reference
from flywheel.rubric.checks.python_function import says_yes
from flywheel.rubric.checks.text import (
    contains,
    is_long_enough,
    is_short_enough,
    regex_is_found,
    regex_is_not_found,
)
from flywheel.rubric.checks.tool_calls import nothing_failed, were_called, were_called_in_order
from flywheel.verdict import CriterionResult, Exchange

Check = Callable[[Criterion, Exchange, Rubric | None], Found]

CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "regex": regex_is_found,
        "not-regex": regex_is_not_found,
        "contains": contains,
        "min-length": is_long_enough,
        "max-length": is_short_enough,
        "language": is_in_language,
        "json-schema": fits_schema,
        "math-equal": equals_reference,
        "tool-called": were_called,
        "tool-sequence": were_called_in_order,
        "no-error-span": nothing_failed,
        "degenerate": is_sound,
        "python": says_yes,
    }
)

WHOLE: Final = frozenset({"min-length", "max-length", "json-schema", "python"})
"""Checks that are given whole texts: lengths are counted, half a JSON text is none, and a function is the user's."""


def check(criterion: Criterion, exchange: Exchange, rubric: Rubric | None = None) -> CriterionResult:
    """The result of a criterion that does not ask the judge; `rubric` is where it is from, with the files it names.

    All but the checks in WHOLE look at no more than `bound.MOST` characters of question and answer.

    Raises CheckError when it cannot be decided: no reference, a pattern that hangs, a function that raises.
    """
    looked_at = exchange if criterion.type in WHOLE else bounded(exchange)
    found = CHECKS[criterion.type](criterion, looked_at, rubric)
    choice = "yes" if found.value == 1 else "no" if found.value == 0 else f"{found.value:g}"
    return CriterionResult(criterion.id, choice, found.value, criterion.passes(found.value), found.reason)


def check_all(rubric: Rubric, exchange: Exchange) -> tuple[CriterionResult, ...]:
    """The results of all criteria of a rubric that do not ask the judge.

    Raises CheckError when one cannot be decided, unless a required one failed: then the others do not matter, and
    those without a result are left out.
    """
    results, errors = [], []
    for criterion in rubric.every:
        if criterion.asks_the_judge:
            continue
        try:
            results.append(check(criterion, exchange, rubric))
        except CheckError as error:
            errors.append(error)
    if errors and not fails_required(rubric, results):
        raise errors[0]
    return tuple(results)


def fails_required(rubric: Rubric, results: Iterable[CriterionResult]) -> bool:
    """Whether one of the results is a failed required criterion."""
    required = {criterion.id for criterion in rubric.every if criterion.required}
    return any(not result.passed and result.criterion in required for result in results)


def ask_the_judge(rubric: Rubric, exchange: Exchange) -> bool:
    """Whether the judge has to be asked: it has criteria, and no check has decided or broken."""
    try:
        return bool(rubric.asked) and not fails_required(rubric, check_all(rubric, exchange))
    except CheckError:
        return False
