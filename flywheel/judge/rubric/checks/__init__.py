"""Checks: criteria that code decides without a call to the judge, by type.

Those of patterns, texts and lengths are here, the others in modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import regex

from flywheel.errors import CheckError, CostlyCheckError
from flywheel.judge.rubric.checks.call_format import check_call_format
from flywheel.judge.rubric.checks.degenerate import check_degenerate
from flywheel.judge.rubric.checks.ground_truth import check_expected_tools, check_optimal_steps
from flywheel.judge.rubric.checks.json_schema import check_json_schema
from flywheel.judge.rubric.checks.language import check_language
from flywheel.judge.rubric.checks.math_equal import check_math_equal
from flywheel.judge.rubric.checks.python_check import check_python_function
from flywheel.judge.rubric.checks.tool_calls import (
    check_no_error,
    check_redundant_call,
    check_step_efficiency,
    check_timeout,
    check_tool_called,
    check_tool_sequence,
)
from flywheel.judge.rubric.rubric import Criterion, Rubric
from flywheel.judge.rubric.text import normal_forms, search, trimmed, visible
from flywheel.records.verdict import CriterionResult, Exchange

Check = Callable[[Criterion, Exchange, Rubric | None], tuple[float, str]]
"""Returns how far the criterion is met (0…1) and the reason. Raises CheckError if it cannot be decided."""


def _check_pattern(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    found = search(str(criterion.value), normal_forms(exchange.answer), regex.DOTALL)
    return found == (criterion.type == "regex"), f"the pattern is {'found' if found else 'not found'}"


def _check_contains(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    wanted = tuple(normal_forms(str(criterion.value)))
    found = any(form in text for text in normal_forms(exchange.answer) for form in wanted)
    return found, f"the text is {'found' if found else 'not found'}"


def _check_length(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    limit = int(str(criterion.value))
    is_minimum = criterion.type == "min-length"
    length = len((visible if is_minimum else trimmed)(exchange.answer))
    return length >= limit if is_minimum else length <= limit, f"{length} characters"


CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "regex": _check_pattern,
        "not-regex": _check_pattern,
        "contains": _check_contains,
        "min-length": _check_length,
        "max-length": _check_length,
        "language": check_language,
        "json-schema": check_json_schema,
        "math-equal": check_math_equal,
        "tool-called": check_tool_called,
        "tool-sequence": check_tool_sequence,
        "expected-tools": check_expected_tools,
        "optimal-steps": check_optimal_steps,
        "no-error-span": check_no_error,
        "redundant-call": check_redundant_call,
        "step-efficiency": check_step_efficiency,
        "call-format": check_call_format,
        "timeout": check_timeout,
        "degenerate": check_degenerate,
        "python": check_python_function,
    }
)
WHOLE_TEXT: Final = frozenset({"min-length", "max-length", "json-schema", "python"})
"""Checks that get the whole texts: a part has another length, half a JSON text is invalid, and users' functions get
the task as it is."""
MAX_CHARACTERS: Final = 200_000
"""The other checks see at most this many characters of the question and of the answer, which bounds their time."""


def check(criterion: Criterion, exchange: Exchange, rubric: Rubric | None = None) -> CriterionResult:
    """Decide a criterion that needs no judge. `rubric` is the one it belongs to; it holds the files that it names.

    Raises CheckError if it cannot be decided: no reference or ground truth, a pattern that runs too long, a function
    that raises.
    """
    if criterion.type not in WHOLE_TEXT and max(len(exchange.query), len(exchange.answer)) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        query, answer = (
            text if len(text) <= MAX_CHARACTERS else f"{text[:half]}\n{text[-half:]}"
            for text in (exchange.query, exchange.answer)
        )
        exchange = replace(exchange, query=query, answer=answer)
    try:
        score, reason = CHECKS[criterion.type](criterion, exchange, rubric)
    except TimeoutError as error:
        hint = "Rewrite nested repetitions such as (a+)+ so that there is one way to match."
        raise CheckError(f"decide criterion {criterion.id}", f"its pattern {error}", hint) from None
    value = float(score)
    choice = "yes" if value == 1 else "no" if value == 0 else f"{value:g}"
    return CriterionResult(criterion.id, choice, value, criterion.passes(value), reason)


def check_all(rubric: Rubric, exchange: Exchange) -> tuple[CriterionResult, ...]:
    """Decide all criteria of a rubric that need no judge.

    Raises CheckError if one cannot be decided, unless a required one failed: the verdict is then known, and criteria
    without a result are left out.
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
        raise next((error for error in errors if isinstance(error, CostlyCheckError)), errors[0])
    return tuple(results)


def fails_required(rubric: Rubric, results: Iterable[CriterionResult]) -> bool:
    """Whether a required criterion failed."""
    failed = {result.criterion for result in results if not result.passed}
    return bool(failed) and any(criterion.required and criterion.id in failed for criterion in rubric.every)


def ask_the_judge(rubric: Rubric, exchange: Exchange) -> bool:
    """Whether the judge must be asked: it has criteria, and no required check failed and none raised."""
    try:
        return bool(rubric.asked) and not fails_required(rubric, check_all(rubric, exchange))
    except CheckError:
        return False
