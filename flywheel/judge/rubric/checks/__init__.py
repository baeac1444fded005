"""Checks: criteria that code decides without a call to the judge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from flywheel.errors import CheckError, CostlyCheckError
from flywheel.records.verdict import CriterionResult, Exchange

if TYPE_CHECKING:
    from flywheel.judge.rubric.criterion import Criterion
    from flywheel.judge.rubric.rubric import Rubric

MAX_CHARACTERS: Final = 200_000
"""Most checks see at most this many characters of the question and of the answer, which bounds their time."""


def check(criterion: Criterion, exchange: Exchange, rubric: Rubric | None = None) -> CriterionResult:
    """Decide a criterion that needs no judge. `rubric` is the one it belongs to; it holds the files that it names.

    Raises CheckError if it cannot be decided: no reference or ground truth, a pattern that runs too long, a function
    that raises.
    """
    if not criterion.reads_whole_texts and max(len(exchange.query), len(exchange.answer)) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        query, answer = (
            text if len(text) <= MAX_CHARACTERS else f"{text[:half]}\n{text[-half:]}"
            for text in (exchange.query, exchange.answer)
        )
        exchange = replace(exchange, query=query, answer=answer)
    try:
        score, reason = criterion.decide(exchange, rubric.files if rubric is not None else {})
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
